"""What does a step cost with --lora, beside full training? Seconds of its update, and peak memory.

    python benchmarks/lora_step.py

A random Qwen3 of about 100 million parameters is trained on random tokens, in fp32 on a CPU. Each
line is a process of its own, whose peak memory is that of the whole process: Python and torch, the
actor, the policy and its update. Nothing is sampled, since a sample costs the same with both.
"""

import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from pandas import DataFrame
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository's modules
from benchmarks.measure import markdown
from engine.lora import LoraPolicy
from engine.policy import Policy, make_adam
from rloo import TrainingRow, update
from runtime.ranks import init_ranks

LINES = ["start", "0", "8", "32"]  # before a policy is made, full training, two ranks
REPEATS = 3


def measure(rank):
    """One line -> seconds of an update and of the copy to the actor (the median), peak memory in
    MB."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    init_ranks()
    sizes = dict(hidden_size=640, intermediate_size=1920, num_hidden_layers=16, head_dim=64)
    heads = dict(num_attention_heads=10, num_key_value_heads=5)
    config = Qwen3Config(vocab_size=16384, tie_word_embeddings=True, **sizes, **heads)
    model = Qwen3ForCausalLM(config).eval()
    print(f"{model.num_parameters():,} parameters", file=sys.stderr)
    seconds = []
    if rank != "start":
        if rank == "0":
            actor = Qwen3ForCausalLM(config).eval()
            policy = Policy(model)
        else:
            actor, policy = model, LoraPolicy(model, int(rank), "dither", 0)
        optimizer = make_adam(policy)
        rows = [
            TrainingRow(torch.randint(16384, (128,)).tolist(), [0.0] * 32 + [weight] * 96)
            for weight in (1.0, -1.0, 0.5, -0.5)
        ]
        for _ in range(REPEATS + 1):  # the first makes Adam's moments
            start = time.perf_counter()
            update(policy, optimizer, rows, 1e-6, 4096)
            policy.copy_weights(actor)
            seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(statistics.median(seconds[1:]) if seconds else 0.0, peak)


def main():
    table = []
    for rank in LINES:
        command = [sys.executable, __file__, rank]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        seconds, peak = map(float, out.split())
        table.append({"seconds": seconds, "peak MB": peak})
    names = ["the model alone", "full training", *(f"--lora {rank}" for rank in LINES[2:])]
    table = DataFrame(table, names)
    table["seconds / full"] = table.seconds / table.seconds["full training"]
    above = table["peak MB"] - table["peak MB"]["the model alone"]
    table["MB above the model alone"] = above
    print(markdown(table.map("{:.2f}".format), "trained"))


if __name__ == "__main__":
    measure(sys.argv[1]) if sys.argv[1:] else main()
