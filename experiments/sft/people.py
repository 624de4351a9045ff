"""Prompting and fine-tuning beside VeriFree, and --lora beside full training, on real questions.

    python experiments/sft/people.py DATA MODEL OUT rows      # the files that the runs read
    python experiments/sft/people.py DATA MODEL OUT passes    # how long to fine-tune
    python experiments/sft/people.py DATA MODEL OUT pilot     # which higher rate for --lora
    python experiments/sft/people.py DATA MODEL OUT runs
    python experiments/sft/people.py DATA MODEL OUT gather    # people.csv
    python experiments/sft/people.py DATA MODEL OUT tables    # from people.csv

DATA holds squad_human.jsonl and fairytaleqa_human.jsonl, MODEL is SmolLM2-135M-Instruct. Each run
is a directory in OUT. What is finished is not run again. Two runs go at a time, one thread each.
"""

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from experiments.people import own_case  # noqa: E402
from tasks.verifiers import same_text, words  # noqa: E402

EXAMPLES = own_case.EXAMPLES.removeprefix("Answer a question about a passage. ") + "\n"
PASSES = 2  # chosen by `passes`
RATE = "5e-4"  # chosen by `pilot`
HELD_OUT = "--runs 4 --max-new-tokens 64 --temperature 1 --top-p 1 --top-k 0"
RECIPE = "--verifier text --reward verifree --questions 4 --samples 8 --max-new-tokens 64"
RECIPE += " --microbatch-tokens 1024"  # more take longer, and memory
RECIPE += " --eval-runs 1 --eval-limit 1 --eval-every 1000 --save-every 10 --keep 1"


# ----------------------------------------------------------------------------------------- the rows


def ask(line, before=""):
    question = f"{before}Passage: {line['passage']}\nQuestion: {line['question'].strip()}\n"
    end = "Solution:" if before else "Reason in one sentence, then box a short answer."
    return question + end


def length(line):
    return len(line["passage"].split())


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def boxed(rows, rng):
    """Each question with one of its references, drawn, as the whole completion."""
    return [
        {"question": row["question"], "solution": rf"\boxed{{{rng.choice(row['answer'])}}}"}
        for row in rows
    ]


def make_rows(args):
    """Those of the page `people` (lines 0 to 149, 150 to 299, 300 to 399), and the others."""
    lines = [json.loads(line) for line in open(args.data / "squad_human.jsonl")]
    random.seed(0)
    demonstrations = []
    for line in lines[:150]:
        if length(line) <= 130:
            reference = random.choice(line["references"])
            sentences = re.split(r'(?<=[.!?])\s+(?=[A-Z"“])', line["passage"])
            has_it = [each for each in sentences if reference in each]
            if has_it and len(has_it[0].split()) <= 50:
                solution = f"{has_it[0]} \\boxed{{{reference}}}"
                demonstrations.append({"question": ask(line), "solution": solution})
    rows = [{"question": ask(line), "answer": line["references"]} for line in lines]
    train = [row for row, line in zip(rows[150:300], lines[150:300]) if length(line) <= 110]
    write(args.out / "demos.jsonl", demonstrations)
    write(args.out / "train.jsonl", train)
    write(args.out / "test.jsonl", rows[300:])
    prompted = [{"question": ask(x, EXAMPLES), "answer": x["references"]} for x in lines[300:]]
    write(args.out / "test-prompted.jsonl", prompted)
    tales = [json.loads(line) for line in open(args.data / "fairytaleqa_human.jsonl")]
    short = [tale for tale in tales if length(tale) <= 110]
    tales = [{"question": ask(tale), "answer": tale["references"]} for tale in short]
    write(args.out / "pilot.jsonl", tales)
    write(args.out / "tenth.jsonl", train[::10])
    rest = [row for k, row in enumerate(train) if k % 10]
    write(args.out / "sft-rest.jsonl", boxed(rest, random.Random("rest")))
    for seed in range(3):
        write(args.out / f"sft-{seed}.jsonl", boxed(train, random.Random(seed)))


# ----------------------------------------------------------------------------------------- the runs


def run(command, done):
    """Run a script, unless the file that it writes last is there, and note its seconds."""
    if not done.exists():
        start = time.time()
        directory = done.parent if done.parent.name != "checkpoints" else done.parents[1]
        with open(f"{directory}.log", "a") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            words_of = [sys.executable, *command.split()]
            subprocess.run(words_of, cwd=ROOT, env=environment, stderr=log, stdout=log, check=True)
        with open(f"{directory}.seconds", "a") as file:
            file.write(f"{time.time() - start:.0f}\n")


def supervised(args, name, start, rows, epochs, seed):
    command = f"sft.py --model {start} --data {rows} --epochs {epochs} --seed {seed}"
    run(f"{command} --out {args.out / name}", args.out / name / "tokenizer_config.json")


def evaluated(args, name, model, rows="test.jsonl", settings=HELD_OUT):
    command = f"evaluate.py --model {model} --dataset {args.out / rows} --verifier text {settings}"
    run(f"{command} --out {args.out / name}", args.out / name / "results.json")


def trained(args, name, flags, rows="train.jsonl", steps=30, seed=0):
    out = args.out / name
    command = f"train.py --model {args.out / 'start'} --dataset {args.out / rows} {RECIPE}"
    command += f" --steps {steps} --seed {seed} {flags}"
    if (out / "config.json").exists():
        command = "train.py --resume"
    run(f"{command} --out {out}", out / "checkpoints" / f"step-{steps}")


def both_ways(args, name, model, rows="test.jsonl"):
    """Held-out samples at temperature 1, and one greedy answer to each question."""
    evaluated(args, f"{name}-sampled", model, rows)
    evaluated(args, f"{name}-greedy", model, rows, "--runs 1 --max-new-tokens 64 --temperature 0")


def passes(args):
    start = args.out / "start"
    supervised(args, "start", args.model, args.out / "demos.jsonl", 3, 0)
    for epochs in 1, PASSES:
        name = f"passes-{epochs}"
        supervised(args, name, start, args.out / "sft-rest.jsonl", epochs, 0)
        settings = HELD_OUT.replace("--runs 4", "--runs 32")
        evaluated(args, f"{name}-tenth", args.out / name, "tenth.jsonl", settings)
        print(epochs, quality(args.out / f"{name}-tenth"))


def pilot(args):
    for rate in "1e-4", "5e-4":
        trained(args, f"pilot-{rate}", f"--lora 32 --lr {rate}", "pilot.jsonl", steps=8)
        metrics = pandas.read_json(args.out / f"pilot-{rate}" / "metrics.jsonl", lines=True)
        print(rate, metrics.reward[-4:].mean())


def train_all(args):
    def verifree(arm, flags, seed):
        name = f"{arm}-{seed}"
        trained(args, name, flags, seed=seed)
        both_ways(args, name, args.out / f"{name}/checkpoints/step-30")

    def lora(rate, seed):
        verifree(f"lora-{rate}", f"--lora 32 --lr {rate}", seed)

    def sft(seed):
        rows = args.out / f"sft-{seed}.jsonl"
        supervised(args, f"sft-{seed}", args.out / "start", rows, PASSES, seed)
        both_ways(args, f"sft-{seed}", args.out / f"sft-{seed}")

    def untrained():
        both_ways(args, "prompted", args.model, "test-prompted.jsonl")
        both_ways(args, "start", args.out / "start")

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(untrained)]
        for seed in range(3):
            jobs += [pool.submit(verifree, "full", "--lr 1e-5", seed), pool.submit(sft, seed)]
            jobs += [pool.submit(lora, RATE, seed)]
        jobs += [pool.submit(lora, rate, 0) for rate in ("1e-5", "1e-4")]
        for job in jobs:
            job.result()


# -------------------------------------------------------------------------------------- the numbers


def f1(one, other):
    one, other = words(one), words(other)
    return 2 * (one & other).total() / max(1, one.total() + other.total())


def samples_of(directory, first=300):
    """A row for each sample of an evaluation. first: the number of its first question."""
    rows = []
    for question, line in enumerate(map(json.loads, open(directory / "samples.jsonl"))):
        for k, answer in enumerate(line["answers"]):
            best = max(f1(answer or "", each) for each in line["references"])
            right = any(same_text(answer or "", each) for each in line["references"])
            row = {"line": first + question, "sample": k, "answer": answer, "text": int(right)}
            row |= {"document": line["document"]} if "document" in line else {}
            row |= {"verbatim": int(answer in line["references"]), "f1": round(best, 3)}
            rows.append(row | {"tokens": line["tokens"][k], "cut": int(line["truncated"][k])})
    return pandas.DataFrame(rows)


def quality(directory):
    samples = samples_of(directory)
    return samples[["text", "verbatim", "f1"]].mean().round(4).to_dict()


def gather(args):
    tables = []
    for path in sorted(args.out.glob("*-sampled")) + sorted(args.out.glob("*-greedy")):
        name, _, decoding = path.name.rpartition("-")
        if (path / "results.json").exists():
            arm, _, seed = name.rpartition("-") if name[-1].isdigit() else (name, "", 0)
            tables.append(samples_of(path).assign(arm=arm, seed=int(seed), decoding=decoding))
    table = pandas.concat(tables)
    first = ["arm", "seed", "decoding"]
    table[first + [name for name in table if name not in first]].to_csv(CSV, index=False)


CSV = Path(__file__).with_name("people.csv")


def read():
    return pandas.read_csv(CSV, keep_default_na=False)


def with_seeds(shares):
    """The mean of a table [questions, seeds], and its standard error over questions and seeds.

    A share is a question's part, a seed's part and a rest, of the samples' chance. The spread of
    the questions' means holds the rest, and that of the seeds' means does, too. So the rest's part
    is subtracted once. It is left where chance makes the two spreads smaller than the rest.
    """
    mean = shares.mean(axis=1).mean()
    squared = shares.mean(axis=1).sem() ** 2
    if shares.shape[1] > 1:
        rest = shares.sub(shares.mean(axis=1), axis=0) - shares.mean() + mean
        freedom = (shares.shape[0] - 1) * (shares.shape[1] - 1)
        of_rest = (rest**2).to_numpy().sum() / freedom / shares.size
        squared = max(squared + shares.mean().sem() ** 2 - of_rest, of_rest)
    return mean, squared**0.5


def difference(samples, one, other, what="text"):
    """One arm minus another, paired by question -> the mean, its standard error, and the number of
    seeds: those that both have, or, where the other was not trained, all of the first."""
    untrained = other in UNTRAINED
    one, other = (
        samples[samples.arm == arm].pivot_table(what, "line", "seed") for arm in (one, other)
    )
    if untrained:
        differences = one.sub(other[0], axis=0)
    else:
        differences = (one - other).dropna(axis=1)  # without the seeds that one of them lacks
    return *with_seeds(differences), differences.shape[1]


def table(decoding):
    """The shares of each arm, as a table."""
    samples = read()
    samples = samples[samples.decoding == decoding]
    rows = {}
    for arm in [arm for arm in ARMS if (samples.arm == arm).any()]:
        own = samples[samples.arm == arm]
        shares = {what: with_seeds(own.pivot_table(what, "line", "seed")) for what in WHAT}
        cells = {what: "{:.3f} ± {:.3f}".format(*share) for what, share in shares.items()}
        cells |= {
            "answered": f"{(own.answer != '').mean():.3f}",
            "cut off": f"{own.cut.mean():.3f}",
        }
        answered = own[own.answer != ""].answer
        cells["words"] = f"{answered.str.split().str.len().mean():.1f}"
        cells |= {"tokens": f"{own.tokens.mean():.0f}", "seeds": str(own.seed.nunique())}
        rows[f"`{arm}`"] = {name: cell.replace("0.", ".") for name, cell in cells.items()}
    return pandas.DataFrame(rows).T


def tables(args):
    for decoding in "sampled", "greedy":
        print(f"{decoding}\n{table(decoding).to_string()}")
    samples = read()
    for decoding, (one, other) in itertools.product(("sampled", "greedy"), PAIRS):
        own = samples[samples.decoding == decoding]
        for what in WHAT:
            mean, error, count = difference(own, one, other, what)
            print(
                f"{decoding}: {one} minus {other}, {what}: {mean:.3f} ± {error:.3f}, {count} seeds"
            )


UNTRAINED, LORA = ["prompted", "start"], ["lora-1e-5", "lora-1e-4", "lora-5e-4"]
TRAINED = ["sft", "full", *LORA]
ARMS = [*UNTRAINED, *TRAINED]
PAIRS = [("sft", "full"), *((arm, "full") for arm in LORA), ("sft", "prompted")]
PAIRS += [(arm, "start") for arm in TRAINED]
SHOWN = {"sampled": ["text", "verbatim", "f1", "answered", "cut off", "words", "tokens", "seeds"]}
SHOWN["greedy"] = ["text", "verbatim", "f1", "answered"]
WHAT = ["text", "verbatim", "f1"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("data", type=Path)
    add("model", type=Path)
    add("out", type=lambda text: Path(text).resolve())
    steps = {"rows": make_rows, "passes": passes, "pilot": pilot, "runs": train_all}
    steps |= {"gather": gather, "tables": tables}
    add("step", choices=steps)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    steps[args.step](args)


if __name__ == "__main__":
    main()
