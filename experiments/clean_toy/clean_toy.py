"""Keep and fine-tune, beside every reward, on questions of which nothing was demonstrated.

    python experiments/clean_toy/clean_toy.py tune OUT      # which selection, passes, rate and K
    python experiments/clean_toy/clean_toy.py runs OUT      # what both comparisons need
    python experiments/clean_toy/clean_toy.py rest OUT      # all other arms
    python experiments/clean_toy/clean_toy.py gather OUT --machine 3  # to clean_toy.csv

A *combination* is a kind of question with its three numbers. The toy has 180 of them. Those that
are withheld stand in no demonstration, in no training question, and in no tuning. What is finished
is not run again. `--only K/N` runs every Nth seed, so that several processes share the work.
"""

import argparse
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pandas

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from runtime import cli  # noqa: E402, F401, I001
import torch  # noqa: E402

from cer import check_scoring  # noqa: E402
from engine.checks import check_sampling  # noqa: E402
from engine.export import export  # noqa: E402
from engine.load import load  # noqa: E402
from engine.policy import Policy, make_adam  # noqa: E402
from engine.tokens import vocabulary  # noqa: E402
from measure import evaluate, evaluation, summarize  # noqa: E402
from reward_functions import R_by_name, ask_judges  # noqa: E402
from rloo import TrainingRow, completion_row, leave_one_out, update  # noqa: E402
from rollout import sample  # noqa: E402
from runtime.ranks import init_ranks, seed_everything  # noqa: E402
from tasks import toy, toy_model  # noqa: E402
from tasks.data import in_epochs, load_problems  # noqa: E402
from tasks.prompts import encode_prompt  # noqa: E402

FOLDS, SEEDS, TUNING = range(5), range(3), 100
N, TOKENS, BATCH = 8, 32, 64
KEPT = ["exact", "rule", "cer", "verifree", "overlap"]
NEEDS_SCORES = {"cer", "verifree", "em"}

# -------------------------------------------------------------------------- what nobody has shown


def parts():
    """-> the combinations for tuning (15), those of five whole triples of numbers under all three
    kinds of question (15), and five folds of 30."""
    triples = [*itertools.product(range(2, 5), range(2, 7), range(1, 5))]
    random.Random("triples").shuffle(triples)
    whole, rest = (
        [(kind, *triple) for triple in some for kind in range(3)]
        for some in (triples[:5], triples[5:])
    )
    random.Random("combinations").shuffle(rest)
    return rest[:15], whole, [rest[15 + 30 * fold : 45 + 30 * fold] for fold in FOLDS]


def withheld_of(fold):
    """Of a fold, or for tuning of None: its own combinations, and the whole triples."""
    tuning, whole, folds = parts()
    return (tuning if fold is None else folds[fold]), whole


def write_rows(directory, fold):
    """The questions of a fold: 2,000 to train on, 400 of its withheld combinations, 200 of whole
    triples that are withheld, 160 of others."""
    own, whole = map(set, withheld_of(fold))
    rng = random.Random(f"rows {fold}")
    test, train = toy.stories(withheld=own | whole)
    everything = list(itertools.chain(*toy.stories()))
    rng.shuffle(everything)
    chosen = {
        "train": train[:2000],
        "new": [s for s in everything if s.combination in own][:400],
        "whole": [s for s in everything if s.combination in whole][:200],
        "known": test[:160],
    }
    for name, part in chosen.items():
        verifier = "toy-rule" if name == "train" else "toy-truth"
        rows = [
            {
                "question": s.question(),
                "answer": s.answer(rng.choice(toy.FORMS), s.work(s.method)[3]),
            }
            for s in part
        ]
        text = "".join(json.dumps(row | {"verifier": verifier}) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text)


# ------------------------------------------------------------------------------- keep and fine-tune


def judged_samples(model_path, problems, seed, scored):
    """N samples of each question, judged once -> the groups as judged, and the CPU seconds of
    sampling and of scoring."""
    actor, tokenizer = load(model_path, "cpu", check_sampling, check_scoring)
    seed_everything(seed, "keep")
    judged, seconds = [], {"sample": 0.0, "score": 0.0}
    for start in range(0, len(problems), 64):
        since = time.process_time()
        groups = sample(actor, tokenizer, problems[start : start + 64], N, TOKENS)
        then = time.process_time()
        judges = {"verifier", "actor"} if scored else {"verifier"}
        judged += ask_judges(groups, judges, actor, tokenizer)
        seconds["sample"] += then - since
        seconds["score"] += time.process_time() - then
    return judged, seconds


def kept_rows(judged, reward, selection, most):
    """The samples to fine-tune on -> training rows. Only finished samples count, each distinct text
    once, at most `most` of a question. selection: "mean" keeps what is above the mean of the
    group's others with weight 1; "advantage" gives it this distance as its weight; a number keeps
    what has at least this reward, with weight 1."""
    rows = []
    R_of_all = R_by_name(reward, judged)
    A_of_all = leave_one_out(R_of_all)
    for each, R, A in zip(judged, R_of_all.tolist(), A_of_all.tolist()):
        group, texts = each.group, {}
        for ids, cut, R_i, A_i in zip(group.completions, group.truncated, R, A):
            weight = {"mean": float(A_i > 0), "advantage": max(A_i, 0.0)}.get(selection)
            if weight is None:
                weight = float(R_i >= float(selection))
            if weight > 0 and not cut:
                texts.setdefault(tuple(ids), weight)
        own = random.Random(group.problem.question).sample(sorted(texts), min(most, len(texts)))
        rows += [completion_row(group.prompt, list(ids), texts[ids]) for ids in own]
    return rows


def em_rows(judged, tokenizer):
    """Solutions with the weight P_i / sum P, each followed by the reference: the posterior of
    solutions given the reference, as far as the samples show it."""
    encode, stop, rows = vocabulary(tokenizer).encode, tokenizer.eos_token_id, []
    for each in judged:
        group = each.group
        P = R_by_name("verifree", [each])[0]
        for i, P_i in enumerate((P / P.sum().clamp_min(1e-30)).tolist()):
            if P_i > 0.01:
                answer = encode("{" + group.problem.reference + group.boxes[i].closing)
                rows.append(completion_row(group.prompt, [*group.solution(i), *answer, stop], P_i))
    return rows


def finetune(model_path, rows, passes, rate, seed, directory):
    """Fine-tune on rows by the update of train.py -> CPU seconds. In a batch the weights of all
    tokens have the mean 1."""
    actor, tokenizer = load(model_path, "cpu")
    since = time.process_time()
    policy = Policy(actor)
    optimizer = make_adam(policy)
    steps = max(1, passes * len(rows) // BATCH)
    order = in_epochs(rows, steps * BATCH, seed)
    for step in range(1, steps + 1):
        batch = order[(step - 1) * BATCH : step * BATCH]
        scale = len(batch) / sum(sum(row.weights) for row in batch)
        scaled = [TrainingRow(row.ids, [scale * w for w in row.weights]) for row in batch]
        lr = rate * min(step / (1 + steps // 20), (steps + 1 - step) / steps)
        loss, _ = update(policy, optimizer, scaled, lr, 16384)
        cli.require(loss < float("inf"), f"the loss is {loss}")
    seconds = time.process_time() - since
    plain, _ = load(model_path, "cpu")
    policy.copy_weights(plain)
    export(plain, tokenizer, directory)
    return seconds


def bare_rows(problems, tokenizer):
    encode, stop = vocabulary(tokenizer).encode, tokenizer.eos_token_id
    return [
        completion_row(
            encode_prompt(tokenizer, p), [*encode(rf"\boxed{{{p.reference}}}"), stop], 1.0
        )
        for p in problems
    ]


def rloo(directory, start, reward, rate, seed, steps=200):
    """train.py on the questions of a fold -> CPU seconds."""
    out = directory / f"rloo-{reward}-{rate:g}"
    flags = toy_model.FLAGS | {"lr": rate, "lr_end": 0.1, "steps": steps, "seed": seed}
    flags |= {"dataset": directory / "train.jsonl", "model": start, "reward": reward}
    given = {name: flags[name] for name in flags if not name.startswith("eval")}
    command = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not (out / "checkpoints" / f"step-{steps}").exists():
        subprocess.run(["rm", "-rf", out], check=True)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        words = [sys.executable, "train.py", *command, f"--out={out}"]
        subprocess.run(
            words, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, **quiet
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return out / "checkpoints" / f"step-{steps}", seconds


# ---------------------------------------------------------------------------------------- a seed


def pass_at_1(directory, model_path, names=("new", "whole", "known")):
    """Right samples of each part, 4 at temperature 1, and one greedy answer to each new question;
    how many new questions the majority of 8 samples answers."""
    model, tokenizer = load(model_path, "cpu", check_sampling)
    found = {}
    for name in names:
        summary, _ = evaluate(
            model, tokenizer, load_problems(directory / f"{name}.jsonl"), 4, TOKENS, 0
        )
        found[name] = summary["pass_at_1"]
    new = load_problems(directory / "new.jsonl")
    [lines] = evaluation(model, tokenizer, new, len(new), 1, TOKENS, 0, temperature=0)
    summary = summarize(lines)
    return found | {"greedy": summary["pass_at_1"], "verbatim": summary["exact_match"]}


def majority(directory, model_path):
    """The share of new questions that the answer of most of 8 samples gets right."""
    model, tokenizer = load(model_path, "cpu", check_sampling)
    _, lines = evaluate(model, tokenizer, load_problems(directory / "new.jsonl"), 8, TOKENS, 0)
    right = 0
    for line in lines:
        values = [toy.value_of(answer or "") for answer in line["answers"]]
        values = [value for value in values if value is not None]
        most = max(sorted(set(values)), key=values.count, default=None)
        right += most is not None and most == toy.value_of(line["references"][0])
    return right / len(lines)


class Seed:
    """A start on one fold, and the arms that begin with it. Each arm becomes a line of a CSV."""

    def __init__(self, out, fold, seed):
        self.fold, self.seed = fold, seed
        self.directory = out / f"{'tuning' if fold is None else fold}-{seed}"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.csv = self.directory / "lines.csv"
        self.start = self.directory / "start"
        if not (self.start / "tokenizer_config.json").exists():
            write_rows(self.directory, fold)
            own, whole = withheld_of(fold)
            toy_model.warm_start(self.start, seed, withheld={*own, *whole})
        self.problems = load_problems(self.directory / "train.jsonl")
        if not self.has("start", 0):
            self.add("start", 0, self.start, majority=majority(self.directory, self.start))

    def lines(self):
        return (
            pandas.read_csv(self.csv)
            if self.csv.exists()
            else pandas.DataFrame({"arm": [], "round": []})
        )

    def has(self, arm, round_):
        lines = self.lines()
        return bool(((lines.arm == arm) & (lines["round"] == round_)).any())

    def add(self, arm, round_, model_path, **more):
        line = {"fold": self.fold, "seed": self.seed, "arm": arm, "round": round_}
        line |= pass_at_1(self.directory, model_path) | more
        lines = [each for each in [self.lines(), pandas.DataFrame([line])] if len(each)]
        pandas.concat(lines).to_csv(self.csv, index=False)
        shown = {name: round(x, 3) if isinstance(x, float) else x for name, x in line.items()}
        print(time.strftime("%H:%M:%S"), shown, flush=True)

    def tuned(self, arm, round_, base, rows, passes, rate, drawn=N, **more):
        model_path = self.directory / f"{arm}-{round_}"
        trained = finetune(base, rows, passes, rate, self.seed, model_path)
        samples = drawn * len(self.problems)
        self.add(arm, round_, model_path, samples=samples, kept=len(rows), train=trained, **more)

    def first_round(self, chosen, arms):
        """One set of samples, judged once by all, and one fine-tuning for each arm."""
        arms = [arm for arm in arms if not self.has(f"kept-{arm}", 1)]
        if not arms:
            return
        judged, seconds = judged_samples(self.start, self.problems, self.seed, True)
        _, tokenizer = load(self.start, "cpu")
        for arm in arms:
            if arm == "em":
                rows, choice = em_rows(judged, tokenizer), chosen["verifree"]
            else:
                choice = chosen[arm]
                rows = kept_rows(judged, arm, choice["selection"], choice["most"])
            of_arm = {"sample": seconds["sample"]}
            of_arm["score"] = seconds["score"] if arm in NEEDS_SCORES else 0.0
            self.tuned(
                f"kept-{arm}", 1, self.start, rows, choice["passes"], choice["rate"], **of_arm
            )

    def next_round(self, chosen, arm, round_):
        name = f"kept-{arm}"
        if self.has(name, round_) or not self.has(name, round_ - 1):
            return
        base = self.directory / f"{name}-{round_ - 1}"
        scored = arm in NEEDS_SCORES
        judged, seconds = judged_samples(base, self.problems, self.seed + 1000 * round_, scored)
        choice = chosen[arm]
        rows = kept_rows(judged, arm, choice["selection"], choice["most"])
        self.tuned(name, round_, base, rows, choice["passes"], choice["rate"], **seconds)

    def rloo(self, chosen, reward, start=None, name=None):
        name = name or f"rloo-{reward}"
        if not self.has(name, 1):
            place = self.directory if start is None else self.directory / name
            place.mkdir(exist_ok=True)
            if start is not None:
                (place / "train.jsonl").write_text((self.directory / "train.jsonl").read_text())
            path, seconds = rloo(
                place, start or self.start, reward, chosen["rloo"]["rate"], self.seed
            )
            self.add(name, 1, path, samples=200 * 16 * 8, train=seconds)

    def bare(self, chosen):
        if not self.has("bare", 1):
            _, tokenizer = load(self.start, "cpu")
            rows, choice = bare_rows(self.problems, tokenizer), chosen["bare"]
            self.tuned("bare", 1, self.start, rows, choice["passes"], choice["rate"], drawn=0)


# ---------------------------------------------------------------------------------------- tuning

CHOSEN = Path(__file__).with_name("chosen.json")
TUNED = Path(__file__).with_name("tuning.csv")
SELECTIONS = {"exact": ["0.5", "advantage"], "rule": ["0.5", "advantage"]}
REAL = ["mean", "advantage", "0.1", "0.3"]


def tune(args):
    """Choose by pass@1 on new questions of the tuning part, with one seed of its own: first the
    selection, then the rate, the passes, and K, each with what was chosen before. Of equals the
    first."""
    run = Seed(args.out, None, TUNING)
    tried = []
    judged, _ = judged_samples(run.start, run.problems, TUNING, True)
    _, tokenizer = load(run.start, "cpu")

    def score(arm, rows, **choice):
        if not rows:  # no sample has so high a reward
            return 0.0
        path = run.directory / f"trial-{os.getpid()}"
        seconds = finetune(run.start, rows, choice["passes"], choice["rate"], TUNING, path)
        found = pass_at_1(run.directory, path, names=("new",))
        tried.append({"arm": arm} | choice | {"kept": len(rows), "seconds": seconds} | found)
        print(tried[-1], flush=True)
        return found["new"]

    known = {}

    def best(arm, choices, rows_of):
        def of(choice):
            key = arm, *sorted(choice.items())
            if key not in known:
                known[key] = score(arm, rows_of(choice), **choice)
            return known[key]

        return max(choices, key=of)

    chosen = {}
    for arm in KEPT:
        if args.only and arm not in args.only.split(","):
            continue

        def rows_of(choice, arm=arm):
            return kept_rows(judged, arm, choice["selection"], choice["most"])

        choices = [
            dict(selection=s, rate=6e-4, passes=4, most=N) for s in SELECTIONS.get(arm, REAL)
        ]
        choice = best(arm, choices, rows_of)
        choice = best(arm, [choice, choice | {"rate": 2e-3}], rows_of)
        choice = best(arm, [choice, choice | {"passes": 2}, choice | {"passes": 8}], rows_of)
        chosen[arm] = best(arm, [choice, choice | {"most": 2}], rows_of)
    if not args.only or "bare" in args.only:
        rows = bare_rows(run.problems, tokenizer)
        grid = itertools.product((2, 8, 30), (6e-4, 2e-3))
        choices = [dict(passes=p, rate=r) for p, r in grid]
        chosen["bare"] = best("bare", choices, lambda choice: rows)
    if not args.only or "rloo" in args.only:
        rates = {}
        for rate in 6e-4, 3e-4, 1.2e-3:
            path, seconds = rloo(run.directory, run.start, "cer", rate, TUNING)
            found = pass_at_1(run.directory, path, names=("new",))
            tried.append({"arm": "rloo", "rate": rate, "seconds": seconds} | found)
            print(tried[-1], flush=True)
            rates[rate] = found["new"]
        chosen["rloo"] = {"rate": max(rates, key=rates.get)}
    before = json.loads(CHOSEN.read_text()) if CHOSEN.exists() else {}
    CHOSEN.write_text(json.dumps(before | chosen, indent=2, sort_keys=True) + "\n")
    table = [pandas.read_csv(TUNED)] if TUNED.exists() else []
    pandas.concat([*table, pandas.DataFrame(tried)]).to_csv(TUNED, index=False)


# ------------------------------------------------------------------------------------------- runs


def seeds(args):
    """Every fold with seed 0 first, then seed 1, then seed 2."""
    pairs = [(fold, seed) for seed in SEEDS for fold in FOLDS]
    part, of = map(int, (args.only or "0/1").split("/"))
    return pairs[part::of]


def runs(args):
    """What both primary comparisons need, and one round of each selection."""
    chosen = json.loads(CHOSEN.read_text())
    for fold, seed in seeds(args):
        run = Seed(args.out, fold, seed)
        run.first_round(chosen, ["cer", "exact", "rule", "verifree"])
        run.next_round(chosen, "cer", 2)
        run.rloo(chosen, "cer")


def rest(args):
    """All arms: those of `runs`, where they are not there yet, and the others."""
    chosen = json.loads(CHOSEN.read_text())
    for fold, seed in seeds(args):
        run = Seed(args.out, fold, seed)
        run.first_round(chosen, [*KEPT, "em"])
        run.bare(chosen)
        for reward in "cer", "verifree", "exact", "rule":
            run.rloo(chosen, reward)
        for round_ in 2, 3:
            for arm in KEPT:
                run.next_round(chosen, arm, round_)
        run.rloo(chosen, "cer", run.directory / "kept-cer-1", "rloo-cer-after-kept")


def gather(args):
    """Add the lines of OUT to the CSV, as those of a machine. Those of other machines stay."""
    paths = sorted(args.out.glob("[0-9]-[0-9]/lines.csv"))
    lines = pandas.concat(map(pandas.read_csv, paths)).assign(machine=args.machine)
    both = pandas.concat([pandas.read_csv(CSV), lines])
    both = both.drop_duplicates(["machine", "fold", "seed", "arm", "round"], keep="last")
    both.to_csv(CSV, index=False)


CSV = Path(__file__).with_name("clean_toy.csv")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=["tune", "runs", "rest", "gather"])
    parser.add_argument("out", type=lambda text: Path(text).resolve())
    parser.add_argument("--only", help="K/N of the seeds; in tune: some arms, with commas")
    parser.add_argument("--machine", type=int, help="gather: the number of this machine in the CSV")
    args = parser.parse_args()
    # No default: a machine that rounds otherwise would replace the lines of another one.
    if args.what == "gather" and args.machine is None:
        parser.error("gather needs --machine, the number of this machine in the CSV")
    torch.set_num_threads(1)
    init_ranks()
    args.out.mkdir(parents=True, exist_ok=True)
    {"tune": tune, "runs": runs, "rest": rest, "gather": gather}[args.what](args)


if __name__ == "__main__":
    main()
