"""Of steps in one direction, which part arrives in weights that are rounded to the nearest bf16?

    python experiments/rounding/arrives.py MODEL.safetensors

Reads the matrices of the first four layers. A step moves each weight by the learning rate, up or
down, as Adam's does. The page says which weights: those of a file, and the same after rounding to
bf16, as a released model has them.
"""

import re
import sys

import torch
from safetensors import safe_open

RATE = 5e-6


def arrives(start, steps):
    """The movement of the rounded weights along that of the exact ones -> both, squared and summed.
    start: fp32 weights."""
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(0, 2, start.shape, generator=generator) * 2.0 - 1
    exact = RATE * steps * sign
    rounded = (start + exact).bfloat16().float() - start.bfloat16().float()
    return torch.stack([(rounded * exact).sum(), (exact * exact).sum()]).double()


def main():
    with safe_open(sys.argv[1], "pt") as file:
        names = [name for name in file.keys() if re.search(r"\.[0-3]\.", name)]
        weights = [W for W in map(file.get_tensor, names) if W.dim() == 2]
    count = sum(W.numel() for W in weights)
    off = sum((W != W.bfloat16()).sum().item() for W in weights) / count
    print(f"{count:,} weights, of which {off:.1%} are no bf16 numbers")
    for name, of in (
        ("of the file", torch.Tensor.float),
        ("as bf16", lambda W: W.bfloat16().float()),
    ):
        for steps in 1, 10, 30:
            along, exact = sum(arrives(of(W), steps) for W in weights)
            print(f"{name}, {steps} steps at {RATE:g}: {along / exact:.4f} arrives")


if __name__ == "__main__":
    main()
