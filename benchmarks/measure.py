"""Shared by the benchmarks: models of real shapes with random weights, time, memory, and the origin
of a result."""

import contextlib
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine import sampling  # noqa: E402

QWEN3 = dict(num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
QWEN3 |= dict(vocab_size=151_936, max_position_embeddings=40_960)
SMALL = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=4096)
SHAPES = {
    "tiny": SMALL | dict(hidden_size=64, num_hidden_layers=2, intermediate_size=192, head_dim=16),
    "small": SMALL | dict(hidden_size=256, num_hidden_layers=8, intermediate_size=768),
    "qwen3-4b": QWEN3 | dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "qwen3-8b": QWEN3 | dict(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
}


def random_model(config, dtype, device):
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


PROMPT_TOKENS = 16


@contextlib.contextmanager
def prompts_that_end(lengths):
    """-> prompts whose completions have the given lengths. Prompt k begins with token 2 + k, which
    tells a probe inside the sampler when to force the stop, token 1."""

    class Ends(sampling.Probe):
        def __call__(self, ids, logits):
            logits = super().__call__(ids, logits)
            first = (ids > 0).int().argmax(1)  # rows are padded on the left
            row = ids[torch.arange(len(ids), device=ids.device), first] - 2
            ends = torch.tensor(lengths, device=ids.device)[row]
            stop = ids.shape[1] - first - PROMPT_TOKENS + 1 >= ends
            logits[:, :2] = -torch.inf
            logits[stop] = -torch.inf
            logits[stop, 1] = 0.0
            return logits

    with mock.patch.object(sampling, "Probe", Ends):
        yield [[2 + row] + [9] * (PROMPT_TOKENS - 1) for row in range(len(lengths))]


def measure(function, repeats=1):
    """-> (result, median seconds, peak GPU memory in GiB beyond what was held before, or None)."""
    seconds, cuda = [], torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()  # 0 without a GPU
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30 if cuda else None
    return result, statistics.median(seconds), peak


def markdown(head, rows):
    """A Markdown table of text cells."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def commit():
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"


def where():
    """The command, commit, hardware and versions that every result is stored with."""
    cuda = torch.cuda.is_available()
    cpu = f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"
    script = Path(sys.argv[0])
    return {
        "command": " ".join(["python", f"{script.parent.name}/{script.name}", *sys.argv[1:]]),
        "commit": commit(),
        "hardware": torch.cuda.get_device_name() if cuda else cpu,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
