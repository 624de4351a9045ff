"""The price of scoring: the naive way, N (U + 1) full forward passes, against answer_logprobs.

    python benchmarks/scoring.py                     # 2 CPU cores, about 3 minutes
    python benchmarks/scoring.py --shape qwen3-4b    # the real dimensions, on a GPU

One thing grows at a time: the number of solutions N, of distinct answers U, the length of a
context, and M. Contexts are from half of the given length to all of it.
"""

import random

import measure
import policy
import torch
import torch.nn.functional as F
from policy import Rollout, pad
from tqdm import tqdm
from vocabulary import vocabulary

from cer import answer_logprobs, cer_reward
from data import Parser, Problem, run_script


@torch.no_grad()
def naive_logprobs(model, tokenizer, contexts, answers):
    """The same probabilities by one full forward pass for each answer over all contexts, N rows at
    a time: N (U + 1) rows in all. Logits at the answer's positions only."""
    vocab, length = vocabulary(tokenizer), [len(context) for context in contexts]
    rows = torch.arange(len(contexts), device=model.device)[:, None]
    scores = []
    for answer in answers:
        path = vocab.encode("{" + answer)
        ids = pad([context + path for context in contexts]).to(model.device)
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        at = torch.tensor(length, device=model.device)[:, None] - 1
        at = at + torch.arange(len(path) + 1, device=model.device)  # [N, k + 1]
        logp = model.lm_head(hidden[rows, at]).float().log_softmax(-1)
        target = torch.tensor(path, device=model.device).expand(len(contexts), -1)
        onward = logp[:, :-1].gather(2, target[..., None])[..., 0]
        missing = [vocab.join(path[i:]) + b"}" for i in range(len(path) + 1)]
        closing = [logp[:, i, vocab.beginning_with(m)].logsumexp(1) for i, m in enumerate(missing)]
        scores.append((F.pad(onward.cumsum(1), (1, 0)) + torch.stack(closing, 1)).logsumexp(1))
    return torch.stack(scores)


def group(tokenizer, N, U, length, seed):
    """Contexts of random text and U answers with a reference."""
    rng, vocab = random.Random(seed), vocabulary(tokenizer)
    spelled = [i for i, piece in enumerate(vocab.bytes) if piece.isalnum()]
    boxed = vocab.encode(" so it is \\boxed")
    contexts = [
        rng.choices(spelled, k=rng.randint(length // 2, length) - len(boxed)) + boxed
        for _ in range(N)
    ]
    answers = [rf"\frac{{{rng.randrange(100)}}}{{{i}}}" for i in range(U + 1)]
    return contexts, answers


def cases(N, U, length):
    small_N, small_U = sorted({max(1, N // 4), max(1, N // 2), N}), sorted({1, 4, U, 16})
    yield from (("N", n, (n, min(U, n), length)) for n in small_N)
    yield from (("U", u, (N, u, length)) for u in small_U)
    yield from (("context", c, (N, U, c)) for c in (length // 4, length // 2, length, length * 2))


def main():
    parser = Parser(description=__doc__.split("\n\n")[0])
    measure.add_arguments(parser)
    parser.add_argument("--samples", type=int, default=16, help="N")
    parser.add_argument("--answers", type=int, default=10, help="U, distinct answers")
    parser.add_argument("--context", type=int, help="tokens (default: 512; Qwen3 shapes: 2048)")
    parser.add_argument("--repeats", type=int, default=1, help="of the naive way; ours: 3 times so")
    args = parser.parse_args()
    length = args.context or (2048 if "qwen3" in args.shape else 512)
    model, tokenizer = measure.set_up(args)
    N, U = args.samples, args.answers

    def both(N, U, length):
        contexts, answers = group(tokenizer, N, U, length, args.seed)
        inputs = model, tokenizer, contexts, answers
        answer_logprobs(*inputs)  # warm-up
        ours = measure.measure(lambda: answer_logprobs(*inputs), 3 * args.repeats)
        naive = measure.measure(lambda: naive_logprobs(*inputs), args.repeats)
        return ours, naive, (ours[0] - naive[0]).abs().max().item()

    header = ["grows", "to", "naive, s", "ours, s", "ratio", "naive, GiB", "ours, GiB"]
    header.append("largest difference")
    rows, seen = [], {}
    todo = list(cases(N, U, length))
    for name, value, case in tqdm(todo, unit="case"):
        if case not in seen:
            seen[case] = both(*case)
        (_, ours, our_peak), (_, naive, naive_peak), difference = seen[case]
        row = [name, value, f"{naive:.3g}", f"{ours:.3g}", f"{naive / ours:.1f}"]
        rows.append([*row, f"{naive_peak:.2f}", f"{our_peak:.2f}", f"{difference:.1e}"])
    text = [measure.markdown(header, rows)]

    contexts, answers = group(tokenizer, N, U, length, args.seed)
    vocab = vocabulary(tokenizer)
    given = [answers[i % U] for i in range(N)]
    rollout = Rollout(
        problem=Problem("q", answers[U]),
        prompt=[],
        completions=[c + vocab.encode(f"{{{a}}}") for c, a in zip(contexts, given)],
        texts=[""] * N,
        cuts=[len(context) for context in contexts],
        answers=given,
        truncated=[False] * N,
        entropies=[0.0] * N,
    )
    seconds = {}
    for M in sorted({1, 4, N}):
        reward = measure.measure(lambda M=M: cer_reward(model, tokenizer, rollout, M), 3)
        seconds[M] = reward[1]
    rows = [[M, f"{s:.3g}", f"{s / seconds[1]:.2f}"] for M, s in seconds.items()]
    text.append(measure.markdown(["M", "cer_reward, s", "against M = 1"], rows))
    size = sum(p.numel() for p in model.parameters()) / 1e6
    what = f"{args.shape}: {size:.0f}M parameters, {args.dtype}; N = {N}, U = {U}, "
    what += f"context {length} where not said otherwise. {measure.where()}"
    measure.write("\n\n".join([*text, what]), args.out)
    policy.dist.destroy_process_group()


if __name__ == "__main__":
    run_script(main)
