"""What does rounding to bf16 leave of a step, and of a training?

    python experiments/rounding/rounding.py table --model SMOLLM2 --texts math_train.jsonl
    python experiments/rounding/rounding.py train --model SMOLLM2 --seeds 0 1 2 --jobs 2

The weights with which the model computes are bf16 numbers, as on a GPU. The arithmetic is fp32, so
that a CPU without a bf16 unit is fast enough and nothing but the rounding of weights differs.
"table" takes supervised steps at the paper's learning rate, and rounds the result in three ways.
"train" trains as experiments/toy/compare_rewards.py does, with --rounding dither, nearest and none
(fp32 weights). A finished run adds a line to the CSV, and a second start resumes where it stopped.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas
import torch
import torch.nn.functional as F
from torch.distributed.fsdp._fully_shard import _fsdp_param
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's modules
import train
from benchmarks.measure import commit, markdown
from engine import load
from engine.policy import Policy, spread
from experiments.toy import compare_rewards
from experiments.toy.compare_rewards import RUNS, evaluate, read
from runtime import cli
from runtime.files import checkpoints, read_rows

RESULTS = Path(__file__).with_name("rounding.csv")
ROUNDINGS = ["dither", "nearest", "none"]


def rounded(W):
    return W.bfloat16().float()


# ----------------------------------------------------------------------------------------- a table


def table(model_dir, texts, lr=1e-6, steps=(1, 3, 10, 40)):
    """A row after each of these steps of Adam: the share of weights that rounding changes, how much
    of the movement of the logits is left, and by how much the loss of other texts has fallen. The
    gradients are those at the exact weights."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = [f"{row['problem']}\n{row['solution']}" for row in read_rows(texts)]
    ids = [tokenizer(text).input_ids[:72] for text in rows[:1000]]
    ids = torch.tensor([row for row in ids if len(row) == 72])
    held_out = ids[-6:]
    linear = [m for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    weights = [layer.weight for layer in linear]
    model.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_().data.copy_(rounded(weight))
    begin = [weight.detach().clone() for weight in weights]
    places = [spread(weight) - weight for weight in begin]
    adam = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)

    @torch.no_grad()
    def logits_and_loss(shown):
        """Of the held-out texts, with other weights in the place of the exact ones."""
        exact = [weight.data for weight in weights]
        for weight, other in zip(weights, shown):
            weight.data = other
        logits = model(held_out).logits
        for weight, kept in zip(weights, exact):
            weight.data = kept
        centred = logits - logits.mean(-1, keepdim=True)
        return centred, next_token_loss(logits, held_out).item()

    logits_before, loss_before = logits_and_loss(begin)
    lines = []
    for step in range(1, steps[-1] + 1):
        batch = ids[4 * step - 4 : 4 * step]
        next_token_loss(model(batch).logits, batch).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()
        adam.zero_grad()
        if step not in steps:
            continue
        exact = [weight.detach() for weight in weights]
        shown = {
            "exact": exact,
            "nearest": [rounded(W) for W in exact],
            "dither": [rounded(W + place) for W, place in zip(exact, places)],
        }
        changed = sum((W != W0).sum() for W, W0 in zip(shown["nearest"], begin))
        line = {"step": step, "changed": changed.item() / sum(W.numel() for W in begin)}
        moved = {}
        for name, W in shown.items():
            logits, loss = logits_and_loss(W)
            moved[name] = logits - logits_before
            line[f"loss falls by, {name}"] = loss_before - loss
            along = (moved[name] * moved["exact"]).sum() / moved["exact"].square().sum()
            line[f"movement left, {name}"] = along.item()
        print(line, flush=True)
        lines.append(line)
    return lines


def next_token_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# -------------------------------------------------------------------------------------- a training


def one_run(rounding):
    """train.main() with weights that are rounded wherever the model computes with them. Those that
    are loaded must be bf16 numbers."""

    class Emulated(Policy):
        def __init__(self, model, offload, dtype, _):
            super().__init__(model, offload, dtype)
            for parameter in self.parameters() if rounding == "dither" else []:
                local = parameter.data.to_local()
                local.copy_(spread(local))

        @torch.no_grad()
        def copy_weights(self, actor):
            for copy, trained in zip(actor.parameters(), self.parameters(), strict=True):
                copy.copy_(rounded(trained.full_tensor()))

    if rounding != "none":  # this process does nothing else
        load.Policy = Emulated
        # FSDP casts the shards with this function before it gathers them.
        _fsdp_param._to_dtype_if_needed = lambda W, dtype: rounded(W)
    return train.main()


def train_all(args):
    warm = RUNS / f"rounding-{Path(args.model).name}-warm-start"
    compare_rewards.make(warm, bf16_warm_start, args.model)
    finished = {(line["rounding"], line["seed"], line["steps"]) for line in read(args.out)}
    wanted = [(r, seed, args.steps) for seed in args.seeds for r in args.roundings]
    jobs = sorted((job for job in wanted if job not in finished), key=lambda job: job[0] == "none")
    os.environ["OMP_NUM_THREADS"] = "1"
    recipe = compare_rewards.REAL_RECIPE

    def run(job):
        rounding, seed, steps = job
        out = RUNS / f"rounding-{rounding}-{seed}"
        command = f"--model {warm} --reward cer --seed {seed} --steps {steps} {recipe}"
        command += " --dataset toy --eval-dataset toy-test --save-every 5"
        if steps not in dict(checkpoints(out)):
            command = "--resume" if (out / "config.json").exists() else command
            compare_rewards.run_script(f"{__file__} one {rounding} --out {out} {command}", out)
        line = {"rounding": rounding, "seed": seed, "steps": steps, "commit": commit()}
        return line | evaluate(out, steps, "end")

    with ThreadPoolExecutor(args.jobs) as pool:
        for line in pool.map(run, jobs):
            pandas.DataFrame([*read(args.out), line]).to_csv(args.out, index=False)
    print(report(pandas.DataFrame(read(args.out))))


def bf16_warm_start(directory, model):
    """The start of all runs. Its weights are bf16 numbers, as those of released models are."""
    compare_rewards.warm_start(directory, model)
    start = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    start.save_pretrained(directory)


def report(lines):
    """pass@1 of each run, and the paired differences with the 95% interval of a t-test."""
    by_seed = lines.pivot(index="rounding", columns="seed", values="pass@1 end")
    text = markdown(by_seed.map("{:.3f}".format).rename(columns="seed {}".format), "pass@1")
    for one, other in ("dither", "nearest"), ("none", "nearest"), ("dither", "none"):
        if {one, other} <= {*by_seed.index}:
            ahead = (by_seed.loc[one] - by_seed.loc[other]).dropna()
            half = compare_rewards.T[len(ahead) - 2] * ahead.sem()
            ends = f"({ahead.mean() - half:+.3f} to {ahead.mean() + half:+.3f})"
            text += f"\n{one} minus {other}: {ahead.mean():+.3f} {ends}, {len(ahead)} seeds"
    return text


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("what", choices=["table", "train"])
    add("--model", required=True, help="a directory of SmolLM2-135M-Instruct")
    add("--texts", help="rows with problem and solution, as those of MATH")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--roundings", nargs="+", default=ROUNDINGS, choices=ROUNDINGS)
    add("--steps", type=int, default=10)
    add("--jobs", type=int, default=1)
    add("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    if args.what == "train":
        return train_all(args)
    lines = pandas.DataFrame(table(args.model, args.texts)).set_index("step")
    lines.to_csv(args.out.with_name("rounding-steps.csv"))
    print(markdown(lines.map("{:.5f}".format), "step"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        _, _, how, *flags = sys.argv
        sys.argv = ["train.py", *flags]
        cli.run_script(lambda: one_run(how))
    cli.run_script(main)
