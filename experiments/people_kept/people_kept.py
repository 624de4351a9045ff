"""Judge once, keep, fine-tune: beside VeriFree and beside fine-tuning on people's references.

    python experiments/people_kept/people_kept.py DATA MODEL OUT runs      # in the declared order
    python experiments/people_kept/people_kept.py DATA MODEL OUT gather    # the CSV files
    python experiments/people_kept/people_kept.py DATA MODEL OUT tables    # from the CSV files

DATA holds squad_human.jsonl, squad_more.jsonl and fairytaleqa_human.jsonl, MODEL is
SmolLM2-135M-Instruct. Each run is a directory in OUT, made by a command of the programs. What is
finished is not run again. Two commands go at a time, one thread each. The numbers are in
questions-300/, and those of half of the training questions (--questions 150, into an OUT of its
own) in questions-150/.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from experiments.sft.people import ask, length, make_rows, samples_of, with_seeds, write  # noqa: E402

SEEDS = range(3)
HELD_OUT = 450
DTYPES = {150: "fp32", 300: "bf16"}  # of the number of training questions
AT_1 = "--temperature 1 --top-p 1 --top-k 0"
SAMPLED = f"--runs 2 --max-new-tokens 64 {AT_1}"
GREEDY = "--runs 1 --max-new-tokens 64 --temperature 0"
UNTRAINED = f"--runs 1 --max-new-tokens 128 {AT_1}"
JUDGE = "--samples 8 --max-new-tokens 64 --rewards cer,verifree,exact,overlap,rlpr"
LORA = "--lora 32 --lr 5e-4 --microbatch-tokens 2048"
KEEP = f"--per-question 2 --epochs 1 {LORA}"
VERIFREE = f"--reward verifree --steps 30 --questions 4 --samples 8 --max-new-tokens 64 {LORA}"
VERIFREE += " --eval-runs 1 --eval-limit 1 --eval-every 1000 --save-every 10 --keep 1"
JUDGING = threading.Lock()
KEPT = ["cer", "right", "overlap"]
ARMS = ["start", *(f"kept-{by}" for by in KEPT), "verifree", "sft-2", "sft-4"]
PLAIN = "plain", "prompted"


# ----------------------------------------------------------------------------------------- the rows


def make_all_rows(args):
    """The start's demonstrations are those of experiments/sft. The questions are others, about
    passages of at most 100 words. An article is in one part only."""
    make_rows(argparse.Namespace(data=args.data, out=args.out))  # demos.jsonl, pilot.jsonl
    lines = [json.loads(line) for line in open(args.data / "squad_more.jsonl")]
    of_article = {}
    for line in lines:
        if length(line) <= 100:
            row = {"document": line["document"], "question": ask(line)}
            of_article.setdefault(line["document"], []).append(row | {"answer": line["references"]})
    articles = sorted(of_article)
    rng = random.Random("people_kept")
    rng.shuffle(articles)
    held_out, train = [], []
    for article in articles:
        part = held_out if len(held_out) < HELD_OUT else train
        part += of_article[article]
    rng.shuffle(train)
    write(args.out / "train.jsonl", train[: args.questions])
    write(args.out / "held-out.jsonl", rng.sample(held_out, HELD_OUT))
    worked = [
        {
            "question": "Passage: The Ashford Canal was dug between 1788 and 1796 by teams of local"
            " farmers, who were paid in grain. It was closed to ships in 1921, when the railway"
            " bridge made its locks useless.\nQuestion: Why did ships stop using the canal?\n"
            "Reason in one sentence, then box a short answer.",
            "solution": "The passage says that it was closed when the railway bridge made its locks"
            " useless. \\boxed{the railway bridge}",
        },
        {
            "question": "Passage: Lichens grow slowly, often less than a millimetre a year. Because"
            " they take in everything from the air, they are used to measure its pollution.\n"
            "Question: What can be measured with lichens?\n"
            "Reason in one sentence, then box a short answer.",
            "solution": "They take in everything from the air, so they are used to measure how"
            " polluted it is. \\boxed{air pollution}",
        },
    ]
    write(args.out / "examples.jsonl", worked)


# ----------------------------------------------------------------------------------------- the runs


def run(args, name, command, last):
    """Run a program to OUT/name, unless the file that it writes last is there, and note the CPU
    seconds of its process. The start is computed in fp32 for both numbers of questions."""
    out = args.out / name
    if name != "start":
        command += f" --dtype {DTYPES[args.questions]}"
    if (out / last).exists():
        return
    if command.startswith("train.py") and (out / "config.json").exists():
        command = "train.py --resume"  # what was interrupted goes on
    else:
        subprocess.run(["rm", "-rf", out], check=True)
    words = [sys.executable, *command.split(), "--out", str(out)]
    with open(f"{out}.log", "a") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)} ended with {status}: see {out}.log")
    with open(f"{out}.seconds", "a") as file:
        file.write(f"{used.ru_utime + used.ru_stime:.0f}\n")


def fine_tuned(args, name, model, data, flags, seed):
    command = f"sft.py --model {model} --data {data} --seed {seed} {flags}"
    run(args, name, command, "config.json")


def evaluated(args, name, model, settings, seed):
    rows = args.out / "held-out.jsonl"
    command = f"evaluate.py --model {model} --dataset {rows} --verifier text --seed {seed}"
    run(args, name, f"{command} {settings}", "results.json")


def judged(args, name, rows, seed):
    """Two arms of a seed may want the same samples at the same time. The first one draws them."""
    command = f"judge.py --model {args.out / 'start'} --dataset {args.out / rows} --verifier text"
    with JUDGING:
        command += f" --limit {args.questions} --seed {seed} {JUDGE}"
        run(args, name, command, "judge.json")


def trained(args, arm, seed):
    """An arm of a seed -> the model's directory."""
    name, start = f"{arm}-{seed}", args.out / "start"
    if arm == "start":
        return start
    if arm == "verifree":
        rows = f"--dataset {args.out / 'train.jsonl'} --verifier text"
        command = f"train.py --model {start} {rows} --seed {seed} {VERIFREE}"
        run(args, name, command, "checkpoints/step-30/config.json")
        return args.out / name / "checkpoints" / "step-30"
    if arm.startswith("kept-"):
        flags = f"--select {arm.removeprefix('kept-')} {KEEP}"
        fine_tuned(args, name, start, args.out / f"judge-{seed}", flags, seed)
    else:
        flags = f"--epochs {arm.removeprefix('sft-')} {LORA}"
        fine_tuned(args, name, start, args.out / "train.jsonl", flags, seed)
    return args.out / name


def run_all(args):
    """The primary comparison first, then the other arms by their seeds."""
    if not (args.out / "examples.jsonl").exists():
        make_all_rows(args)
    fine_tuned(args, "start", args.model, args.out / "demos.jsonl", "--epochs 3", 0)

    def arm_of(arm, seed):
        if arm.startswith("kept-"):
            judged(args, f"judge-{seed}", "train.jsonl", seed)
        model = trained(args, arm, seed)
        for way, settings in ("sampled", SAMPLED), ("greedy", GREEDY):
            evaluated(args, f"{arm}-{seed}-{way}", model, settings, seed)

    def untrained():
        for name, more in zip(PLAIN, ("", f"--examples {args.out / 'examples.jsonl'}")):
            evaluated(args, f"{name}-0-sampled", args.model, f"{UNTRAINED} {more}", 0)

    primary = ["kept-cer", "verifree"]
    others = ["kept-right", "sft-2", "kept-overlap", "sft-4"]
    jobs = [(arm_of, arm, 0) for arm in (*primary, "start")]
    jobs += [(arm_of, arm, seed) for seed in SEEDS[1:] for arm in primary]
    jobs += [(arm_of, arm, seed) for seed in SEEDS for arm in others]
    jobs += [(untrained,)]
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(*job) for job in jobs]
        for job in done:
            job.result()


# -------------------------------------------------------------------------------------- the numbers


def gather(args):
    tables = []
    for path in sorted(args.out.glob("*-[0-9]-sampled")) + sorted(args.out.glob("*-[0-9]-greedy")):
        name, _, decoding = path.name.rpartition("-")
        if (path / "results.json").exists():
            arm, _, seed = name.rpartition("-")
            more = {"arm": arm, "seed": int(seed), "decoding": decoding}
            samples = samples_of(path, first=0).assign(**more).round({"f1": 3})
            samples["answered"] = (samples.answer.fillna("") != "").astype(int)
            tables.append(samples)
    documents = tables[0].drop_duplicates("line").set_index("line").document
    documents.to_csv(DOCUMENTS)
    folder = folder_of(args.questions)
    if (folder / SAMPLES).exists():  # the runs of another machine stay
        tables.insert(0, pandas.read_csv(folder / SAMPLES))
    table = pandas.concat(tables)
    table = table.drop_duplicates(["arm", "seed", "decoding", "line", "sample"], keep="last")
    table[["arm", "seed", "decoding", *OF_A_SAMPLE]].to_csv(folder / SAMPLES, index=False)
    costs = []
    for path in sorted(args.out.glob("*.seconds")):
        line = {"run": path.stem, "cpu_seconds": sum(map(int, path.read_text().split()))}
        kept = args.out / path.stem / "selected.jsonl"
        costs.append(line | {"kept": len(kept.read_text().splitlines()) if kept.exists() else ""})
    if (folder / COSTS).exists():
        costs = read_costs(folder).to_dict("records") + costs
    costs = pandas.DataFrame(costs).drop_duplicates("run", keep="last")
    costs.to_csv(folder / COSTS, index=False)
    judged = [pandas.read_csv(folder / JUDGED)] if (folder / JUDGED).exists() else []
    for path in sorted(args.out.glob("judge-*/judge.json")):
        table = pandas.read_json(path, orient="index").rename_axis("reward").reset_index()
        judged.append(table.assign(run=path.parent.name).round(4))
    judged = pandas.concat(judged).drop_duplicates(["run", "reward"], keep="last")
    columns = ["run", "reward", "AUC", "low", "high", "right", "wrong"]
    judged[columns].to_csv(folder / JUDGED, index=False)


DOCUMENTS = Path(__file__).with_name("documents.csv")
SAMPLES, COSTS, JUDGED, PICTURE = "samples.csv", "costs.csv", "judged.csv", "people_kept.svg"
OF_A_SAMPLE = "line sample text f1 answered tokens".split()


def folder_of(questions):
    return DOCUMENTS.with_name(f"questions-{questions}")


def read(folder):
    return pandas.read_csv(folder / SAMPLES).merge(pandas.read_csv(DOCUMENTS), on="line")


def read_costs(folder):
    return pandas.read_csv(folder / COSTS, keep_default_na=False)


def differences(samples, one, other, what="text"):
    """One arm minus another, of each question -> a table [questions, seeds that both have]."""
    measured_once = other == "start"
    one, other = (
        samples[samples.arm == arm].pivot_table(what, "line", "seed") for arm in (one, other)
    )
    if measured_once:
        return one.sub(other[0], axis=0)
    return (one - other).dropna(axis=1)


def compared(samples, one, other, what="text"):
    """-> the mean, its standard error over questions and seeds, that over articles, the seeds'
    means."""
    table = differences(samples, one, other, what)
    mean, error = with_seeds(table)
    article = samples.drop_duplicates("line").set_index("line").document
    of_question = table.mean(axis=1)
    sums = (of_question - mean).groupby(article).sum()
    count = len(sums)
    over_articles = ((sums**2).sum() * count / (count - 1)) ** 0.5 / len(of_question)
    return mean, error, over_articles, table.mean().tolist()


def short(x, sign=""):
    return f"{x:{sign}.3f}".replace("0.", ".", 1)


def rows_of_arms(folder):
    """The page's first table: each arm with its shares, and the CPU seconds of a seed since the
    start, without evaluations."""
    samples = read(folder)
    costs = read_costs(folder).set_index("run").cpu_seconds
    for arm in [arm for arm in (*ARMS, *PLAIN) if (samples.arm == arm).any()]:
        cells = []
        for decoding, names in ("sampled", ("text", "f1")), ("greedy", ("text",)):
            own = samples[(samples.arm == arm) & (samples.decoding == decoding)]
            for name in names:
                both = with_seeds(own.pivot_table(name, "line", "seed")) if len(own) else None
                cells.append(" ± ".join(map(short, both)) if both else "")
        own = samples[(samples.arm == arm) & (samples.decoding == "sampled")]
        cells += [short(own.answered.mean()), f"{own.tokens.mean():.0f}"]
        cells += [f"{seconds_of(arm, own, costs):,.0f}", str(own.seed.nunique())]
        yield f"| `{arm}` | {' | '.join(cells)} |"


def seconds_of(arm, own, costs):
    """The CPU seconds of an arm since the start, the mean of its seeds. What sampling and judging
    took counts for each arm that keeps samples."""
    seeds = own.seed.unique()
    used = [costs.get(f"{arm}-{seed}", 0) for seed in seeds]
    if arm.startswith("kept-"):
        used = [x + costs[f"judge-{seed}"] for x, seed in zip(used, seeds)]
    return sum(used) / len(used)


def rows_of_differences(samples):
    """The page's second table."""
    sampled = samples[samples.decoding == "sampled"]
    there = [arm for arm in ARMS if (sampled.arm == arm).any()]
    pairs = [("kept-cer", other) for other in there if other not in ("kept-cer", "start")]
    pairs += [(arm, "start") for arm in there if arm != "start"]
    for one, other in pairs:
        mean, error, articles, seeds = compared(sampled, one, other)
        cells = f"{short(mean)} ± {short(error)}", short(articles), ", ".join(map(short, seeds))
        yield f"| `{one}` minus `{other}` | {' | '.join(cells)} |"


def rows_of_rewards(judged):
    """The page's third table: AUC by `text`, with its 95% interval over questions, where enough of
    these have right and wrong samples."""
    judged = judged.dropna(subset="low")
    for reward in judged.reward.unique():
        cells = []
        for run in judged.run.unique():
            [own] = judged[(judged.run == run) & (judged.reward == reward)].itertuples()
            cells.append(f"{short(own.AUC)} ({short(own.low)} to {short(own.high)})")
        yield f"| `{reward}` | {' | '.join(cells)} |"


def draw(folder, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "cer"
    samples = read(folder)
    costs = read_costs(folder).set_index("run").cpu_seconds
    sampled = samples[samples.decoding == "sampled"]
    figure, axis = pyplot.subplots(figsize=(7, 4))
    for arm in [arm for arm in ARMS if (sampled.arm == arm).any()]:
        own = sampled[sampled.arm == arm]
        mean, error = with_seeds(own.pivot_table("text", "line", "seed"))
        x = seconds_of(arm, own, costs) / 60
        color, label = LABELS[arm]
        axis.errorbar(x, mean, 1.96 * error, fmt="o", capsize=3, color=color, label=label)
    axis.set(xlabel="CPU minutes since the start", ylabel="right by text, held out", ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower center", ncols=2, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


LABELS = {
    "start": ("black", "the start"),
    "kept-cer": ("tab:orange", "kept by CER, one pass"),
    "kept-right": ("tab:green", "kept: right, one pass"),
    "kept-overlap": ("tab:purple", "kept by overlap, one pass"),
    "verifree": ("tab:blue", "verifree, 30 steps"),
    "sft-2": ("tab:red", "references, two passes"),
    "sft-4": ("tab:pink", "references, four passes"),
}


def tables(args):
    folder = folder_of(args.questions)
    draw(folder, folder / PICTURE)
    print(*rows_of_arms(folder), "", *rows_of_differences(read(folder)), "", sep="\n")
    print(*rows_of_rewards(pandas.read_csv(folder / JUDGED)), "", sep="\n")
    print(read_costs(folder).to_string(index=False))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("data", type=Path)
    add("model", type=Path)
    add("out", type=lambda text: Path(text).resolve())
    steps = {"runs": run_all, "gather": gather, "tables": tables}
    add("step", choices=steps)
    add("--questions", type=int, choices=DTYPES, default=300, help="how many to train on")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    steps[args.step](args)


if __name__ == "__main__":
    main()
