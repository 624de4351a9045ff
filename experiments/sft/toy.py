"""Supervised fine-tuning on references alone, on the toy, where an answer must be worked out.

    python experiments/sft/toy.py pilot --steps 2750
    python experiments/sft/toy.py runs --steps 2750 --lr 2e-3
    python experiments/sft/toy.py unseen --steps 2750 --lr 2e-3

Each run starts from the model from which train.py starts with the same seed. It learns the whole
completion `\\boxed{reference}` to the toy's training questions. pass@1 is train.py's: 4 samples of
200 held-out questions. A finished run adds a line to toy.csv.

`unseen`: a fifth of the combinations of numbers and kinds of question are in no training question,
and all held-out questions have these. `cer` is trained on the same questions, by train.py.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pandas

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from runtime import cli  # noqa: E402, F401, I001
import torch  # noqa: E402

from engine.load import load  # noqa: E402
from tasks.toy_model import finetune  # noqa: E402
from engine.tokens import vocabulary  # noqa: E402
from measure import evaluate  # noqa: E402
from runtime.ranks import init_ranks  # noqa: E402
from tasks import toy, toy_model  # noqa: E402
from tasks.data import in_epochs, load_problems  # noqa: E402
from tasks.prompts import encode_prompt  # noqa: E402

CSV, RUNS = Path(__file__).with_name("toy.csv"), ROOT / "runs" / "sft-toy"
BATCH = 64


def pass_at_1(model, tokenizer, seed, held_out):
    problems, samples = load_problems(held_out), toy_model.FLAGS["eval_runs"]
    return evaluate(model, tokenizer, problems, samples, 32, seed)


def write_unseen():
    """The files of `unseen` -> their paths, to train on and held out."""
    _, stories = toy.stories()
    combination = [(story.method, story.n, story.a, story.b) for story in stories]
    held_out = set(random.Random(0).sample(sorted(set(combination)), 36))
    rows = [row for row, of in zip(toy.rows("toy"), combination) if of not in held_out]
    rng, others = random.Random(1), []
    for story, of in zip(stories[2000:], combination[2000:]):
        if of in held_out and len(others) < 200:
            answer = story.answer(rng.choice(toy.FORMS), story.work(story.method)[3])
            row = {"question": story.question(), "answer": answer, "verifier": "toy-truth"}
            others.append(row)
    paths = RUNS / "train.jsonl", RUNS / "unseen.jsonl"
    for path, part in zip(paths, (rows, others)):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    return map(str, paths)


def cer(seed, train, held_out):
    """Train with `cer` as train.py trains the toy -> pass@1 before and after."""
    out = RUNS / f"cer-{seed}"
    flags = toy_model.FLAGS | toy_model.LEARNING_RATE | {"eval_every": 200, "seed": seed}
    flags |= {"dataset": train, "eval_dataset": held_out, "model": RUNS / f"start-{seed}"}
    command = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    subprocess.run([sys.executable, "train.py", *command, f"--out={out}"], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in open(out / "metrics.jsonl")]
    return [line for line in lines if "pass_at_1" in line]


def run(what, seed, lr, steps, train="toy", held_out="toy-test"):
    """Fine-tune the toy's start -> a line of the CSV."""
    start = RUNS / f"start-{seed}"
    if not (start / "tokenizer.json").exists():
        toy_model.warm_start(start, seed)
    model, tokenizer = load(start, "cpu")
    before, _ = pass_at_1(model, tokenizer, seed, held_out)
    encode = vocabulary(tokenizer).encode
    pairs = [
        (encode_prompt(tokenizer, problem), encode(rf"\boxed{{{problem.reference}}}"))
        for problem in load_problems(train)
    ]
    since = time.process_time()
    order = iter(in_epochs(pairs, steps * BATCH, seed))
    finetune(model.train(), order, steps, BATCH, lr, tokenizer.eos_token_id)
    seconds = time.process_time() - since
    after, lines = pass_at_1(model.eval(), tokenizer, seed, held_out)
    print(seed, lr, steps, lines[0]["texts"], lines[0]["references"])
    line = {
        "what": what,
        "seed": seed,
        "lr": lr,
        "steps": steps,
        "passes": steps * BATCH / len(pairs),
    }
    line |= {"seconds": seconds, "before": before["pass_at_1"], "pass@1": after["pass_at_1"]}
    return line | {"stderr": after["stderr"], "exact_match": after["exact_match"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=["pilot", "runs", "unseen"])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, nargs="+", default=[6e-4, 2e-3, 8e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    torch.set_num_threads(1)
    init_ranks()
    RUNS.mkdir(parents=True, exist_ok=True)
    files = [*write_unseen()] if args.what == "unseen" else []
    for lr in args.lr:
        for seed in [10] if args.what == "pilot" else args.seeds:
            line = run(args.what, seed, lr, args.steps, *files)
            if files:
                before, after = cer(seed, *files)
                line |= {"cer before": before["pass_at_1"], "cer": after["pass_at_1"]}
                line["cer stderr"] = after["pass_at_1_stderr"]
            lines = [pandas.read_csv(CSV)] if CSV.exists() else []
            pandas.concat([*lines, pandas.DataFrame([line])]).to_csv(CSV, index=False)
            print(line)


if __name__ == "__main__":
    main()
