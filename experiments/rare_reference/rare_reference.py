"""Training with one reference a question, worded as few others word it.

    cd experiments/rare_reference
    python rare_reference.py rows --data DATA --out rows
    python rare_reference.py run --model MODEL --rows rows --out runs    # on a GPU
    python rare_reference.py texts --rows rows --runs runs --out rare-reference.csv
    python rare_reference.py texts ... --readers ONE.jsonl OTHER.jsonl
    python rare_reference.py table rare-reference.csv

DATA has squad_human.jsonl and fairytaleqa_human.jsonl, questions to which several people have given
answers. `rows` makes the rows of training, of the held-out questions and of the supervised start.
`run` makes the start, and trains with each reward and each seed, several at a time, each in a
process of its own (`one`). What has ended is kept, and the same command goes on. `texts` writes a
line for each held-out sample, and beside it rare-reference-steps.csv and rare-reference-pool.jsonl,
the answers to read. A reader's file has a line {"read": [...]} for each line of the pool: for each
of its answers 1, 0, or "?". `table` prints what the page beside it declares.
"""

import collections
import contextlib
import importlib
import itertools
import math
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pandas
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's modules
from benchmarks.measure import ROOT, markdown
from engine.tokens import split_answer
from experiments.copies.copies import copies_working
from experiments.people import own_case
from reward_functions import f1
from runtime import cli
from runtime.files import read_rows, to_jsonl
from tasks.grades import choose_questions, in_doubt
from tasks.verifiers import plain_text

HELD_OUT_SQUAD = own_case.numbers("100-259,340-399")
REWARDS = ["cer", "exact", "overlap", "verifree"]
RECIPE = "--questions 8 --samples 8 --lr 5e-6 --steps 30"

# ---------------------------------------------------------------------------------------- the rows


def rare_reference(references):
    """(F1, reference): of the people's answers of at most five words the one whose largest token F1
    with another one is smallest, the first of several. Answers that are equal as text are one. None
    if there is no such answer, or no other one. Tokens are letters and digits, in lower case."""
    distinct = {}
    for each in references:
        distinct.setdefault(plain_text(each), each)
    distinct = [*distinct.values()]
    tokens = [collections.Counter(re.findall(r"\w+", each.lower())) for each in distinct]
    found = []
    for k, each in enumerate(distinct):
        others = tokens[:k] + tokens[k + 1 :]
        if len(each.split()) <= 5 and others:
            found.append((max(f1(tokens[k], other) for other in others), each))
    return min(found, key=lambda pair: pair[0], default=None)


def make_rows(lines):
    """lines: {data: list of lines} -> {file: rows}. In the rows of training stands one reference,
    in the held-out ones all of them, to tell what equals one as text."""
    made = {"train": [], "train-all": [], "held-out": []}
    for data, of_data in lines.items():
        for k, row in enumerate(own_case.rows(of_data)):
            row |= {"data": data, "line": k}
            rare = rare_reference(row["answer"])
            if rare and rare[0] <= 0.5 and (k in HELD_OUT_SQUAD if data == "squad" else k % 2):
                made["held-out"].append(row)
            elif rare and (data == "fairytaleqa" or (rare[0] <= 0.5 and k < 100)):
                made["train"].append(row | {"answer": rare[1]})
                made["train-all"].append(row)
    groups = read_rows(ROOT / "experiments/asking/asked-texts.jsonl")
    made["start"] = [
        {"question": row["question"], "solution": text}
        for group in groups
        for row in own_case.rows([lines["squad"][group["line"]]])
        for text, answer in zip(group["texts"], group["answers"])
        if answer
    ]
    return made


# ---------------------------------------------------------------------------------------- the runs


def one(share, script, flags):
    """Run train.py, evaluate.py or sft.py here, with a share of the card's memory. Memory is
    planned within it. train.py writes no checkpoint."""
    module = importlib.import_module(script)
    patches = {}
    if torch.cuda.is_available():
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(share)
        left = lambda *_: (int(share * total) - torch.cuda.memory_reserved(), total)  # noqa: E731
        patches["torch.cuda.mem_get_info"] = left
    if script == "train":
        patches["train.save_checkpoint"] = lambda *_: None
        patches["train.check_disk"] = lambda *_: "disk: no checkpoint is written"
    with contextlib.ExitStack() as stack:
        for name, other in patches.items():
            stack.enter_context(mock.patch(name, other, create=True))
        sys.argv = [f"{script}.py", *flags]
        cli.run_script(module.main)


def run(args):
    """The start, its samples, and the runs."""
    args.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * args.minutes
    start = args.out / "start"
    before = args.out / "before"
    held_out = args.rows / "held-out.jsonl"
    command = f"sft --model {args.model} --data {args.rows}/start.jsonl --epochs 1"
    make(start, 0.94, command, ends)
    same = f"--max-new-tokens 80 --verifier text {args.flags}"
    command = f"evaluate --model {start} --dataset {held_out} --runs 4 --temperature 1 --top-p 1"
    make(before, 0.94, f"{command} --top-k 0 {same}", ends)
    answers = [each for row in read_rows(before / "samples.jsonl") for each in row["answers"]]
    boxes = sum(map(bool, answers)) / len(answers)
    print(f"{boxes:.3f} of {len(answers)} samples of the start have a box", flush=True)
    cli.require(boxes >= args.least, f"that is less than {args.least:g}: no result")
    recipe = f"train --model {start} {RECIPE} --eval-dataset {held_out} --eval-runs 4"
    recipe += " --eval-every 1000"

    def train(job):
        seed, name = job
        rows = args.rows / ("train-all.jsonl" if name.endswith("-all") else "train.jsonl")
        its = f"--dataset {rows} --reward {name.removesuffix('-all')} --seed {seed}"
        command = f"{recipe} {its} {same} {args.train_flags}"
        make(args.out / f"{name}-{seed}", 0.94 / args.at_a_time, command, ends)

    with ThreadPoolExecutor(args.at_a_time) as pool:
        list(pool.map(train, itertools.product(args.seeds, args.rewards)))


def make(directory, share, command, ends):
    """Let `one` make this directory in a process of its own, unless it is there or the time is up.
    Until it is complete it has another name."""
    begun = time.monotonic()
    if directory.exists() or begun > ends:
        return
    partial = directory.with_name(f"partial-{directory.name}")
    shutil.rmtree(partial, ignore_errors=True)
    script, *flags = shlex.split(f"{command} --out {partial}")
    one_ = [sys.executable, __file__, "one", f"{share:.4f}", script, *flags]
    threads = {"OMP_NUM_THREADS": f"{max(1, int(os.cpu_count() * share))}"}
    with open(f"{directory}.log", "w") as log:
        options = dict(stdout=log, stderr=log, env=threads | os.environ)
        try:
            code = subprocess.run(one_, timeout=ends - begun, **options).returncode
        except subprocess.TimeoutExpired:
            code = "none, since the time is up"
    if code == 0:
        partial.rename(directory)
    print(f"{directory.name}: {time.monotonic() - begun:.0f} s, exit code {code}", flush=True)


# ------------------------------------------------------------------------------------- the samples


def texts(args):
    """Write the samples, the steps and the pool, and fill in what the readers say."""
    rows = {row["question"]: row for row in read_rows(args.rows / "held-out.jsonl")}
    samples = [*sample_lines("before-0", args.runs / "before/samples.jsonl", rows)]
    steps = []
    for path in sorted(args.runs.glob("*-*/evaluations.jsonl")):
        if not path.parent.name.startswith("partial-"):
            samples += sample_lines(path.parent.name, path, rows)
            name, _, seed = path.parent.name.rpartition("-")
            for line in read_rows(path.with_name("metrics.jsonl")):
                steps.append({"run": name, "seed": seed} | {each: line.get(each) for each in STEP})
    samples = pandas.DataFrame(samples)
    pool = []
    for question, own in samples.groupby("question"):
        row = rows[question]
        case = {"question": question, "references": row["answer"], "answers": [*own.answer]}
        answers = in_doubt(choose_questions([case], 1)).answers.tolist()
        shown = question.removeprefix(own_case.EXAMPLES).strip()
        shown = case | {"question": shown, "answers": answers}
        pool += [{"data": row["data"], "line": row["line"]} | shown] if shown["answers"] else []
    random.Random(0).shuffle(pool)
    if args.readers:
        said = what_is_said(pool, [read_rows(path) for path in args.readers])
        for k, of in samples[samples["read"] == ""].iterrows():
            samples.loc[k, "read"] = said[of.data, of.line, plain_text(of.answer)]
    samples.drop(columns="question").to_csv(args.out, index=False)
    beside = args.out.with_suffix("")
    steps = pandas.DataFrame(steps).dropna().round(5)
    steps.to_csv(f"{beside}-steps.csv", index=False)
    Path(f"{beside}-pool.jsonl").write_text(to_jsonl(pool))
    count = sum(len(line["answers"]) for line in pool)
    print(f"{len(samples)} samples, {count} answers to {len(pool)} questions to read")


STEP = "step", "reward", "answered", "exact_match", "zero_advantage_groups", "solution_tokens"


def sample_lines(run_and_seed, path, rows):
    name, _, seed = run_and_seed.rpartition("-")
    for group in read_rows(path):
        of_group = {key: rows[group["question"]][key] for key in ("question", "data", "line")}
        for i, (answer, text) in enumerate(zip(group["answers"], group["texts"])):
            equal = int(group["right"][i])
            start, _ = split_answer(text) or (0, "")
            line = {"run": name, "seed": seed} | of_group | {"sample": i, "answer": answer or ""}
            line |= {"text": equal, "copy": int(copies_working(answer or "", text[:start]))}
            yield line | {"read": "" if answer and not equal else equal}


def what_is_said(pool, readings):
    """-> {(data, line, answer as text): 1 or 0 where both readers say so, else .5}."""
    said = {}
    for line, *both in zip(pool, *readings, strict=True):
        for answer, *marks in zip(line["answers"], *(of["read"] for of in both), strict=True):
            cli.require({*marks} <= {0, 1, "?"}, f"a reader says {marks}: expected 1, 0 or ?")
            one_word = len({*marks}) == 1 and "?" not in marks
            said[line["data"], line["line"], plain_text(answer)] = marks[0] if one_word else 0.5
    print(
        f"the readers are unsure or differ on {[*said.values()].count(0.5)} of {len(said)} answers"
    )
    return said


# ------------------------------------------------------------------------------------- the numbers


def comparisons(samples):
    """cer minus each other reward, over the seeds with which all four ended -> rows of a table. A
    comparison is tested if there are three such seeds and the one before is above 0."""
    samples = samples[samples.run.isin(REWARDS)]
    ended = samples.groupby("seed").run.transform("nunique") == len(REWARDS)
    if samples[ended].seed.nunique() < 2:
        return
    by = samples[ended].groupby(["run", "seed", "data", "line"])["read"].mean()
    cells = by.groupby(["run", "seed"]).mean().unstack()  # [rewards, seeds]
    rest = cells.sub(cells.mean(axis=1), axis=0) - cells.mean(axis=0) + cells.mean(axis=None)
    rewards, seeds = cells.shape
    v = (rest**2).to_numpy().sum() / ((rewards - 1) * (seeds - 1))
    tested = seeds == 3
    for other in "exact", "overlap", "verifree":
        differences = (by["cer"] - by[other]).groupby(["data", "line"]).mean()
        d = differences.mean()
        error = math.sqrt(2 * v / seeds + differences.var() / len(differences))
        verdict = "undecided" if abs(d) <= 2.2 * error else "above 0" if d > 0 else "below 0"
        yield f"cer - {other}", d, error, d / error, verdict if tested else "not tested"
        tested = tested and verdict == "above 0"


def described(samples, steps):
    """Means over the samples of each run."""
    answered = samples[samples.answer != ""]
    by = samples.groupby("run")
    table = by[["read", "text"]].mean().set_axis(["pass@1", "as text"], axis=1)
    table["answered"] = answered.groupby("run").size() / by.size()
    table["right among answered"] = answered.groupby("run")["read"].mean()
    for data, own in samples.groupby("data"):
        table[data] = own.groupby("run")["read"].mean()
    table["copies"] = by["copy"].mean()
    is_long = samples.answer.str.split().str.len() > 6
    table["over 6 words"] = is_long.groupby(samples.run).mean()
    table["groups with a signal"] = 1 - steps.groupby("run").zero_advantage_groups.mean()
    return table


def tables(path):
    """All numbers of the page, in Markdown."""
    samples = pandas.read_csv(path, keep_default_na=False).astype({"read": float})
    names = ["pass@1", "difference", "SE", "in SE", "verdict"]
    compared = pandas.DataFrame(comparisons(samples), columns=names).set_index("pass@1")
    of_runs = described(samples, pandas.read_csv(f"{path.with_suffix('')}-steps.csv"))
    of_seeds = samples.pivot_table("read", "run", "seed").rename(columns="seed {}".format)
    for corner, table in ("pass@1", compared), ("run", of_runs), ("pass@1", of_seeds):
        shown = table.map(lambda x: x if isinstance(x, str) else f"{x:.3f}").replace("nan", "")
        yield markdown(shown, corner)


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, about, *paths):
        add = commands.add_parser(name, help=about).add_argument
        for path in paths:
            add(f"--{path}", type=Path, required=True)
        return add

    command("rows", "make the rows", "data", "out")
    add = command("run", "make the start, and train", "model", "rows", "out")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--rewards", nargs="+", default=REWARDS, help="NAME, or NAME-all: with all references")
    add("--at-a-time", type=int, default=4, help="runs that share the card")
    add("--least", type=float, default=0.9, help="share of the start's samples with a box")
    add("--minutes", type=float, default=600, help="then what has not ended is stopped")
    add("--flags", default="", help="more flags of train.py and evaluate.py, in one string")
    add("--train-flags", default="", help="more flags of train.py, in one string")
    add = command("one", "run one script in this process")
    add("share", type=float, help="of the card's memory")
    add("script", choices=["train", "evaluate", "sft"])
    add("script_flags", nargs="...")
    add = command("texts", "write the samples, and what has to be read", "rows", "runs", "out")
    add("--readers", type=Path, nargs=2, help="what two readers say of the pool")
    command("table", "print the tables")("file", type=Path, help="of texts")
    args = parser.parse_args()
    if args.command == "rows":
        data = {k: read_rows(args.data / f"{k}_human.jsonl") for k in ("squad", "fairytaleqa")}
        args.out.mkdir(parents=True, exist_ok=True)
        for name, rows in make_rows(data).items():
            (args.out / f"{name}.jsonl").write_text(to_jsonl(rows))
            counts = collections.Counter(row.get("data", "squad") for row in rows)
            print(f"{name}: {len(rows)} rows, {dict(counts)}")
    elif args.command == "one":
        one(args.share, args.script, args.script_flags)
    elif args.command == "table":
        print("\n".join(tables(args.file)))
    else:
        {"run": run, "texts": texts}[args.command](args)


if __name__ == "__main__":
    cli.run_script(main)
