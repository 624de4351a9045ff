"""A film for docs/explore.html: the samples of one held-out question at several steps of a run.

    python benchmarks/film.py --models START RUN/checkpoints/step-* --out runs/film/seed-2.jsonl
    python benchmarks/film.py --embed runs/film/seed-2.jsonl runs/film/seed-3.jsonl --question 4

The first command samples the toy's held-out questions with the model of every step, and keeps the
samples in a file that explore.html opens. A directory whose name is not step-K is step 0. If the
command is started again, it skips the steps that the file has. The second command embeds one
question of every file in the page, and at every step the shares of right answers, slips and forms
over all questions of the file.
"""

import json
import re
from argparse import Namespace
from collections import Counter
from pathlib import Path

import judge
from measure import ROOT

import toy
from engine import cli, run
from engine.files import append_rows, read_rows, write_atomically

PAGE = ROOT / "docs" / "explore.html"
SAMPLING = {"samples": 16, "max_new_tokens": 40, "seed": 0}
BETWEEN_MARKERS = re.compile("(?<=<!-- the film -->\n).*?(?=<!-- end of the film -->)", re.DOTALL)


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--models", type=Path, nargs="+", default=[], help="the model of every step, to sample")
    add("--out", type=Path, help="file for their samples")
    add("--questions", type=count, default=32, help="number of questions, from the first")
    add("--embed", type=Path, nargs="+", default=[], help="files to embed, one of every run")
    add("--names", nargs="+", help="of the runs on the page (default: the names of the files)")
    add("--question", type=cli.number(int, 0), default=0, help="index of the question to embed")
    add("--watch", default="", help="sentences on the page that say what to watch")
    args = parser.parse_args()
    cli.require(args.out or not args.models, "--models needs --out, a file for the samples")
    device = run.init_ranks()
    for model in args.models:
        step = int((re.fullmatch(r"step-(\d+)", model.name) or [0, 0])[1])
        if args.out.exists() and step in {group["step"] for group in read_rows(args.out)}:
            continue
        groups = judge.samples_of(
            Namespace(model=model, questions=args.questions, **SAMPLING), device
        )
        args.out.parent.mkdir(parents=True, exist_ok=True)
        append_rows(args.out, [group | {"step": step} for group in groups])
    if args.embed:
        embed([read_rows(path) for path in args.embed], args)


def embed(runs, args):
    """Write the film between the page's markers. runs: the groups of every run."""
    questions = list(dict.fromkeys(group["question"] for group in runs[0]))
    cli.require(args.question < len(questions), f"--question: expected below {len(questions)}")
    question = questions[args.question]
    value, unit = judge.WORK[question][3], question.split()[-1].rstrip("?")
    names = args.names or [path.stem for path in args.embed]
    film = {
        "watch": args.watch,
        "question": question,
        "reference": next(g["reference"] for g in runs[0] if g["question"] == question),
        "forms": [f.format(n=value, word=toy.in_words(value), unit=unit) for f in toy.FORMS],
        "runs": [{"name": n, "frames": list(frames(g, question))} for n, g in zip(names, runs)],
    }
    text = json.dumps(film, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    element = f'<script type="application/json" id="film">{text}</script>\n'
    page, found = BETWEEN_MARKERS.subn(lambda _: element, PAGE.read_text())
    cli.require(found == 1, f"{PAGE} has no place for a film")
    write_atomically(PAGE, page)
    print(f"{PAGE}: a film of {len(element) / 1000:.0f} kB")


def frames(groups, question):
    """Yield for every step what explore.html draws of the question, and the shares over all."""
    for step in sorted({group["step"] for group in groups}):
        of_step = [group for group in groups if group["step"] == step]
        [shown] = [group for group in of_step if group["question"] == question]
        verdicts = Counter(said for group in of_step for said in verdicts_of(group))
        forms = Counter(judge.form_of(answer) for group in of_step for answer in group["answers"])
        frame = {key: shown[key] for key in ("step", "texts", "answers", "truncated", "R")}
        frame |= {key: shown[key] for key in ("distinct_answers", "columns", "log_W", "log_P")}
        frame |= {"verdicts": verdicts_of(shown), "samples": verdicts.total()}
        frame |= {said: verdicts[said] / verdicts.total() for said in ("right", "slip")}
        frame["forms"] = [forms[form] / verdicts.total() for form in toy.FORMS]
        yield json.loads(json.dumps(frame), parse_float=lambda digits: round(float(digits), 3))


def verdicts_of(group):
    """The verdict on every sample: right, slip (wrong after right work), or wrong."""
    work = judge.right_work(group["question"], group["texts"])
    answered = [answer is not None for answer in group["answers"]]
    wrong = ["slip" if w and a else "wrong" for w, a in zip(work, answered)]
    return ["right" if right else said for right, said in zip(group["correct"], wrong)]


if __name__ == "__main__":
    cli.run_script(main)
