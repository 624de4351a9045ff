"""Measure speed and memory on random weights of a real shape. Prints JSON lines on scoring (against
full passes), a decode step, sampling in pieces (against one call), a prompt that is read once
(against N times), and one update.

    python benchmarks/gpu.py | tee FILE        # on a GPU: Qwen3-4B's shape, some minutes
    python benchmarks/gpu.py --shape small     # on two CPU cores: 8M parameters, some minutes
    python benchmarks/gpu.py --shape tiny      # to check that it runs
    python benchmarks/gpu.py --model DIR --parts passages --dtype bf16    # a real model's shape
"""

import copy
import functools
import json
import math
import shlex
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository's modules
from benchmarks.measure import commit
from cer import answer_logprobs, log_finished, spellings
from engine import load, memory, policy
from engine.sampling import Row, generate
from engine.tokens import vocabulary
from rloo import TrainingRow, update
from runtime import cli, ranks
from tasks import toy_model

QWEN3_4B = dict(hidden_size=2560, num_hidden_layers=36, intermediate_size=9728, head_dim=128)
QWEN3_4B |= dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=151_936)
SMALL = dict(hidden_size=256, num_hidden_layers=8, intermediate_size=768, head_dim=64)
SMALL |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=4096)
TINY = SMALL | dict(hidden_size=64, num_hidden_layers=2, intermediate_size=192, head_dim=16)
SHAPES = {"tiny": TINY, "small": SMALL, "qwen3-4b": QWEN3_4B}
LENGTHS = {"tiny": 12, "small": 256, "qwen3-4b": 1000}  # tokens of a context or a completion


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, help="(default: qwen3-4b on a GPU, else small)")
    parser.add_argument("--model", help="directory of a model, in place of random weights")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    load.add_flags(parser.add_argument)
    parser.add_argument("--repeats", type=cli.number(int, 1), default=3, help="report the median")
    args = parser.parse_args()
    device = ranks.init_ranks()
    on_gpu = device.type == "cuda"
    shape = args.shape or ("qwen3-4b" if on_gpu else "small")
    torch.manual_seed(0)
    tokenizer = toy_model.build_tokenizer()  # any will do, since the prompts are random
    if args.model:
        shape = args.model
        model, _ = load.load(args.model, device, dtype=args.dtype)
    else:
        model = random_model(shape, device, args.dtype)
    load.reset_generation_config(model, tokenizer)
    load.choose_sampler(model, tokenizer, args.sampler)
    model.generation_config.eos_token_id = [model.config.vocab_size]  # no token
    cpu = f"CPU, {torch.get_num_threads()} threads"
    origin = {
        "shape": shape,
        "dtype": str(model.dtype).removeprefix("torch."),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "hardware": torch.cuda.get_device_name() if on_gpu else cpu,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    with mock.patch("engine.sampling.Row", Ends):
        for part in args.parts:
            for line in PARTS[part](model, tokenizer, LENGTHS.get(shape, 256), args.repeats):
                print(json.dumps({"part": part} | line | origin), flush=True)
    dist.destroy_process_group()


def random_model(shape, device, dtype):
    same = dict(tie_word_embeddings=True, max_position_embeddings=40_960, eos_token_id=1)
    config = transformers.Qwen3Config(**SHAPES[shape], **same)
    dtype = load.find_dtype(dtype, device)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    load.fuse_norms(model)
    return model.eval()


def measure(repeats, function, *inputs):
    """-> (result, {median seconds, peak GPU memory in GiB beyond what was held before})."""
    seconds, on_gpu, held = [], torch.cuda.is_available(), torch.cuda.memory_allocated()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        start = time.perf_counter()
        result = function(*inputs)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30  # 0 on a CPU
    return result, {"seconds": statistics.median(seconds), "peak_gib": peak}


def scoring(model, tokenizer, length, repeats, N=16):
    """Time answer_logprobs against N (U + 1) full passes. Neither needs padding here."""
    for context in length // 2, length, 2 * length:
        contexts = torch.randint(2, len(tokenizer), (N, context)).tolist()
        for U in 1, 4, 10, 16:
            answers = [rf"\frac{{{10 + i}}}{{7}}" for i in range(U + 1)]
            inputs = model, tokenizer, contexts, answers
            answer_logprobs(*inputs)  # warm-up
            scores, ours = measure(repeats, answer_logprobs, *inputs)
            naive_scores, naive = measure(1, full_passes, *inputs)
            line = {"N": N, "U": U, "context": context} | ours
            line["full_passes_seconds"] = naive["seconds"]
            line["ratio"] = naive["seconds"] / ours["seconds"]
            line["largest_difference"] = (scores - naive_scores).abs().max().item()
            yield line


@torch.no_grad()
def full_passes(model, tokenizer, contexts, answers):
    """The same probabilities from one forward pass per answer over all contexts (of equal length),
    with logits at the answer's positions only."""
    scores = []
    for answer in answers:
        [way] = spellings(vocabulary(tokenizer), answer)  # the toy's tokenizer has one
        ids = torch.tensor([context + way.tokens for context in contexts], device=model.device)
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        states = hidden[:, -len(way.tokens) - 1 :]
        scores.append(log_finished(model.lm_head, states, way))
    return torch.stack(scores)


class Ends(Row):
    """Ends when it has as many tokens as the id of its first token says, and not before."""

    def __init__(self, prompt, room):
        super().__init__(prompt, min(room, max(1, prompt[0] - len(prompt))))


def decoding(model, tokenizer, length, repeats, steps=128):
    """Time a decode step: the time of `steps` more tokens after the first 17, divided by `steps`,
    in one piece. The first ones take what a piece takes once."""
    for rows in 32, 128, 256:
        prompts = [[2 * length + 2 * steps] + [9] * (length - 1)] * rows  # none ends before
        in_one_piece = functools.partial(generate, piece=17 + steps)
        _, first = measure(repeats, in_one_piece, model, prompts, 17)
        _, whole = measure(repeats, in_one_piece, model, prompts, 17 + steps)
        step = (whole["seconds"] - first["seconds"]) / steps
        yield {"rows": rows, "tokens": length} | whole | {"seconds": step}


def sampling(model, tokenizer, length, repeats, rows=64, prompt=16):
    """Time 64 rows of log-normal lengths, cut at four times the mean, in pieces and in one call."""
    longest = 4 * length
    prompts, tokens = log_normal(rows, prompt, length, longest)
    for how, piece in ("in pieces", longest // 8), ("one call", longest):
        in_pieces = functools.partial(generate, piece=piece)
        _, taken = measure(1, in_pieces, model, prompts, longest)
        yield {"rows": rows, "how": how} | taken | {"tokens_per_second": tokens / taken["seconds"]}


def log_normal(rows, prompt, mean, longest):
    """-> (prompts of rows whose lengths are log-normal, the tokens that they will sample)."""
    mu = math.log(mean) - 0.7**2 / 2
    lengths = torch.empty(rows).log_normal_(mu, 0.7).clamp(1, longest).long().tolist()
    return [[prompt + length] + [9] * (prompt - 1) for length in lengths], sum(lengths)


def flagship(model, tokenizer, length, repeats, rows=512, prompt=110):
    """Time the samples of a step of the paper's run, of 1,250 tokens in the mean and at most 4,096.
    Beside the actor there are the policy's fp32 weights, and Adam's moments, or not."""
    longest = round(4.096 * length)
    prompts, tokens = log_normal(rows, prompt, 1.25 * length, longest)
    for moments, each in ("in CPU memory", 4), ("on the GPU", 12):
        size = each * sum(p.numel() for p in model.parameters())
        held = torch.empty(size, dtype=torch.uint8, device=model.device)
        _, taken = measure(1, generate, model, prompts, longest)
        del held
        line = {"rows": rows, "moments": moments, "tokens": tokens} | taken
        yield line | {"tokens_per_second": tokens / taken["seconds"]}


def passages(model, tokenizer, length, repeats, N=16, prompt=320, new=24):
    """Time sampling and scoring one question with a passage in its prompt, which is read once, and
    the same with prompts that differ in one token, which are read N times."""
    answers = [rf"\frac{{{10 + i}}}{{7}}" for i in range(5)]
    for how in "equal prompts", "different prompts":
        second = [9] * N if how == "equal prompts" else range(2, N + 2)
        prompts = [[prompt + new, token] + [9] * (prompt - 2) for token in second]
        (completions, _), sampled = measure(repeats, generate, model, prompts, new)
        contexts = [ids + more[:-1] for ids, more in zip(prompts, completions)]
        _, scored = measure(repeats, answer_logprobs, model, tokenizer, contexts, answers)
        both = sampled["seconds"], scored["seconds"]
        seconds = dict(zip(("sample_seconds", "score_seconds"), both)) | {"seconds": sum(both)}
        yield {"N": N, "prompt": prompt, "new": new, "how": how} | seconds


def updating(model, tokenizer, length, repeats, rows=16):
    """Time one optimizer step of the sharded fp32 policy, and compare its memory, from its making
    on, with the program's estimate."""
    tokens, on_gpu = round(1.15 * length), model.device.type == "cuda"
    fixed, of_token = memory.memory_needed(model, False, 1)
    held, estimate = torch.cuda.memory_allocated(), fixed + 16384 * of_token
    trained = policy.Policy(copy.deepcopy(model).float(), dtype=model.dtype)
    batch = [TrainingRow([9] * tokens, [0.0] + [1e-3] * (tokens - 1))] * rows
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-6, fused=on_gpu)
    update(trained, optimizer, batch[:1], 1e-6, 16384)  # warm-up
    _, taken = measure(repeats, update, trained, optimizer, batch, 1e-6, 16384)
    taken["tokens_per_second"] = rows * tokens / taken["seconds"]
    peaks = {"peak": torch.cuda.max_memory_allocated() - held, "estimate": estimate}
    taken |= {f"policy_{name}_gib": size / 2**30 for name, size in peaks.items()}
    # If this is not 0, what memory.py takes for free was too much.
    taken["num_alloc_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    yield {"rows": rows, "tokens": tokens} | taken


PARTS = {
    each.__name__: each for each in (scoring, decoding, sampling, flagship, passages, updating)
}

if __name__ == "__main__":
    cli.run_script(main)
