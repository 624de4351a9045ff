"""Supervised fine-tuning on references alone, on the toy, where an answer must be worked out.

    python experiments/sft/toy.py pilot --steps 1500
    python experiments/sft/toy.py runs --steps 1500 --lr 2e-3

Each run starts from the model from which train.py starts with the same seed. It learns the whole
completion `\\boxed{reference}` to the toy's training questions. pass@1 is train.py's: 4 samples of
200 held-out questions. A finished run adds a line to toy.csv.
"""

import argparse
import sys
import time
from pathlib import Path

import pandas

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from runtime import cli  # noqa: E402, F401, I001
import torch  # noqa: E402

from engine.load import load  # noqa: E402
from tasks.supervised import finetune  # noqa: E402
from engine.tokens import vocabulary  # noqa: E402
from evaluate import evaluate  # noqa: E402
from runtime.ranks import init_ranks  # noqa: E402
from tasks import toy_model  # noqa: E402
from tasks.data import in_epochs, load_problems  # noqa: E402
from tasks.prompts import encode_prompt  # noqa: E402

CSV = Path(__file__).with_name("toy.csv")
BATCH = 64


def pass_at_1(model, tokenizer, seed):
    problems, samples = load_problems("toy-test"), toy_model.FLAGS["eval_runs"]
    summary, lines = evaluate(model, tokenizer, problems, samples, 32, seed)
    return summary, lines


def run(seed, lr, steps):
    """Fine-tune the toy's start -> a line of the CSV."""
    start = ROOT / f"runs/sft-toy/start-{seed}"
    if not (start / "tokenizer.json").exists():
        toy_model.warm_start(start, seed)
    model, tokenizer = load(start, "cpu")
    before, _ = pass_at_1(model, tokenizer, seed)
    encode = vocabulary(tokenizer).encode
    pairs = [
        (encode_prompt(tokenizer, problem), encode(rf"\boxed{{{problem.reference}}}"))
        for problem in load_problems("toy")
    ]
    since = time.process_time()
    order = iter(in_epochs(pairs, steps * BATCH, seed))
    finetune(model.train(), order, steps, BATCH, lr, tokenizer.eos_token_id)
    seconds = time.process_time() - since
    after, lines = pass_at_1(model.eval(), tokenizer, seed)
    print(seed, lr, steps, lines[0]["texts"], lines[0]["references"])
    line = {"seed": seed, "lr": lr, "steps": steps, "passes": steps * BATCH / len(pairs)}
    line |= {"seconds": seconds, "before": before["pass_at_1"], "pass@1": after["pass_at_1"]}
    return line | {"stderr": after["stderr"], "exact_match": after["exact_match"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=["pilot", "runs"])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, nargs="+", default=[6e-4, 2e-3, 8e-3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    init_ranks()
    seeds = [10] if args.what == "pilot" else range(5)
    for lr in args.lr:
        for seed in seeds:
            line = run(seed, lr, args.steps)
            lines = [pandas.read_csv(CSV)] if CSV.exists() else []
            pandas.concat([*lines, pandas.DataFrame([line])]).to_csv(CSV, index=False)
            print(line)


if __name__ == "__main__":
    main()
