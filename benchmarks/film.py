"""A film for docs/explore.html: the samples of one held-out question at several steps of a run.

    python benchmarks/film.py --models START RUN/checkpoints/step-* --out runs/film/cer-5.jsonl
    python benchmarks/film.py --embed runs/film/cer-5.jsonl runs/film/exact-5.jsonl --question 4

The first command samples the toy's held-out questions with the model of each step and appends the
samples to a file, which explore.html can open too. A model whose directory is not called step-K is
step 0. A step that the file has is skipped. The second command embeds one question of each file in
the page, with the shares of right answers, slips and forms over all questions of the file.
"""

import json
import re
from argparse import Namespace
from collections import Counter
from pathlib import Path

import judge
from measure import ROOT

from engine import cli, ranks
from engine.files import append_rows, read_rows, write_atomically
from tasks import toy

PAGE = ROOT / "docs" / "explore.html"
DATA = re.compile('(?<=<script type="application/json" id="film">).*(?=</script>)')
SAMPLING = {"questions": 24, "samples": 12, "max_new_tokens": 40, "seed": 0}


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--models", type=Path, nargs="+", default=[], help="the model of each step, to sample")
    add("--out", type=Path, default=ROOT / "runs/film/run.jsonl", help="file for their samples")
    add("--embed", type=Path, nargs="+", help="files to embed, one for each run")
    add("--names", nargs="+", help="of the runs on the page (default: the names of the files)")
    add("--question", type=cli.number(int, 0), default=0, help="index of the question to embed")
    add("--watch", default="", help="sentences on the page that say what to watch")
    args = parser.parse_args()
    device = ranks.init_ranks()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for model in args.models:
        step = int(model.name[5:]) if model.name.startswith("step-") else 0
        if not args.out.exists() or step not in {row["step"] for row in read_rows(args.out)}:
            groups = judge.samples_of(Namespace(model=model, **SAMPLING), device)
            append_rows(args.out, [group | {"step": step} for group in groups])
    if args.embed:
        embed([read_rows(path) for path in args.embed], args)


def embed(runs, args):
    """Write the film into the page. runs: the groups of each run. Numbers keep three digits."""
    question, reference = (runs[0][args.question][key] for key in ("question", "reference"))
    value, unit = judge.WORK[question][3], question.split()[-1].rstrip("?")
    film = {"watch": args.watch, "question": question, "reference": reference, "runs": []}
    film["forms"] = [f.format(n=value, word=toy.in_words(value), unit=unit) for f in toy.FORMS]
    for name, groups in zip(args.names or [path.stem for path in args.embed], runs):
        steps = sorted({group["step"] for group in groups})
        frames = [frame([g for g in groups if g["step"] == step], question) for step in steps]
        film["runs"].append({"name": name, "frames": frames})
    film = json.loads(json.dumps(film), parse_float=lambda digits: round(float(digits), 3))
    text = json.dumps(film, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    write_atomically(PAGE, DATA.sub(lambda _: text, PAGE.read_text()))
    print(f"{PAGE}: a film of {len(text) / 1000:.0f} kB")


def frame(groups, question):
    """What the page draws at one step: the samples of the question, and shares over all groups."""
    [shown] = [group for group in groups if group["question"] == question]
    keys = "step texts answers truncated R distinct_answers columns log_W log_P".split()
    verdicts = [said for group in groups for said in verdicts_of(group)]
    forms = Counter(judge.form_of(answer) for group in groups for answer in group["answers"])
    shares = {said: verdicts.count(said) / len(verdicts) for said in ("right", "slip")}
    shares |= {"forms": [forms[form] / len(verdicts) for form in toy.FORMS]}
    samples = {key: shown[key] for key in keys}
    return samples | shares | {"verdicts": verdicts_of(shown), "samples": len(verdicts)}


def verdicts_of(group):
    """The verdict on each sample: right, slip (a wrong answer after right work), or wrong."""
    work = judge.right_work(group["question"], group["texts"])
    wrong = ["slip" if w and a is not None else "wrong" for w, a in zip(work, group["answers"])]
    return ["right" if right else said for right, said in zip(group["correct"], wrong)]


if __name__ == "__main__":
    cli.run_script(main)
