"""Measure speed and memory on random weights of a real shape. Prints JSON lines on scoring (against
full passes), a decode step, sampling in pieces (against one call), and one update.

    python benchmarks/gpu.py | tee FILE        # on a GPU: Qwen3-4B's shape, some minutes
    python benchmarks/gpu.py --shape small     # on two CPU cores: 8M parameters, some minutes
    python benchmarks/gpu.py --shape tiny      # to check that it runs
"""

import json
import math
import random
from unittest import mock

import torch
import torch.distributed as dist
from measure import SHAPES, measure, prompts_that_end, random_model, where
from transformers import Qwen3Config

from cer import answer_logprobs, closing_tokens, log_finished
from engine import cli, load, policy, ranks
from engine.sampling import generate
from engine.tokens import pad, vocabulary
from rloo import TrainingRow, update
from tasks import toy

LENGTHS = {"tiny": 12, "small": 256}  # for the other shapes it is 1,000 tokens


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, help="(default: qwen3-4b on a GPU, else small)")
    parser.add_argument("--repeats", type=cli.number(int, 1), default=3, help="report the median")
    args = parser.parse_args()
    device = ranks.init_ranks()
    on_gpu = device.type == "cuda"
    shape = args.shape or ("qwen3-4b" if on_gpu else "small")
    length, dtype = LENGTHS.get(shape, 1000), torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)
    tokenizer = toy.build_tokenizer()  # any will do, since the weights are random
    config = Qwen3Config(eos_token_id=1, **SHAPES[shape])
    model = random_model(config, dtype, device).eval()
    load.reset_generation_config(model, tokenizer)
    origin = {"shape": shape, "dtype": str(dtype).removeprefix("torch."), **where()}
    parts = scoring, decoding, sampling, updating
    for part in parts:
        for line in part(model, tokenizer, length, args.repeats):
            print(json.dumps({"part": part.__name__, **line, **origin}), flush=True)
    dist.destroy_process_group()


def scoring(model, tokenizer, length, repeats, N=16):
    """Time answer_logprobs against N (U + 1) full passes. Neither needs padding here."""
    rng, vocab = random.Random(0), vocabulary(tokenizer)
    spelled, boxed = [i for i, b in enumerate(vocab.bytes) if b.isalnum()], vocab.encode(" \\boxed")
    for context in length // 2, length, 2 * length:
        contexts = [rng.choices(spelled, k=context - len(boxed)) + boxed for _ in range(N)]
        for U in 1, 4, 10, 16:
            answers = [rf"\frac{{{10 + i}}}{{7}}" for i in range(U + 1)]
            inputs = model, tokenizer, contexts, answers
            answer_logprobs(*inputs)  # warm-up
            scores, ours, peak = measure(lambda: answer_logprobs(*inputs), repeats)  # noqa: B023
            naive_scores, naive, naive_peak = measure(lambda: full_passes(*inputs))  # noqa: B023
            difference = (scores - naive_scores).abs().max().item()
            yield {
                "N": N,
                "U": U,
                "context": context,
                "seconds": ours,
                "full_passes_seconds": naive,
                "ratio": naive / ours,
                "largest_difference": difference,
                "peak_gib": peak,
                "full_passes_peak_gib": naive_peak,
            }


@torch.no_grad()
def full_passes(model, tokenizer, contexts, answers):
    """The same probabilities from one forward pass per answer over all contexts (of equal length),
    with logits at the answer's positions only."""
    vocab, scores = vocabulary(tokenizer), []
    for answer in answers:
        path = vocab.encode("{" + answer)
        ids = pad([context + path for context in contexts]).to(model.device)
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        states = hidden[:, -len(path) - 1 :]
        scores.append(log_finished(model.lm_head, states, path, closing_tokens(vocab, path)))
    return torch.stack(scores)


def decoding(model, tokenizer, length, repeats, steps=16):
    """Time a decode step: the time of 17 tokens minus that of 1, divided by 16."""
    never = {"suppress_tokens": model.generation_config.eos_token_id}
    for rows in 32, 128, 256:
        prompts = [[9] * length for _ in range(rows)]

        def seconds(tokens, prompts=prompts):
            sampled = lambda: generate(model, prompts, tokens, piece=tokens)  # noqa: E731
            return measure(sampled, repeats)[1:]

        with mock.patch.multiple(model.generation_config, **never):
            (first, _), (whole, peak) = seconds(1), seconds(1 + steps)
        yield {"rows": rows, "tokens": length, "seconds": (whole - first) / steps, "peak_gib": peak}


def sampling(model, tokenizer, length, repeats, rows=64):
    """Time 64 rows of log-normal lengths, cut at four times the mean, in pieces and in one call."""
    rng, longest, sigma = random.Random(0), 4 * length, 0.7
    mu = math.log(length) - sigma**2 / 2  # so that the mean is the length
    lengths = [min(longest, max(1, round(rng.lognormvariate(mu, sigma)))) for _ in range(rows)]
    with prompts_that_end(lengths) as prompts:
        for name, piece in ("in pieces", longest // 8), ("one call", longest):
            sampled = lambda: generate(model, prompts, longest, piece=piece)  # noqa: B023, E731
            _, seconds, peak = measure(sampled)
            rate = {"tokens_per_second": sum(lengths) / seconds}
            yield {"rows": rows, "how": name, "seconds": seconds, **rate, "peak_gib": peak}


def updating(model, tokenizer, length, repeats, rows=16):
    """Time one optimizer step of the sharded fp32 policy, also as a share of the rate of a large
    matrix product. What the backward pass recomputes is not counted."""
    tokens, config = round(1.15 * length), model.config
    trained = policy.Policy(random_model(config, torch.float32, model.device))
    batch = [TrainingRow([9] * tokens, [0.0] + [1e-3] * (tokens - 1))] * rows
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-6, fused=model.device.type == "cuda")
    update(trained, optimizer, batch[:1], 1e-6, 16384)  # warm-up
    _, seconds, peak = measure(lambda: update(trained, optimizer, batch, 1e-6, 16384), repeats)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    matrices -= 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    heads = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    flops = 3 * rows * (2 * matrices * tokens + 2 * heads * tokens**2)
    size = 8192 if model.device.type == "cuda" else 1024
    square = torch.randn(size, size, device=model.device, dtype=model.dtype)
    rate = 10 * 2 * size**3 / measure(lambda: [square @ square for _ in range(10)], repeats)[1]
    yield {
        "rows": rows,
        "tokens": tokens,
        "seconds": seconds,
        "peak_gib": peak,
        "tflops_per_second": flops / seconds / 1e12,
        "share_of_matrix_rate": flops / seconds / rate,
    }


if __name__ == "__main__":
    cli.run_script(main)
