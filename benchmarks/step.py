"""One training step on synthetic rollouts of realistic lengths: what sampling, each reward and the
update cost in seconds and memory, how well the update uses the card, and what CER adds to a step.

    python benchmarks/step.py                       # 2 CPU cores, about 3 minutes
    python benchmarks/step.py --shape qwen3-4b      # the paper's batch on a GPU

The model has random weights, so where a sample ends is drawn beforehand (log-normal, cut at
--max-new-tokens) and imposed on the sampler; all else is the code that trains. Sampling is measured
as it is, and as one call for each batch of which no finished row is dropped.
"""

import math
import random
from unittest import mock

import measure
import policy
import torch
from policy import Rollout
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from vocabulary import vocabulary

import rewards
from data import Parser, Problem, require, run_script
from rloo import leave_one_out, rloo_rows
from train import update

MEASURED = [name for name in rewards.REWARDS if name != "general-verifier"]


def main():
    parser = Parser(description=__doc__.split("\n\n")[0])
    measure.add_arguments(parser)
    parser.add_argument("--questions", type=int, help="B (default: 4; Qwen3 shapes: 32)")
    parser.add_argument("--samples", type=int, default=16, help="N")
    parser.add_argument("--distinct", type=int, default=10, help="U, distinct answers of a group")
    parser.add_argument("--mean-tokens", type=int, help="(default: 120; Qwen3 shapes: 1000)")
    parser.add_argument("--prompt-tokens", type=int, help="(default: a sixth of the mean)")
    parser.add_argument("--max-new-tokens", type=int, help="(default: 4 times the mean)")
    parser.add_argument("--microbatch-tokens", type=int, default=16384)
    parser.add_argument("--kv-tokens", type=int, help="pretend that the KV cache has so much room")
    parser.add_argument(
        "--rows", type=int, nargs="*", default=[], help="also sample so many at once"
    )
    args = parser.parse_args()
    large = "qwen3" in args.shape
    args.questions = args.questions or (32 if large else 4)
    args.mean_tokens = args.mean_tokens or (1000 if large else 120)
    args.prompt_tokens = args.prompt_tokens or max(2, args.mean_tokens // 6)
    args.max_new_tokens = args.max_new_tokens or 4 * args.mean_tokens + 96 * large  # 4,096
    require(1 <= args.distinct <= args.samples, "--distinct must be from 1 to --samples")

    actor, tokenizer = measure.set_up(args)
    rng, N = random.Random(args.seed), args.samples
    rollouts = [rollout(vocabulary(tokenizer), rng, args) for _ in range(args.questions)]
    lengths = [len(ids) for r in rollouts for ids in r.completions]
    tokens = sum(lengths)

    sampled = [["as train.py does", *sampling(actor, lengths, args, args.max_new_tokens // 16)]]
    sampled.append(["one call a batch", *sampling(actor, lengths, args, args.max_new_tokens)])
    for rows in args.rows:
        plan = sampling(actor, lengths[:rows], args, args.max_new_tokens // 16)
        sampled.append([f"{rows} rows", *plan])

    judge, seconds, peaks, advantages = rewards.Judge(actor, tokenizer, N), {}, {}, []
    for name in tqdm(MEASURED, desc="rewards", leave=False):
        reward = lambda name=name: list(rewards.REWARDS[name](rollouts, judge))  # noqa: E731
        earned, seconds[name], peaks[name] = measure.measure(reward)
        advantages = [leave_one_out(R) for R, _ in earned] if name == "cer" else advantages
    rows = [row for r, A in zip(rollouts, advantages) for row in rloo_rows(r, A)]
    update_seconds, update_peak = updating(args, rows)

    step = sampled[0][1] + seconds["exact"] + update_seconds
    table = [["sample", f"{sampled[0][1]:.3g}", f"{sampled[0][3]:.2f}", ""]]
    for name in MEASURED:
        added = (seconds[name] - seconds["exact"]) / step
        table.append([f"`{name}`", f"{seconds[name]:.3g}", f"{peaks[name]:.2f}", f"{added:.1%}"])
    table.append(["update", f"{update_seconds:.3g}", f"{update_peak:.2f}", ""])
    flops = sum(3 * forward_flops(actor, len(row.ids)) for row in rows)
    used, rate = flops / update_seconds, matrix_rate(actor)
    size = sum(p.numel() for p in actor.parameters()) / 1e6
    whole = step - seconds["exact"] + seconds["cer"]
    sampled = [[name, f"{s:.3g}", f"{t:.0f}", f"{p:.2f}"] for name, s, t, p in sampled]
    text = [
        measure.markdown(["sampling", "s", "useful tokens/s", "peak, GiB"], sampled),
        measure.markdown(["part", "s", "peak, GiB", "adds to a step of exact match"], table),
        f"A step of CER: {whole:.3g} s, {tokens / whole:.0f} tokens/s; the reward, M = {N}, is "
        f"{seconds['cer'] / whole:.1%} of it. The update runs at {used / 1e12:.3g} TFLOP/s, "
        f"{used / rate:.0%} of the measured matrix rate ({rate / 1e12:.3g}; what is recomputed in "
        "the backward pass does not count).",
        f"{args.shape}: {size:.0f}M parameters, {args.dtype}; {args.questions} questions x {N} "
        f"samples, {args.distinct} distinct answers, prompts of {args.prompt_tokens} tokens, "
        f"completions of {tokens / len(lengths):.0f} on average and {max(lengths)} at most. "
        + measure.where(),
    ]
    if torch.cuda.is_available():
        text.append(f"Peak of the whole run: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB.")
    measure.write("\n\n".join(text), args.out)
    policy.dist.destroy_process_group()


def rollout(vocab, rng, args, sigma=0.7):
    """A question with random text of drawn lengths, that ends in one of U answers."""
    spelled = [i for i, piece in enumerate(vocab.bytes) if piece.isalnum()]
    mu = math.log(args.mean_tokens) - sigma**2 / 2  # so that the mean is the mean
    boxed, completions, cuts, answers = vocab.encode("\\boxed"), [], [], []
    for i in range(args.samples):
        answer = str(1000 + i % args.distinct)
        tail = [*vocab.encode(f"{{{answer}}}"), vocab.tokenizer.eos_token_id]
        length = min(args.max_new_tokens, round(rng.lognormvariate(mu, sigma)))
        text = rng.choices(spelled, k=max(1, length - len(boxed) - len(tail))) + boxed
        completions.append(text + tail)
        cuts.append(len(text))
        answers.append(answer)
    return Rollout(
        problem=Problem("q", "1234"),
        prompt=rng.choices(spelled, k=args.prompt_tokens),
        completions=completions,
        texts=[vocab.join(ids).decode() for ids in completions],
        cuts=cuts,
        answers=answers,
        truncated=[False] * args.samples,
        entropies=[0.0] * args.samples,
    )


# ----------------------------------------------------------------------------------------- sampling


def sampling(actor, lengths, args, piece):
    """-> seconds, useful tokens a second, peak GiB. A prompt begins with the number of its row, in
    two digits to the base of 256, so that the sampler can be made to end it where it was drawn."""
    digits = list(range(2, 258))  # ids 0 and 1 are the padding and the stop
    prompts = [
        [digits[row // 256], digits[row % 256]] + [digits[7]] * (args.prompt_tokens - 2)
        for row in range(len(lengths))
    ]
    stop = actor.generation_config.eos_token_id
    ends = torch.tensor(lengths, device=actor.device)

    class Ends(policy.EntropyProbe):
        def __call__(self, ids, logits):
            logits = super().__call__(ids, logits)
            first = (ids > 0).int().argmax(1)  # rows are padded on the left
            row = torch.arange(len(ids), device=ids.device)
            number = (ids[row, first] - 2) * 256 + ids[row, first + 1] - 2
            sampled = ids.shape[1] - first - args.prompt_tokens
            at_end = sampled + 1 >= ends[number]
            logits[:, [0, *stop]] = -torch.inf
            logits[at_end] = -torch.inf
            logits[at_end, stop[0]] = 0.0
            return logits

    room = args.kv_tokens or policy.tokens_that_fit(actor)
    with (
        tqdm(total=len(lengths), desc="sample", unit="row", leave=False) as bar,
        mock.patch.object(policy, "EntropyProbe", Ends),
        mock.patch.object(policy, "tokens_that_fit", lambda model: room),
    ):
        settings = dict(piece=piece, progress=bar.update)
        (rows, _), seconds, peak = measure.measure(
            lambda: policy.generate(actor, prompts, args.max_new_tokens, **settings)
        )
    assert [len(row) for row in rows] == lengths
    return seconds, sum(lengths) / seconds, peak


# ------------------------------------------------------------------------------------------- update


def updating(args, rows):
    """-> (seconds, peak GiB) of an optimizer step of the sharded fp32 policy, after a first one."""
    with policy.compute_device():
        model = AutoModelForCausalLM.from_config(measure.config(args), dtype=torch.float32)
    sharded = policy.shard(model)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-6, weight_decay=0.0)
    update(sharded, optimizer, rows[:1], 1e-6, args.microbatch_tokens)
    _, seconds, peak = measure.measure(
        lambda: update(sharded, optimizer, rows, 1e-6, args.microbatch_tokens)
    )
    return seconds, peak


def forward_flops(model, length):
    """Of one row: the matrices, and causal attention."""
    config = model.config
    embedding = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1) - embedding
    heads = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 2 * matrices * length + 2 * heads * length**2


def matrix_rate(model, repeats=5):
    """FLOP/s of a large matrix product in the precision of the update."""
    device = policy.compute_device()
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    a @ b
    _, seconds, _ = measure.measure(lambda: a @ b, repeats)
    return 2 * size**3 / seconds


if __name__ == "__main__":
    run_script(main)
