r"""CER in one file: a language model answers, judges its own answers, and learns from that.

    python examples/one_file.py                                               # a toy, on a CPU
    python examples/one_file.py --model Qwen/Qwen3-0.6B --dataset math7.5k    # on one GPU
    python examples/one_file.py --model Qwen/Qwen3-0.6B --dataset mine.jsonl  # your own questions

This is the whole method in plain PyTorch. Hugging Face's generate() samples, one batched pass for
each distinct answer fills a row of W, and AdamW takes a step. Start at main(), which has the loop.

The toy takes two minutes on one core. Its right answers stay near 40% for some twenty of its 45
steps, and then climb to about 85%. A model from the hub needs a GPU with 16 bytes a parameter
(fp32 weights, gradients, and Adam's two moments) and room for the samples of a step.

docs/lesson.md says why the formulas are right. cer.py, rollout.py, rloo.py and train.py compute the
same faster, on several GPUs, and can resume (tests/test_one_file.py and test_cer.py compare both
with naive passes). README.md says in which order to read.

From the repository come the model and its stop tokens (load), questions with references, and their
prompts (tasks/), and two things that are no part of the method: verify, which tells us, but not the
training, which answers are right, and spread, without which bf16 would round the first steps away.
"""

import functools
import sys
import time
from dataclasses import replace
from pathlib import Path

import regex
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

sys.path.append(sys.path[0] + "/..")  # where engine/, runtime/ and tasks/ are
from engine.checks import check_sampling
from engine.load import load
from engine.policy import spread
from runtime import cli
from tasks import toy_model
from tasks.data import in_epochs, load_problems
from tasks.prompts import encode_prompt, usable_prompts
from tasks.verifiers import verify


def pad(model, rows):
    """Rows of token ids -> what a model reads. Shorter rows are padded on the left, so that all end
    in the same column, and the mask hides the padding."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    ids, mask = torch.tensor([ids, mask], device=model.device)
    return {"input_ids": ids, "attention_mask": mask}


# 1. Sample N solutions and answers. ---------------------------------------------------------------


def sample(model, prompts, N, max_new_tokens):
    """N completions of each prompt -> for each prompt N lists of token ids, each up to its first
    stop token."""
    inputs = pad(model, [prompt for prompt in prompts for _ in range(N)])
    # pi itself, unchanged: Bayes needs solutions that are samples of the prior pi(s|q).
    unchanged = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    out = model.generate(**inputs, max_new_tokens=max_new_tokens, **unchanged)
    completions = []
    for ids in out[:, inputs["input_ids"].shape[1] :].tolist():
        ends = [t + 1 for t, i in enumerate(ids) if i in model.generation_config.eos_token_id]
        completions.append(ids[: ends[0]] if ends else ids)
    return [completions[i : i + N] for i in range(0, len(completions), N)]


@functools.cache
def token_bytes(tokenizer):
    """{token: the bytes that it spells}. A character can be split between tokens, a byte cannot.
    (The tokenizer stores each byte as a printable character.) Special tokens spell nothing, and
    have no entry."""
    byte = {character: bytes([number]) for number, character in bytes_to_unicode().items()}
    added, spelled = tokenizer.added_tokens_decoder, {}
    for token, i in tokenizer.get_vocab().items():
        if not (i in added and added[i].special):
            spelled[i] = b"".join(byte.get(c, c.encode()) for c in token)
    return spelled


# \boxed and its braces, with any text between them in which braces are balanced: (?1) is group 1
# once more. What follows a backslash, as in \{, is no brace.
BOX = regex.compile(rb"\\boxed(\{(?:\\.|[^\\{}]|(?1))*+\})", regex.DOTALL)


def cut(tokenizer, ids):
    r"""Cut a completion at its last closed box -> (the ids of the solution, up to and including
    \boxed; the answer between the braces), or None if no box is closed. The ids are cut as they
    were sampled, and never tokenised again."""
    # A model's vocabulary is often longer than its tokenizer's. The ids that are left over spell
    # nothing. (A trained model hardly ever samples one, and here it would change no answer.)
    pieces = [token_bytes(tokenizer).get(i, b"") for i in ids]
    boxes = list(BOX.finditer(b"".join(pieces), overlapped=True))
    if not boxes:
        return None
    brace, answer = boxes[-1].start(1), boxes[-1][1][1:-1].decode(errors="replace")
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0)  # where each token ends
    # Two rare cases: the brace is not the first byte of its token; the answer ends in half of a
    # character, which becomes \ufffd.
    if brace not in ends or "\ufffd" in answer:
        return None
    return ids[: (ends <= brace).sum()], answer


# 2. Reward: R = D^-1 W P. D is a diagonal matrix, which holds the sums of W's rows. ---------------


def log_probs(model, contexts, tokens):
    """One forward pass over n contexts, each followed by the same tokens t_1..t_k -> log pi of what
    comes next: after the context, after t_1, ..., after t_k  [n, k + 1, V]."""
    inputs = pad(model, [context + tokens for context in contexts])
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)  # as generate() counts them
    # V logits for each token are many, so only where they are needed.
    out = model(**inputs, position_ids=positions, logits_to_keep=len(tokens) + 1)
    return out.logits.to(torch.promote_types(out.logits.dtype, torch.float32)).log_softmax(-1)


def encode(tokenizer, text):
    """Text -> ids. The name of a special token in it is text like any other."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


@functools.cache
def with_brace(tokenizer):
    """The tokens in which a brace closes, some hundreds, and their bytes."""
    return [(v, piece) for v, piece in token_bytes(tokenizer).items() if b"}" in piece]


@torch.no_grad()
def log_pi(model, tokenizer, contexts, answer):
    r"""log pi("{answer}" | context) after each of n contexts [n]: the log-probability that the
    model writes this answer and closes the box. Without the closing brace "1" would get at least
    the probability of "14", and the probabilities of different answers could exceed 1 in sum. A
    context ends just before the brace that opens the box.

    In most vocabularies the closing brace can share its token with its neighbours. If "{14" has the
    tokens `{`, `1` and `4`, the token that closes the box can come

        right after the context   and begins with  {14}
        after {                   and begins with   14}
        after {1                  and begins with    4}
        after {14                 and begins with     }

    and any text may follow its brace (`}$`, `4}.`). So the answer can be written in many ways: a
    beginning t_1..t_i of its tokens, then one of the tokens that close the box there. No way is the
    start of another, so their probabilities add up. One pass over t_1..t_k has them all.

    The brace of the box can also change the tokens before it. With SmolLM2's tokenizer the answer
    \text{(C)} alone ends in the token `)}`. With the brace of the box after it, it ends in the two
    tokens `)` and `}}`. So the beginnings of both spellings count, and such an answer takes a pass
    for each. A beginning that they share is one key of `ways`, so it counts once. (Still rarer ways
    are left out, so this is a lower bound.)
    """
    spelled = token_bytes(tokenizer)
    alone = encode(tokenizer, "{" + answer)
    closed = encode(tokenizer, "{" + answer + "}")[:-1]  # without the token that holds the brace
    finished = b"".join(spelled[t] for t in alone) + b"}"
    # Nearly always the second spelling is a beginning of the first, and adds no way.
    spellings = [alone] if closed == alone[: len(closed)] else [alone, closed]
    ways = {}  # beginning -> log pi of the beginning and of a token that closes the box after it
    for tokens in spellings:
        logp = log_probs(model, contexts, tokens)
        written = logp[:, range(len(tokens)), tokens]  # of t_1, ..., t_k  [n, k]
        for i in range(len(tokens) + 1):
            beginning = tuple(tokens[:i])
            rest = finished[sum(len(spelled[t]) for t in beginning) :]
            closers = [v for v, piece in with_brace(tokenizer) if piece.startswith(rest)]
            ways[beginning] = written[:, :i].sum(1) + logp[:, i, closers].logsumexp(1)
    return torch.stack(list(ways.values())).logsumexp(0)


def rewards(model, tokenizer, prompt, boxes, references):
    """R [N] of the samples of one question, from what `cut` found in them. references: one or
    several wordings of a*. Any of them is right, so P is the sum of their probabilities. (P of a
    long one is next to nothing, and then so is R. Short references in the model's own words help.)

    An empty box states no answer and gets 0, but its solution is a sample like any other and keeps
    its column in W. Where no box is closed, nothing says where the solution ends. So such a sample
    gets 0 and has no column."""
    R = torch.zeros(len(boxes))
    contexts = [prompt + box[0] for box in boxes if box]
    if not contexts:
        return R
    # References that the tokenizer makes one (é has two codes in Unicode) count once.
    references = {tuple(encode(tokenizer, text)): text for text in references}.values()
    log_W = {}  # answer -> its row of log W: log pi(answer | s_j, q), one column a closed box
    for answer in {*references, *(box[1] for box in boxes if box)}:
        log_W[answer] = log_pi(model, tokenizer, contexts, answer)
    P = sum(log_W[reference].exp() for reference in references)  # pi(a* | s_j, q)
    for i, box in enumerate(boxes):
        if box and box[1]:
            # pi(s_j | a_i, q): its row of W over its sum. The sample's own solution is among the
            # columns, since it has led to this answer. Without it R would be biased. With it alone
            # R would be its P, the same for a right and a wrong answer.
            posterior = log_W[box[1]].softmax(0)
            R[i] = posterior @ P
    return R


# 3. Advantage, and 4. update: in main(). ----------------------------------------------------------


def completion_logprobs(model, prompt, ids):
    """log pi of every token of a completion -> [len(ids)]."""
    return log_probs(model, [prompt], ids)[0, range(len(ids)), ids]


def main():
    args = parse_args()
    B, N = args.questions, args.samples
    model, tokenizer, problems = load_all(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    order = in_epochs(problems, args.steps * B, seed=0)
    torch.manual_seed(0)

    for step in range(1, args.steps + 1):
        start = time.time()
        mean_reward = verbatim = right = 0.0

        # 1. Sample N solutions and answers of each of B questions.
        batch = order[(step - 1) * B : step * B]
        prompts = [encode_prompt(tokenizer, problem) for problem in batch]
        groups = sample(model, prompts, N, args.max_new_tokens)

        for problem, prompt, completions in zip(batch, prompts, groups):
            # 2. Reward: R = D^-1 W P.  [N]
            boxes = [cut(tokenizer, ids) for ids in completions]
            R = rewards(model, tokenizer, prompt, boxes, problem.references)

            # 3. Advantage: minus the mean reward of the other samples.  [N]
            # What does not depend on the sample makes the step less noisy, and leaves its mean as
            # it is. (The others' rewards do depend on it a little: its solution is one of their
            # columns.)
            A = R - (R.sum() - R) / (N - 1)

            # 4. Update. R is a constant (see no_grad above). With the gradient through rho, too,
            # the step would be exact match's in the mean, by Theorem 2: both have the same mean.
            for ids, A_i in zip(completions, A):
                loss = -A_i * completion_logprobs(model, prompt, ids).sum()
                (loss / (B * N)).backward()  # adds to the gradients

            mean_reward += R.mean().item() / B
            verbatim += sum(box[1] in problem.references for box in boxes if box) / (B * N)
            right += sum(verify([(problem, box[1]) for box in boxes if box])) / (B * N)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # By Theorem 2 the mean reward is about the share of verbatim matches. So whether the model
        # learns shows in `right` alone.
        shares = f"right {right:.0%}  mean reward {mean_reward:.3f} (verbatim {verbatim:.3f})"
        print(f"step {step}/{args.steps}  {shares}  {time.time() - start:.1f} s", flush=True)
    model.save_pretrained(args.out)


# Before the loop. ---------------------------------------------------------------------------------


def load_all(args):
    """-> the model, its tokenizer, and the problems that fit it."""
    problems = load_problems(args.dataset)
    if not args.model:
        torch.set_num_threads(1)  # as toy_model.make_model does
        args.model = Path(args.out) / "warm-start"
        toy_model.warm_start(args.model, seed=0)
        # The toy's own verifier is a rule that reads digits only. This one reads all its answers.
        problems = [replace(problem, verifier="toy-truth") for problem in problems]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # In eval mode, so without dropout. In fp32, since bf16 would round Adam's small steps away.
    model, tokenizer = load(args.model, device, check_sampling, dtype="fp32")
    if device == "cuda":
        # A GPU is much faster in bf16. autocast rounds the weights in each pass. If they were not
        # spread over all that rounds to the same number, most of the first steps would be lost.
        model.forward = torch.autocast(device, torch.bfloat16)(model.forward)
        for weight in model.parameters():
            weight.data = spread(weight.data)
    problems, _ = usable_prompts(model, tokenizer, problems, args.dataset, args.max_new_tokens)
    tokenizer.save_pretrained(args.out)  # If this cannot be written, it shows before the training.
    return model, tokenizer, problems


def parse_args():
    """The flags. The defaults are a beginning on one GPU: the paper's learning rate, half of its B
    and N, and a quarter of its new tokens, since all B x N samples have to fit in memory at once.
    The toy has its own."""
    parser = cli.Parser(description="CER in one file. Without flags it trains a toy.")
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", help="Hugging Face id or directory (default: the toy's, made here)")
    add("--dataset", default="math7.5k", help="a name or a file, as for train.py")
    add("--steps", type=count, default=100, help="optimizer steps")
    add("--questions", type=count, default=16, help="B, in a step; all B x N are sampled at once")
    add("--samples", type=cli.number(int, 2), default=8, help="N, of each question")
    add("--max-new-tokens", type=count, default=1024, help="longer completions are cut off")
    add("--lr", type=cli.number(float, 1e-12, 1), default=1e-6, help="learning rate of Adam")
    add("--out", default=time.strftime("runs/%Y%m%d-%H%M%S-one_file"), help="a new directory")
    args = parser.parse_args()
    if not args.model:
        parser.set_defaults(dataset="toy", steps=45, max_new_tokens=32, lr=6e-4)
        args = parser.parse_args()
    cli.require(args.model or args.dataset == "toy", f"--dataset {args.dataset} needs --model")
    cli.require(not Path(args.out).exists(), f"--out {args.out} exists already: name a new one")
    return args


if __name__ == "__main__":
    cli.run_script(main)
