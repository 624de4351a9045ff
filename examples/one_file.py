r"""CER in one file: a language model answers, judges its own answers, and learns from that.

    python one_file.py --model Qwen/Qwen3-0.6B --dataset mine.jsonl --eval-dataset held.jsonl
    python examples/one_file.py    # in its repository: a toy, in some minutes on one core of a CPU

This is the whole method. It needs PyTorch, transformers and no other file, so copy it and change
it. A line of mine.jsonl is {"question": "Which bats spread rabies?", "answer": "vampire bats"}, or
has a list of answers, each of which is right. Short ones in the model's own words help most.

The idea. To a question q the model pi writes a solution s, and then an answer a in a box, as in
`3*4=12; 12+2=14 \boxed{14 eggs}`. We know a reference a*, "14". What should "14 eggs" receive?

    rho(a, a*) = the mean of pi(a* | s, q) over solutions s, weighted by how likely s is behind a

Right answers come from the solutions that also lead to "14", whatever their wording. Wrong ones
mostly come from others. rho is estimated from N samples (s_i, a_i), and the model does it itself:

    W_ij = pi(a_i | s_j, q)      how likely answer i is after solution j
    P_j  = pi(a*  | s_j, q)      how likely the reference is after solution j
    R    = D^-1 W P              D is diagonal and holds the sums of W's rows. So each row becomes
                                 a posterior: how likely solution j is behind answer i (Bayes).

Theorem 2 of the paper (arXiv 2603.10624): over the model's own answers the mean of rho is
pi(a* | q), the chance of the reference itself. That is also the mean of exact match, which pays 1
for the reference and 0 for all else. So CER pays no more in the mean, but it spreads the pay: right
answers in other words receive a part. A group of N samples whose rewards are all equal teaches
nothing, and with CER hardly any group is like that.

The update is REINFORCE with a leave-one-out baseline (RLOO). If you come from PPO or GRPO, you will
miss some things:

- No probability ratio, so nothing of PPO's to clip: each sample is used once, by the weights that
  sampled it. (The gradient's norm is clipped, as usual.)
- No value model, no reference model, no KL term. The baseline of a sample is the mean reward of the
  other samples of its question.
- No division by a standard deviation or by a length. The loss is a sum over tokens.
- No mask in the loss. It covers every sampled token: the solution, the box, the text after the box,
  and the stop token. It does not cover the prompt.

What to change, and where: the reward in step 2 of main(), the baseline in step 3, the loss in step
4, the prompt in to_question(), what counts as right in same_text(). Memory: a GPU needs 16 bytes a
parameter (weights, gradients, and Adam's two moments, all in fp32). Beyond that, sampling holds
--rows-at-once samples, a pass of the reward the N samples of one question, and the update a single
sample. Smaller --rows-at-once, --samples and --max-new-tokens need less.

What it does not check: train.py in the repository leaves out questions that are too long for the
model or hold its control tokens, and refuses models on which these formulas do not hold (dropout,
sliding windows, quantised or missing weights); this file trains on all it is given.

Read from the top: main() has the loop, and then come the reward and its probabilities, samples,
tokens, and at the end files and flags.
"""

import argparse
import functools
import json
import random
import re
import sys
import time
from collections import namedtuple
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

Question = namedtuple("Question", "text prompt references")  # prompt: token ids
Box = namedtuple("Box", "solution answer")  # the token ids before the brace, the text in the box


def main():
    args = parse_args()
    B, N = args.questions, args.samples
    model, tokenizer, questions, held_out, is_same = load(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)

    def is_right(box, question):
        """For our eyes only. The training does not know which answers are right."""
        return bool(box) and any(is_same(box.answer, each) for each in question.references)

    def evaluate(when):
        """One sample of each held-out question. The training's random numbers stay as they are."""
        with torch.random.fork_rng():
            samples = sample(model, [question.prompt for question in held_out], args)
        boxes = [cut(tokenizer, ids) for ids in samples]
        if held_out:
            print(f"{when}: {sum(map(is_right, boxes, held_out))}/{len(held_out)} held-out right")

    evaluate("before training")
    for step in range(1, args.steps + 1):
        start, seen = time.time(), []

        # 1. Sample N solutions and answers of each of B questions.
        batch = [questions[i % len(questions)] for i in range((step - 1) * B, step * B)]
        samples = sample(model, [question.prompt for question in batch for _ in range(N)], args)

        for k, question in enumerate(batch):
            completions = samples[k * N : (k + 1) * N]  # N lists of token ids
            boxes = [cut(tokenizer, ids) for ids in completions]  # None where no box is closed
            verbatim = [bool(box) and box.answer in question.references for box in boxes]

            # 2. Reward: R = D^-1 W P, or for comparison 1 where the answer is the reference.  [N]
            R = torch.tensor(verbatim).float()
            if args.reward == "cer":
                R = rewards(model, tokenizer, question.prompt, boxes, question.references)

            # 3. Advantage: minus the mean reward of the other samples of the question.  [N]
            # A baseline that does not depend on the sample leaves the mean step as it is, and takes
            # noise away. (The others' rewards depend on it a little: its solution is a column.)
            A = R - (R.sum() - R) / (N - 1)

            # 4. Update: -advantage * log pi of all tokens of the completion.
            # R was made with these weights, too, but it is a constant here, without a gradient.
            # Otherwise the loss would have a second part, grad R, which pays for judging in another
            # way. With both parts the step would be, in the mean, the gradient of the mean reward,
            # which by Theorem 2 is that of exact match, and CER would be exact match in disguise.
            for ids, A_i in zip(completions, A):
                log_probs = next_token_log_probs(model, [question.prompt], ids)[0]
                loss = -A_i * log_probs[range(len(ids)), ids].sum()
                (loss / (B * N)).backward()  # adds to the gradients

            seen += zip([is_right(box, question) for box in boxes], verbatim, R.tolist())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        # By Theorem 2 the mean reward is near the share of verbatim matches. Whether the model
        # learns shows in the share of right answers.
        shares = [sum(column) / (B * N) for column in zip(*seen)]
        line = "right {:.0%}  verbatim {:.3f}  mean reward {:.3f}".format(*shares)
        print(f"step {step}/{args.steps}  {line}  {time.time() - start:.1f} s", flush=True)
        if step in (1, args.steps) or step % 10 == 0:  # look at the last group
            print(f"\n{question.text}  Reference: {' or '.join(question.references)}")
            for ids, R_i, A_i in zip(completions, R, A):
                print(f"  R {R_i:.3f}  A {A_i:+.3f}  ...{tokenizer.decode(ids)[-70:]!r}")
            evaluate(f"after {step} steps")
    save(model, args.out)


# Reward: R = D^-1 W P. ----------------------------------------------------------------------------


def rewards(model, tokenizer, prompt, boxes, references):
    """R [N] of the samples of one question. references: the wordings of a*. Any of them is right,
    so P is the sum of their probabilities.

    Where no box is closed, nothing says where the solution ends. So such a sample gets 0, and no
    column in W. An empty box states no answer and gets 0, but its solution keeps its column."""
    R = torch.zeros(len(boxes))
    contexts = [prompt + box.solution for box in boxes if box]  # a column of W each
    if not contexts:
        return R
    answers = {*references, *(box.answer for box in boxes if box)}
    # answer -> its row of log W: log pi(answer | s_j, q) for all columns j
    log_row = {answer: log_pi(model, tokenizer, contexts, answer) for answer in answers}
    P = sum(log_row[reference].exp() for reference in references)  # pi(a* | s_j, q)
    for i, box in enumerate(boxes):
        if box and box.answer:
            # The softmax is pi(s_j | a_i, q): the row of W over its sum. Bayes multiplies with the
            # prior pi(s_j | q), too. But likely solutions were sampled more often, so it is
            # counted. The sample's own solution is among the columns, since it has led to this
            # answer. (With it alone, R would be its P, the same for a right and a wrong answer.)
            R[i] = log_row[box.answer].softmax(0) @ P
    return R


@torch.no_grad()
def log_pi(model, tokenizer, contexts, answer):
    r"""log pi("{answer}" | context) after each of n contexts, which end with \boxed  [n].

    The closing brace belongs to the answer. Without it we would ask how likely the text begins with
    the answer, and "1" would get what "14" gets. If a brace were always a token of its own:

        tokens = encode(tokenizer, "{" + answer + "}")
        log_probs = next_token_log_probs(model, contexts, tokens)
        return log_probs[:, range(len(tokens)), tokens].sum(1)

    But in most vocabularies tokens such as `4}` and `}.` close a box, too. So there are several
    ways to write an answer: a beginning t_1..t_i of its tokens, then a token that closes the box
    there. No way is the start of another, so their probabilities add up. One pass over t_1..t_k has
    them all. (Still rarer ways are left out, so this is a lower bound.)
    """
    finished = spell(tokenizer, encode(tokenizer, "{" + answer)) + b"}"
    # A token that closes the box has a brace, as some hundreds have.
    with_brace = [(v, piece) for v, piece in token_bytes(tokenizer).items() if b"}" in piece]
    log_ways = {}  # beginning -> log pi of the beginning and of a closing token right after it
    for tokens in spellings(tokenizer, answer):  # nearly always one
        log_probs = next_token_log_probs(model, contexts, tokens)
        for i in range(len(tokens) + 1):
            # Of "{14}" for example `{14}` is left, then `14}` after `{`, `4}` after `{1`, and `}`.
            rest = finished[len(spell(tokenizer, tokens[:i])) :]
            # A closing token begins like this, and any text may follow its brace.
            closing = [v for v, piece in with_brace if piece.startswith(rest)]
            log_closing = log_probs[:, i, closing].logsumexp(1)  # -inf if there is none
            # Beside it, the log-probability of t_1, ..., t_i.
            log_ways[tuple(tokens[:i])] = log_probs[:, range(i), tokens[:i]].sum(1) + log_closing
    return torch.stack(list(log_ways.values())).logsumexp(0)


def next_token_log_probs(model, contexts, tokens):
    """One forward pass over n contexts, each followed by the same tokens t_1..t_k -> log pi of all
    V tokens of the vocabulary: after the context, after t_1, ..., after t_k  [n, k + 1, V]."""
    inputs = pad(model, [context + tokens for context in contexts])
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)  # as generate() counts them
    with in_bf16(model):
        out = model(**inputs, position_ids=positions, logits_to_keep=len(tokens) + 1)
    return out.logits.float().log_softmax(-1)


def pad(model, rows):
    """Rows of token ids -> what a model reads. Shorter rows are padded on the left, so that all end
    in the same column, and the mask hides the padding."""
    rows = [torch.tensor(row, device=model.device) for row in rows]
    left = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
    return {"input_ids": left(rows), "attention_mask": left([torch.ones_like(row) for row in rows])}


def in_bf16(model):
    """A GPU is much faster in bf16. The weights stay fp32, and are rounded anew in each pass."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda")


# Samples, and where their boxes are. --------------------------------------------------------------


def sample(model, prompts, args):
    """One completion of each prompt -> lists of token ids, each up to its first stop token."""
    # pi itself, unchanged: Bayes needs solutions that are samples of the prior pi(s | q).
    unchanged = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    stops, completions = model.generation_config.eos_token_id, []
    for start in range(0, len(prompts), args.rows_at_once):
        inputs = pad(model, prompts[start : start + args.rows_at_once])
        with in_bf16(model):
            out = model.generate(**inputs, max_new_tokens=args.max_new_tokens, **unchanged)
        for ids in out[:, inputs["input_ids"].shape[1] :].tolist():
            end = next((t for t, token in enumerate(ids) if token in stops), len(ids))
            completions.append(ids[: end + 1])
    return completions


def cut(tokenizer, ids):
    r"""Cut a completion at the brace that opens its last closed \boxed{...} -> Box, or None. The
    ids are cut as they were sampled, and never tokenised again."""
    pieces = [spell(tokenizer, [i]) for i in ids]
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()  # of each token
    opening, answer = last_box(b"".join(pieces)) or (None, "")
    # None without a box, or (both are rare) if its brace is not the first byte of its token, or if
    # the answer ends in half a character, which has become \ufffd.
    if opening in ends and "\ufffd" not in answer:
        return Box([i for i, end in zip(ids, ends) if end <= opening], answer)


def last_box(text):
    r"""The last closed \boxed{...} of these bytes -> (where its brace opens, the answer), or None.
    Braces nest. What follows a backslash, as in \{, is no brace."""
    for box in reversed(list(re.finditer(rb"\\boxed\{", text))):
        opening, depth = box.end() - 1, 0
        for mark in re.finditer(rb"\\.|[{}]", text[opening:], re.DOTALL):
            depth += (mark[0] == b"{") - (mark[0] == b"}")
            if depth == 0:
                return opening, text[opening + 1 : opening + mark.start()].decode(errors="replace")


# Tokens. ------------------------------------------------------------------------------------------


def encode(tokenizer, text):
    """Text -> ids. The name of a special token in it is text like any other."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


def spell(tokenizer, ids):
    """Ids -> bytes. A character can be split between tokens, a byte cannot. Special tokens spell
    nothing, nor do ids that only the model has."""
    return b"".join(token_bytes(tokenizer).get(i, b"") for i in ids)


@functools.cache
def token_bytes(tokenizer):
    """{id: the bytes that it spells}. The tokenizer stores a byte as a printable character."""
    byte = {character: bytes([number]) for number, character in bytes_to_unicode().items()}
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = {i: token for token, i in tokenizer.get_vocab().items() if i not in special}
    return {i: b"".join(byte.get(c, c.encode()) for c in text) for i, text in texts.items()}


def spellings(tokenizer, answer):
    r"""The tokens of "{answer" if nothing follows, and if the brace of the box does, which can
    change the tokens before it: SmolLM2 spells the end of \text{(C)} as `)}`, but with the brace of
    the box after it as `)` and `}}`. If the second is a beginning of the first, as it nearly always
    is, it adds no way to write the answer."""
    alone = encode(tokenizer, "{" + answer)
    before_brace = encode(tokenizer, "{" + answer + "}")[:-1]
    return [alone] if before_brace == alone[: len(before_brace)] else [alone, before_brace]


# Before and after the loop: the model, the questions, the flags. ---------------------------------


def load(args):
    """-> the model, its tokenizer, the questions to train on, those held out, and what says whether
    an answer and a reference are the same (put your own here)."""
    is_same = same_text
    if not args.model:  # The toy of the repository. A copy of this file needs --model.
        sys.path.append(sys.path[0] + "/..")
        from tasks import toy, toy_model

        is_same = toy.same_number  # A reference has one of 8 forms.
        args.model, args.dataset, args.eval_dataset = toy_model.write_toy(Path(args.out))
    torch.manual_seed(args.seed)

    # This is tokenizer.json. AutoTokenizer would build some tokenizers anew, with other rules.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    is_byte_level = spell(tokenizer, encode(tokenizer, "{é 14}")) == "{é 14}".encode()
    require(is_byte_level, f"{args.model}: its tokenizer is not byte-level BPE")
    questions = read_questions(tokenizer, args.dataset)
    # One random order, which comes again in each epoch. (That of train.py's first epoch.)
    questions = random.Random(f"{args.seed} 0").sample(questions, len(questions))
    held_out = read_questions(tokenizer, args.eval_dataset) if args.eval_dataset else []

    # In eval mode, so without dropout. In fp32, since bf16 would round Adam's small steps away.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    # In place of the hub's settings (top-k 20, penalties). Each special token ends a completion.
    stops = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=stops[0])
    if model.device.type == "cuda":
        # The weights of a released model are bf16 numbers, and a step of Adam is far too small to
        # reach the next one, so in_bf16 would round nearly all of the first steps away. Therefore
        # each weight begins at a random place among the numbers that are rounded to the same one.
        for weight in model.parameters():
            gap = torch.exp2(weight.data.abs().log2().floor() - 7)  # to the next bf16 number
            weight.data += gap * (torch.rand_like(gap) - 0.5)
    tokenizer.save_pretrained(args.out)  # If this cannot be written, it shows before the training.
    return model, tokenizer, questions, held_out, is_same


def read_questions(tokenizer, path):
    """A file with a question in each line, as JSON. What is wrong with it is said in one line."""
    questions = []
    try:
        for row in map(json.loads, open(path, "rb")):  # of bytes json finds the encoding
            questions.append(to_question(tokenizer, row["question"], row["answer"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        require(False, f"{path}, line {len(questions) + 1}: {type(error).__name__}: {error}")
    require(questions, f"{path} is empty")
    return questions


def to_question(tokenizer, text, answers):
    """The prompt has the paper's wording, and goes through the chat template if there is one."""
    references = {}  # its token ids: each answer
    for each in answers if isinstance(answers, list) and answers else [answers]:
        # It must come back whole from its own box (brace at byte 6), or no sample could match it.
        # A tab, say, comes from "\text", for which JSON wants "\\text".
        each = str(each).strip(" ") if type(each) in (str, int) else ""
        if min(each, default="") < " " or last_box(b"\\boxed{%b}" % each.encode()) != (6, each):
            raise ValueError(f"{each!r} is no text, empty, or has braces or backslashes alone")
        # Two that the tokenizer makes one (é has two codes in Unicode) count once.
        references[tuple(encode(tokenizer, each))] = each
    system = "You are a helpful assistant."
    user = text + "\nPlease reason step by step, and put your final answer within \\boxed{}."
    ids = tokenizer.encode(f"{system}\n\n{user}\n\n")
    if tokenizer.chat_template:
        chat = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return Question(text, ids, list(references.values()))


def require(condition, message):
    """Wrong input ends the program with one line."""
    if not condition:
        print(message, file=sys.stderr)
        sys.exit(2)


def same_text(answer, reference):
    """Whether both are equal apart from case and white space."""
    return answer.lower().split() == reference.lower().split()


def save(model, directory):
    """Save the model beside its tokenizer. Transformers 4, which many servers use, shall read the
    same model as 5. It looks for RoPE's settings at the top of config.json, and if there are none,
    it takes a base of 10,000. It does not know 5's tokenizer class and list of special tokens, nor
    the names that 5 gave to some settings."""
    config, weight = model.config, model.get_output_embeddings().weight
    # A config can say "tied" where the file has two matrices, which the library then uses.
    config.tie_word_embeddings = weight is model.get_input_embeddings().weight
    model.save_pretrained(directory, max_shard_size="1TB")  # one file
    rope = dict(getattr(config, "rope_parameters", None) or {})
    settings = {old: getattr(config, old) for old in config.attribute_map} | rope
    settings["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": {}}
    for name, entries in ("config.json", settings), ("tokenizer_config.json", tokens):
        path = Path(directory, name)
        path.write_text(json.dumps(json.loads(path.read_text()) | entries, indent=2))
    # Safetensors keeps its file from all other users. Now whoever can read the config reads it.
    Path(directory, "model.safetensors").chmod(path.stat().st_mode)


def parse_args():
    """The flags. The defaults are a beginning on one GPU: the paper's learning rate, half of its
    questions and samples, and a quarter of its new tokens. The toy has its own."""
    is_toy = not any(flag.startswith("--model") for flag in sys.argv)
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", help="Hugging Face id or directory; the toy has none, and other defaults")
    add("--dataset", help="a .jsonl file of questions and answers")
    add("--eval-dataset", help="another one, of which the right answers are counted now and then")
    add("--reward", choices=["cer", "exact"], default="cer", help="exact: 1 for a verbatim match")
    add("--steps", type=int, default=60 if is_toy else 100, help="optimizer steps")
    add("--questions", type=int, default=16, help="B, in a step")
    add("--samples", type=int, default=8, help="N, of each question")
    add("--max-new-tokens", type=int, default=32 if is_toy else 1024, help="in a sample, at most")
    add("--lr", type=float, default=6e-4 if is_toy else 1e-6, help="learning rate of Adam")
    add("--seed", type=int, default=0, help="of the order of the questions and of the samples")
    add("--rows-at-once", type=int, default=200 if is_toy else 32, help="sampled at once")
    add("--out", default=time.strftime("runs/%Y%m%d-%H%M%S-one_file"), help="a new directory")
    args = parser.parse_args()
    require(bool(args.model) == bool(args.dataset), "--model and --dataset need each other")
    require(args.samples > 1, "--samples must be 2 or more: each is compared with the others")
    require(not Path(args.out).exists(), f"--out {args.out} exists: name a new directory")
    return args


if __name__ == "__main__":
    main()
