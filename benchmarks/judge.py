"""How well does each reward tell right samples from wrong ones, on the toy's held-out questions?

    python benchmarks/judge.py --model DIR --name "SmolLM2, warm start" --seed 0

AUC is how often, within a question, a right sample receives a larger reward than a wrong one. Ties
count half, and .5 is chance. "A wrong one ahead" is how often the wrong one receives the larger
reward, ties left out. Wrong samples are wrong work (the working is wrong) or slips (a wrong
answer after right work). A sample without an answer counts as wrong work. For each form of answer,
the script also measures how often it is given, how often it is then right or a slip, and pi(a*|s)
after right work where a* has that form. All numbers are means over questions, with 95% intervals
by a bootstrap over questions.

Every model and seed adds its lines to the CSV. The table and the figure show them all. The samples
are kept in runs/judge, where plot.py --question can draw them.
"""

import itertools
import re
from pathlib import Path

import numpy
import pandas
import torch
from measure import ROOT, commit, markdown
from tqdm import tqdm

import plot
from engine import cli, load, log, ranks
from engine.files import append_rows
from rewards import conditional_expectation
from rollout import sample
from tasks import toy
from tasks.data import load_problems
from tasks.verifiers import verdict

REWARDS = ["exact", "rule", "verifree", "cer", "rule+cer"]


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", required=True, help="Hugging Face id or directory")
    add("--name", required=True, help="of the model, in the table and figure")
    add("--questions", type=count, default=150, help="number of questions, from the first")
    add("--samples", type=cli.number(int, 2), default=16, help="N, samples of each question")
    add("--max-new-tokens", type=count, default=40, help="longer samples are cut off")
    add("--seed", type=int, default=0, help="random seed of the samples")
    add("--out", type=Path, default=ROOT / "benchmarks/results/judge.csv", help="the CSV")
    args = parser.parse_args()
    groups = samples_of(args, ranks.init_ranks())
    slug = re.sub(r"\W+", "-", args.name)
    directory = ROOT / "runs" / "judge" / f"{slug}-{args.seed}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "samples.jsonl").unlink(missing_ok=True)
    append_rows(directory / "samples.jsonl", groups)

    lines = summary([statistics(group) for group in groups])
    lines = lines.assign(model=args.name, seed=args.seed, commit=commit())
    if args.out.exists():
        others = pandas.read_csv(args.out, dtype={"model": str, "commit": str})
        others = others[(others.model != args.name) | (others.seed != args.seed)]
        lines = pandas.concat([others, lines])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines.round(4).to_csv(args.out, index=False)
    args.out.with_suffix(".md").write_text(table(lines))
    print(table(lines[(lines.model == args.name) & (lines.seed == args.seed)]))
    draw(lines, args.out.with_suffix(".png"))


def samples_of(args, device, at_once=10):
    """Sample all questions -> rows as in samples.jsonl, with CER's matrices over all solutions."""
    groups, problems = [], load_problems("toy-test", args.questions)
    model, tokenizer = load.load(args.model, device)
    ranks.seed_everything(args.seed)
    for start in tqdm(range(0, len(problems), at_once), unit="batch"):
        batch = problems[start : start + at_once]
        sampled = sample(model, tokenizer, batch, args.samples, args.max_new_tokens)
        R, records = conditional_expectation(sampled, actor=model, tokenizer=tokenizer, M=None)
        for group, R_group, record in zip(sampled, R, records):
            record["correct"] = [
                a is not None and verdict(group.problem, a) == "right" for a in group.answers
            ]
            groups.append(log.group_record(0, group, R_group, record))
    return groups


# ----------------------------------------------------------------------------------- the statistics


def rewards_of(group):
    """The rewards of one group's samples -> {name: R [N]}."""
    answers, a_star = group["answers"], group["reference"]
    R = {name: torch.zeros(len(answers)) for name in REWARDS}
    R["exact"] += torch.tensor([answer == a_star for answer in answers])
    R["rule"] += torch.tensor([toy.same_digits(answer or "", a_star) for answer in answers])
    R["verifree"][group["columns"]] = torch.tensor(group["log_P"]).exp()
    R["cer"] += torch.tensor(group["R"])
    R["rule+cer"] += (R["rule"] + R["cer"]) / 2
    return R


def statistics(group):
    """The statistics of one question -> {(statistic, which reward or form): value}. By Theorem 2
    the mean rewards of exact match, VeriFree and CER estimate the same number."""
    rewards, right = rewards_of(group), torch.tensor(group["correct"])
    work = right_work(group["question"], group["texts"])
    slips = ~right & work & torch.tensor([answer is not None for answer in group["answers"]])
    values = {("right", "samples"): right.float().mean().item()}
    for name, R in rewards.items():
        values["mean reward", name] = R.mean().item()
        for against, wrong in ("", ~right), (", wrong work", ~right & ~slips), (", slips", slips):
            if right.any() and wrong.any():
                difference = R[right][:, None] - R[wrong]
                ties = 0.5 * (difference == 0)
                values[f"AUC{against}", name] = ((difference > 0) + ties).mean().item()
        if ("AUC", name) in values:
            ahead = R[~right] > R[right][:, None]
            values["a wrong one ahead", name] = ahead.float().mean().item()
        if ("AUC", "verifree") in values:
            values["AUC - verifree", name] = values["AUC", name] - values["AUC", "verifree"]
    if not right.all():
        values["slips among the wrong", "samples"] = slips[~right].float().mean().item()
    for kind, some in ("right answers", right), ("slips", slips):
        if some.any():  # how much of their rows of D^-1 W is on right work
            rows = [group["distinct_answers"].index(group["answers"][i]) for i in some.nonzero()]
            posterior = torch.tensor(group["log_W"])[rows].softmax(1)
            mass = (posterior @ work[group["columns"]].float()).mean().item()
            values[f"posterior on right work, {kind}", "samples"] = mass
    forms = [form_of(answer) for answer in group["answers"]]
    for form in toy.FORMS:
        given = torch.tensor([one == form for one in forms])
        values["share of answers", form] = given.float().mean().item()
        if given.any():
            values["right", form] = right[given].float().mean().item()
            values["slips", form] = slips[given].float().mean().item()
    after_right = [p for p, j in zip(group["log_P"], group["columns"]) if work[j]]
    if after_right:
        values["P after right work", form_of(group["reference"])] = numpy.exp(after_right).mean()
    return values


WORK = {story.question(): story.work(story.method) for story in itertools.chain(*toy.stories())}


def right_work(question, texts):
    """Whether the two steps of each sample's working are right -> bool [N]."""
    first, x, second, value = WORK[question]
    first, second = re.escape(f"{first}={x}"), re.escape(second)
    working = re.compile(rf"{first}\b.*\b{second}(?:={value}\b|(?![=\d]))")
    return torch.tensor([bool(working.search(text)) for text in texts])


def form_of(answer):
    value = toy.value_of(answer or "")
    for form, unit in itertools.product(toy.FORMS, toy.UNITS if value is not None else []):
        if answer == form.format(n=value, word=toy.in_words(value), unit=unit):
            return form


def summary(by_question, repeats=2000):
    """One line per statistic, with its mean over the questions that have it and the interval."""
    table, lines = pandas.DataFrame(by_question), []
    for statistic, which in table:
        values = table[statistic, which].dropna()
        again = numpy.random.default_rng(0).choice(values, (repeats, len(values))).mean(axis=1)
        low, high = numpy.quantile(again, [0.025, 0.975])
        line = dict(statistic=statistic, which=which, mean=values.mean(), low=low, high=high)
        lines.append(line | dict(questions=len(values)))
    return pandas.DataFrame(lines)


# -------------------------------------------------------------------------------- table and figure


def table(lines):
    """For each model and seed, a table of the samples, the rewards and the forms."""
    text = ""
    for (model, seed), chosen in lines.groupby(["model", "seed"], sort=False):
        text += f"### {model}, seed {seed} (commit {chosen.commit.iloc[0]})\n\n"
        is_all = chosen.which == "samples"
        is_form = chosen.which.isin(toy.FORMS)
        for part in chosen[is_all], chosen[~is_all & ~is_form], chosen[is_form]:
            cells = part.apply(lambda x: f"{x['mean']:.3f} ({x.low:.3f} to {x.high:.3f})", axis=1)
            cells = part.assign(cell=cells).pivot(index="which", columns="statistic", values="cell")
            cells = cells.reindex(part.which.unique()).fillna("")
            rows = [[f"`{which}`", *row] for which, row in zip(cells.index, cells.to_numpy())]
            text += markdown(["", *cells], rows) + "\n\n"
    return text


def draw(lines, out):
    """Draw one column per model, averaged over its seeds. The AUC of each reward is at the top,
    with the mean of the intervals. The forms are at the bottom."""
    models = list(dict.fromkeys(lines.model))
    size = (2.7 * len(models), 6.5)
    figure, axes = plot.plt.subplots(2, len(models), figsize=size, squeeze=False, sharey="row")
    for (above, below), model in zip(axes.T, models):
        means = lines[lines.model == model].groupby(["statistic", "which"], sort=False)
        means = means[["mean", "low", "high"]].mean()
        for shift, name in (-0.2, "AUC"), (0, "AUC, wrong work"), (0.2, "AUC, slips"):
            points = means.reindex([(name, reward) for reward in REWARDS])
            error = [points["mean"] - points.low, points.high - points["mean"]]
            y = numpy.arange(len(REWARDS)) + shift
            above.errorbar(points["mean"], y, xerr=error, fmt="o", label=name, capsize=2)
        above.set(title=model, xlabel="AUC within a question", xlim=(0.3, 1.05))
        above.set_yticks(range(len(REWARDS)), REWARDS)
        for shift, name in (-0.2, "share of answers"), (0.2, "P after right work"):
            bars = means["mean"].reindex([(name, form) for form in toy.FORMS])
            below.barh(numpy.arange(len(toy.FORMS)) + shift, bars, height=0.4, label=name)
        below.set_yticks(range(len(toy.FORMS)), toy.FORMS)
        below.set_xlim(0, 1)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper center", ncol=3)
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="lower center", ncol=2)
    figure.tight_layout(rect=(0, 0.05, 1, 0.95))
    plot.save(figure, out)


if __name__ == "__main__":
    cli.run_script(main)
