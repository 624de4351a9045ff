"""What a GPU is to show once one is at hand. README.md beside it says what, and declares it.

    python experiments/card/card.py flagship --model WIDE --data DATA --out card  # from widen.py
    python experiments/card/card.py math --model SMALL --data DATA --out card --minutes 6
    python experiments/card/card.py rounding --model SMALL --data DATA --out card
    python experiments/card/card.py gather --out card --lines card.jsonl
    python experiments/card/card.py draw --lines card.jsonl --out card.svg

SMALL is Qwen2.5-Coder-1.5B-Instruct in bf16. DATA has math_train.jsonl, math500.jsonl and
squad_human.jsonl. Each run is train.py in a process of its own. A run that has ended is in
jobs.jsonl, and the same command begins the others again. `gather` puts what the runs have logged
into one file, and `draw` makes the tables and the curves of it. --rehearse takes the toy instead,
for two steps on a CPU (--model is then the toy's warm start).
"""

import functools
import itertools
import json
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pandas
import torch
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's modules
import train
from benchmarks.measure import commit, markdown
from engine.tokens import split_answer
from experiments.copies.copies import copies_working
from experiments.people import own_case
from measure import evaluation, summarize
from plot import Figure, save
from runtime import cli
from runtime.files import append_rows, read_rows, to_jsonl
from runtime.sampled import verbatim

TOY = " --dataset toy --eval-dataset toy-test --eval-limit 3 --eval-every 1 --questions 4"
TOY += " --samples 4 --max-new-tokens 24"
PARTS = "load_models make_policy load_checkpoint sample ask_judges update".split()
PARTS += ["save_checkpoint", "evaluate"]

# ---------------------------------------------------------------------------------------- the runs


def flagship(args):
    """Steps of the paper's sizes with a checkpoint, one more step from it, and LoRA on 24 GB."""
    flags = f"--model {args.model} --dataset {args.data}/math_train.jsonl --verifier math"
    flags += f" --steps {args.steps} --save-every 1000 --keep 1"
    lora = "--lora 32 --questions 8 --samples 8 --max-new-tokens 2048"
    yield dict(name="flagship", flags=flags + args.toy, saves=True)
    more = f"--resume --steps {args.steps + 1}"
    yield dict(name="flagship-resumed", flags=more, folder="flagship")
    yield dict(name="lora-24gb", flags=f"{flags} {lora}{args.toy}", gb=24)


def math(args):
    """The paper's experiment in small. Each reward has the same time."""
    flags = f"--model {args.model} --dataset {args.data}/math_train.jsonl --verifier math"
    flags += " --questions 16 --samples 16 --max-new-tokens 1024 --lr 5e-6 --eval-every 8"
    flags += f" --eval-dataset {args.data}/math500.jsonl --eval-limit 250 --steps {args.steps}"
    for seed in args.seeds:
        for reward in "cer", "rule", "exact", "verifree":
            own = f"{flags} --reward {reward} --seed {seed}{args.toy}"
            yield dict(name=f"math-{reward}-{seed}", flags=own, limit=args.minutes, paper=True)


WAYS = {f"{name}": f"--rounding {name} --lr 5e-6" for name in ("nearest", "dither")}
WAYS |= {f"lora-{rate}": f"--lora 32 --lr {rate}" for rate in ("1e-5", "5e-5")}


def rounding(args):
    """What bf16 takes from a short run, and what LoRA does instead."""
    is_bf16 = args.toy or AutoConfig.from_pretrained(args.model).dtype == torch.bfloat16
    cli.require(is_bf16, f"{args.model} is not in bf16, so its weights are spread already")
    rows = own_case.rows(read_rows(args.data / "squad_human.jsonl"))
    for name, some in ("squad-train", rows[:260]), ("squad-held-out", rows[300:]):
        (args.out / f"{name}.jsonl").write_text(to_jsonl(some))
    flags = f"--model {args.model} --dataset {args.out}/squad-train.jsonl --verifier text"
    flags += f" --questions 8 --samples 8 --max-new-tokens 80 --steps {args.steps} --eval-runs 4"
    flags += f" --eval-dataset {args.out}/squad-held-out.jsonl --eval-every 1000"
    for seed in args.seeds:
        for name, way in WAYS.items():
            own = f"{flags} {way} --seed {seed}{args.toy}"
            yield dict(name=f"squad-{name}-{seed}", flags=own)


def run(args):
    """Run the jobs. One with a limit, in minutes, is stopped then, and what it has logged counts.
    The others have the rest of the command's time, and are begun again if they do not end."""
    args.out.mkdir(parents=True, exist_ok=True)
    path, ends = args.out / "jobs.jsonl", time.monotonic() + 60 * args.within
    done = {line["run"] for line in read_rows(path)} if path.exists() else set()

    def start(job):
        folder, begun = args.out / job.get("folder", job["name"]), time.monotonic()
        if job["name"] in done or begun > ends:
            return
        if "folder" not in job:
            shutil.rmtree(folder, ignore_errors=True)
        job |= {"share": 0.94 / args.at_a_time if args.at_a_time > 1 else 1}
        command = [sys.executable, __file__, "one", json.dumps(job), *job["flags"].split()]
        command += ["--out", str(folder)]
        seconds = min(60 * job.get("limit", 1e6), ends - begun)
        with open(args.out / f"{job['name']}.log", "w") as log:
            try:
                code = subprocess.run(command, stdout=log, stderr=log, timeout=seconds).returncode
            except subprocess.TimeoutExpired:
                code = "its limit" if time.monotonic() < ends else "no time is left"
        line = {"run": job["name"], "seconds": time.monotonic() - begun, "code": code}
        print(json.dumps(line), flush=True)
        if code in (0, "its limit"):
            append_rows(path, [line | {"flags": job["flags"], "commit": commit()}])

    jobs = [job for job in args.jobs(args) if any(part in job["name"] for part in args.only)]
    with ThreadPoolExecutor(args.at_a_time) as pool:
        list(pool.map(start, jobs))


def one(job, flags):
    """Run train.py here. Its parts note their seconds and their memory in parts.jsonl."""
    note = functools.partial(noted, job["name"], Path(flags[-1]) / "parts.jsonl")
    parts = {name: getattr(train, name) for name in PARTS}
    if "paper" in job:
        parts["evaluate"] = evaluate_as_the_paper
    patches = {name: functools.partial(note, name, each) for name, each in parts.items()}
    if "saves" not in job:
        patches["save_checkpoint"] = lambda *_: None
    # One checkpoint of a 4B fits on a disk of 64 GB. train.py wants room for a second.
    patches["check_disk"] = lambda *_: "disk: not checked"
    free = torch.cuda.mem_get_info
    if torch.cuda.is_available() and ("gb" in job or job["share"] < 1):
        total = free()[1]
        size = job["gb"] * 1e9 if "gb" in job else job["share"] * total
        torch.cuda.set_per_process_memory_fraction(size / total)
        free = lambda *_: (int(size) - torch.cuda.memory_reserved(), total)  # noqa: E731
    sys.argv = ["train.py", *flags]
    with mock.patch.multiple(train, **patches), mock.patch("torch.cuda.mem_get_info", free):
        cli.run_script(train.main)


def evaluate_as_the_paper(model, tokenizer, problems, *sizes):
    """train.py's evaluation with the paper's sampling."""
    sampling = dict(temperature=0.6, top_p=0.95, top_k=20)
    [lines] = evaluation(model, tokenizer, problems, len(problems), *sizes, **sampling)
    return summarize(lines), lines


def noted(run, path, part, function, *args, **options):
    """Call a function, and note what it took. Host memory is the largest of the process so far."""
    cuda, on_gpu = torch.cuda, torch.cuda.is_available()
    wait, reset = (cuda.synchronize, cuda.reset_peak_memory_stats) if on_gpu else (bool, bool)
    reset()
    wait()
    begun = time.perf_counter()
    result = function(*args, **options)
    wait()
    line = {"run": run, "part": part, "seconds": time.perf_counter() - begun}
    line["gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
    line["host_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    line["card"] = torch.cuda.get_device_name() if on_gpu else "CPU"
    append_rows(path, [line | {"torch": torch.__version__}])
    return result


# --------------------------------------------------------------------------------------- the lines


def gather(args):
    """Put what all runs have logged into one file, without the texts."""
    jobs = read_rows(args.out / "jobs.jsonl")
    lines = [{"kind": "job"} | job for job in jobs]
    # The lines of the resumed run stand with those of the first.
    for folder in filter(Path.exists, (args.out / job["run"] for job in jobs)):
        of = {"run": folder.name}
        lines += [{"kind": "part"} | line for line in read_rows(folder / "parts.jsonl")]
        metrics = read_rows(folder / "metrics.jsonl")
        lines += [of | {"kind": "step"} | line for line in metrics if "reward" in line]
        for group in itertools.chain(*map(read_rows, folder.glob("evaluations.jsonl"))):
            answers = [answer or "" for answer in group["answers"]]
            solutions = [text[: (split_answer(text) or [0])[0]] for text in group["texts"]]
            line = of | {"kind": "held out", "step": group["step"], "question": group["index"]}
            line["right"], line["tokens"] = [int(x) for x in group["right"]], group["tokens"]
            line["box"] = [int(bool(answer)) for answer in answers]
            line["verbatim"] = [int(verbatim(each, group["references"])) for each in answers]
            line["copy"] = [int(copies_working(*pair)) for pair in zip(answers, solutions)]
            lines.append(line)
    args.lines.write_text(to_jsonl(lines))


TITLES = {"right": "pass@1", "box": "samples with a box", "verbatim": "verbatim matches"}
TITLES |= {"copy": "copies of the working", "tokens": "tokens of a completion"}


def draw(args):
    lines = pandas.DataFrame(read_rows(args.lines))
    whole = lines[lines.run.str.contains("flagship|lora-24gb")].set_index("run")
    for kind, more in ("part", "gpu_gb host_gb card"), ("step", "completion_tokens answered"):
        columns = [kind, "seconds", *more.split()]
        print(markdown(whole[whole.kind == kind].reindex(columns=columns).map(shown), "run"))
    by = lines[lines.kind == "held out"].set_index(["run", "step", "question"])
    by = by.reindex(columns=[*TITLES]).map(lambda values: sum(values) / len(values))
    means = by.groupby(["run", "step"]).mean()
    print(markdown(means.rename(columns=TITLES).reset_index("step").map(shown), "run"))
    right = {run: of.droplevel("run").unstack("step") for run, of in by.right.groupby("run")}
    for run in (run for run in right if run.startswith("math-")):
        last = right[run].columns[-1]
        print(f"{run}, step {last:g} minus 0: {in_words(right[run][last] - right[run][0])}")
    after = pandas.DataFrame({run: of.iloc[:, -1] for run, of in right.items()})
    ways = [after.filter(like=f"squad-{way}-") for way in ("dither", "nearest")]
    changes = ways[0] - ways[1].rename(columns=lambda run: run.replace("nearest", "dither"))
    if changes.shape[1]:
        changes["their mean"] = changes.mean(axis=1)
    for run, change in changes.items():
        print(f"{run} minus nearest: {in_words(change)}")
    curves(by.reset_index().query("run.str.startswith('math-')"), args.out)


def shown(cell):
    if isinstance(cell, dict):
        return ", ".join(f"{name} {shown(value)}" for name, value in cell.items())
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def in_words(differences):
    return f"{differences.mean():.3f} ± {differences.sem():.3f}, {len(differences)} questions"


def curves(by, path):
    """pass@1 of the rewards on MATH, and what goes with it, with 1.96 standard errors over the
    questions, each of which is a mean over the seeds."""
    figure = Figure(figsize=(18, 3.8), layout="constrained")
    axes = figure.subplots(1, len(TITLES))
    for axis, (name, title) in zip(axes, TITLES.items()):
        for reward, own in by.groupby(by.run.str.split("-").str[1], sort=False):
            questions = own.groupby(["step", "question"])[name].mean()
            y = questions.groupby("step").agg(["mean", "sem"])
            axis.plot(y["mean"], label=reward, marker="o")
            low, high = (y["mean"] + sign * 1.96 * y["sem"] for sign in (-1, 1))
            axis.fill_between(y.index, low, high, alpha=0.15, linewidth=0)
        axis.set(title=title, xlabel="step", ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(figure, path)


def main():
    if sys.argv[1:2] == ["one"]:
        return one(json.loads(sys.argv[2]), sys.argv[3:])
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for jobs, steps, seeds in (flagship, 2, [0]), (math, 1000, [0]), (rounding, 30, [0, 1]):
        command = commands.add_parser(jobs.__name__, help=jobs.__doc__)
        command.set_defaults(do=run, jobs=jobs)
        add = command.add_argument
        add("--model", required=True, help="a directory")
        add("--data", type=Path, required=True, help="a directory")
        add("--out", type=Path, required=True, help="a directory")
        add("--steps", type=int, default=steps)
        add("--seeds", type=int, nargs="+", default=seeds)
        add("--minutes", type=float, default=6.0, help="of each run of math")
        add("--within", type=float, default=600.0, help="minutes of all runs")
        add("--only", nargs="+", default=[""], help="parts of the names of the runs")
        add("--at-a-time", type=int, default=1, help="runs that share the card")
        add("--rehearse", dest="toy", action="store_const", const=f"{TOY} --steps 2", default="")
    for do, out in (gather, "the directory of all runs"), (draw, "the picture"):
        command = commands.add_parser(do.__name__, help=do.__doc__)
        command.set_defaults(do=do)
        command.add_argument("--lines", type=Path, required=True, help="the file of all lines")
        command.add_argument("--out", type=Path, required=True, help=out)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    cli.run_script(main)
