r"""CER in one file: a language model answers, judges its own answers, and learns from that.

    python examples/one_file.py     # five minutes on one CPU core

Right answers stay near 40% for some thirty of its 45 steps, and then climb to about 70%.

This is the whole method with a real (tiny) language model, and nothing is fast. Every answer is
scored after every solution by a full forward pass. Parts 1 to 4 and main() are all that runs here.
Part 5 scores answers for any tokenizer, and can be left for later.

The order to read in: README, docs/lesson.md, which says why the formulas are right, this file, then
cer.py, rollout.py, rloo.py and train.py, which compute the same in batches (tests/test_one_file.py
and test_cer.py compare them), and two_tables.py. This file lacks one thing that they have: it does
not find sampled answers with braces, such as \frac{1}{2}.

From the repository come the toy's questions with reference answers (toy.rows), its tiny Qwen3 after
a short supervised start (toy_model.warm_start), and toy.same_number, which tells us, but not the
training, which answers are right.
"""

import functools
import random
import re
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

sys.path.append(sys.path[0] + "/..")  # where tasks/ is
from tasks import toy, toy_model

# Questions in a step, samples of each, optimizer steps, learning rate, longest completion
B, N, STEPS, LR, MAX_NEW_TOKENS = 16, 8, 45, 6e-4, 32


# 1. Sample N solutions and answers. ---------------------------------------------------------------


def sample(model, tokenizer, prompt):
    """Sample N completions of a prompt -> N lists of token ids, each up to its first stop token."""
    # pi itself, unchanged: Bayes needs solutions that are samples of the prior pi(s|q).
    distribution = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    prompts = torch.tensor([prompt] * N)
    out = model.generate(prompts, max_new_tokens=MAX_NEW_TOKENS, **distribution)
    completions = out[:, len(prompt) :].tolist()
    stop = tokenizer.eos_token_id
    return [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in completions]


def cut(tokenizer, ids):
    r"""Cut a completion at its last closed box -> (the ids of the solution, up to and including
    \boxed; the answer between the braces), or None if no box is closed. (The toy's tokenizer never
    merges \boxed with the brace that follows.)"""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    found = list(re.finditer(r"\\boxed(?=\{([^{}]*)\})", text))
    if not found:
        return None
    length = 0
    while len(tokenizer.decode(ids[:length], skip_special_tokens=True)) < found[-1].end():
        length += 1
    return ids[:length], found[-1][1]


# 2. Reward: R = D^-1 W P. D is a diagonal matrix, which holds the sums of W's rows. ---------------


def log_probs(model, ids):
    """One full forward pass -> [len(ids), V]. Row t is log pi of what comes after ids[t], so the
    row of a token is the one before it."""
    return model(torch.tensor([ids], device=model.device)).logits[0].log_softmax(-1)


@torch.no_grad()
def log_pi(model, tokenizer, context, answer):
    """log pi("{answer}" | context), the log-probability that the model writes this answer and
    closes the box. It is the sum over the answer's tokens, the closing brace included, because
    without it "1" would get at least the probability of "14". The context ends just before the
    brace that opens the box. (In the toy's vocabulary a brace is always a token of its own. For
    others see log_pi_all_ways.)"""
    tokens = tokenizer.encode("{" + answer + "}", add_special_tokens=False)
    logp = log_probs(model, context + tokens)[len(context) - 1 : -1]
    return logp[range(len(tokens)), tokens].sum()


def naive_rewards(model, tokenizer, prompt, completions, reference):
    """R [N] of the completions of one question. An empty box states no answer and gets 0, but its
    solution is a sample like any other and keeps its column in W. Where no box is closed, nothing
    says where the solution ends. So such a sample gets 0 and has no column."""
    boxes = [cut(tokenizer, ids) for ids in completions]
    contexts = [prompt + box[0] for box in boxes if box]
    log_W = {}  # answer -> its row of log W: log pi(answer | s_j, q), one column a closed box
    for answer in {reference, *(box[1] for box in boxes if box)}:
        scores = [log_pi(model, tokenizer, context, answer) for context in contexts]
        log_W[answer] = torch.tensor(scores)
    P = log_W[reference].exp()  # pi(a* | s_j, q)

    R = torch.zeros(len(boxes))
    for i, box in enumerate(boxes):
        if box and box[1]:
            posterior = log_W[box[1]].softmax(0)  # pi(s_j | a_i, q): its row of W over its sum
            R[i] = posterior @ P
    return R


# 3. Advantage, and 4. update. ---------------------------------------------------------------------


def completion_logprobs(model, prompt, ids):
    """log pi of every token of a completion -> [len(ids)]."""
    logp = log_probs(model, prompt + ids)[len(prompt) - 1 : -1]
    return logp[range(len(ids)), ids]


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # in a model this small, threads only wait for each other
    toy_model.warm_start("runs/one_file", seed=0)
    tokenizer = AutoTokenizer.from_pretrained("runs/one_file")
    model = AutoModelForCausalLM.from_pretrained("runs/one_file")  # in eval mode: no dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    questions, order = toy.rows("toy"), random.Random(0)

    print("The mean reward counts verbatim matches, not right answers (Theorem 2).")
    for step in range(1, STEPS + 1):
        mean_reward = verbatim = right = 0.0
        for question in order.sample(questions, B):
            prompt = tokenizer.encode(question["question"] + "\n")  # as in the supervised start
            completions = sample(model, tokenizer, prompt)
            R = naive_rewards(model, tokenizer, prompt, completions, question["answer"])
            advantage = R - (R.sum() - R) / (N - 1)  # minus the mean reward of the other samples
            # R is a constant (see no_grad above). With the gradient through rho, too, the step
            # would be exact match's in the mean, by Theorem 2.
            for ids, A_i in zip(completions, advantage):
                loss = -A_i * completion_logprobs(model, prompt, ids).sum()
                (loss / (B * N)).backward()  # adds to the gradients

            mean_reward += R.mean().item() / B
            boxes = [cut(tokenizer, ids) for ids in completions]
            answers = [box[1] for box in boxes if box]
            verbatim += answers.count(question["answer"]) / (B * N)
            right += sum(toy.same_number(a, question["answer"]) for a in answers) / (B * N)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        counted = f"mean reward {mean_reward:.3f} (verbatim matches {verbatim:.3f})"
        print(f"step {step}/{STEPS}  right answers {right:.0%}  {counted}")


# 5. log_pi for any tokenizer. Nothing here calls it: the tests do. --------------------------------


@functools.cache
def token_bytes(tokenizer):
    """The bytes of every token. (The tokenizer stores each byte as a printable character.)"""
    byte = {character: number for number, character in bytes_to_unicode().items()}
    tokens = tokenizer.convert_ids_to_tokens(range(1 + max(tokenizer.get_vocab().values())))
    special = tokenizer.all_special_tokens
    return [b"" if token in special else bytes(byte[c] for c in token or "") for token in tokens]


@functools.cache
def closers(tokenizer, rest):
    """All tokens that finish an answer of which these bytes are left, the closing brace included.
    Any text may follow the brace within the token."""
    return [v for v, piece in enumerate(token_bytes(tokenizer)) if piece.startswith(rest)]


@torch.no_grad()
def log_pi_all_ways(model, tokenizer, context, answer):
    r"""log_pi for any tokenizer. It is needed where the closing brace shares its token with
    its neighbours, as in most vocabularies. (Where it never does, this is log_pi.)

    If "{14" has the tokens `{`, `1` and `4`, the token that closes the box can come

        right after the context   and begins with  {14}
        after {                   and begins with   14}
        after {1                  and begins with    4}
        after {14                 and begins with     }

    and any text may follow its brace (`}$`, `4}.`). So the answer can be written in many ways: a
    beginning t_1..t_i of its tokens, then one of the tokens that close the box there. No way is the
    start of another, so their probabilities add up.

    The brace of the box can also change the tokens before it. With SmolLM2's tokenizer the answer
    \text{(C)} alone ends in the token `)}`. With the brace of the box after it, it ends in the two
    tokens `)` and `}}`. So the beginnings of both spellings count. A beginning that they share is
    one key of `ways`, so it counts once. (Still rarer ways are left out, so this is a lower bound.)
    """
    finished = f"{{{answer}}}".encode()
    without_brace = tokenizer.encode("{" + answer, add_special_tokens=False)
    with_brace = tokenizer.encode("{" + answer + "}", add_special_tokens=False)
    ways = {}  # beginning -> log pi of the beginning and of a token that closes the box after it
    for tokens in {tuple(without_brace), tuple(with_brace[:-1])}:  # [-1] holds the closing brace
        logp = log_probs(model, [*context, *tokens])[len(context) - 1 :]  # row i: after t_1..t_i
        for i in range(len(tokens) + 1):
            beginning = tokens[:i]
            rest = finished[sum(len(token_bytes(tokenizer)[t]) for t in beginning) :]
            log_beginning = logp[range(i), beginning].sum()  # 0 for the empty beginning
            ways[beginning] = log_beginning + logp[i, closers(tokenizer, rest)].logsumexp(0)
    return torch.stack(list(ways.values())).logsumexp(0)


if __name__ == "__main__":
    main()
