"""How well does each reward tell right samples from wrong ones, on the toy's held-out questions?

    python benchmarks/judge.py --model DIR --name "SmolLM2, warm start"
    python benchmarks/judge.py     # only write the table and the figure again, from the CSV

AUC is how often, within a question, a right sample receives a larger reward than a wrong one. Ties
count half, and .5 is chance. "A wrong one ahead" is how often the wrong one receives the larger
reward, ties left out. Wrong samples are wrong work (the working is wrong) or slips (a wrong
answer after right work). A sample without an answer counts as wrong work. For each form of answer,
the script also measures how often it is given, and pi(a*|s) after right work where a* has that
form. All numbers are means over questions, with 95% intervals by a bootstrap over questions.

A model's lines in the CSV replace those of the same name. The samples are kept in runs/judge, where
plot.py --question can draw them.
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
from engine.files import to_jsonl, write_atomically
from rewards import conditional_expectation
from rollout import sample
from tasks import toy
from tasks.data import load_problems
from tasks.verifiers import verdict

REWARDS = ["exact", "rule", "verifree", "cer", "rule+cer"]
FEW = 10  # a statistic of fewer questions is marked, in italics or in grey


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", help="Hugging Face id or directory (default: none, only draw the CSV)")
    add("--name", help="of the model, in the table and figure (default: --model)")
    add("--questions", type=count, default=150, help="number of questions, from the first")
    add("--samples", type=cli.number(int, 2), default=16, help="N, samples of each question")
    add("--seed", type=int, default=0, help="random seed of the samples")
    add("--out", type=Path, default=ROOT / "benchmarks/results/judge.csv", help="the CSV")
    args = parser.parse_args()
    lines = pandas.read_csv(args.out) if args.out.exists() else pandas.DataFrame()
    if args.model:
        name = args.name or args.model
        groups = samples_of(args, ranks.init_ranks())
        slug = re.sub(r"\W+", "-", name)
        samples = ROOT / "runs" / "judge" / f"{slug}-{args.seed}" / "samples.jsonl"
        samples.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(samples, to_jsonl(groups))
        new = summary([statistics(group) for group in groups])
        new = new.assign(model=name, seed=args.seed, commit=commit())
        others = lines[lines.model != name] if len(lines) else lines
        lines = pandas.concat([others, new.round(4)])
        lines.to_csv(args.out, index=False)
    cli.require(len(lines), f"{args.out}: no such file; --model measures a model")
    args.out.with_suffix(".md").write_text(table(lines))
    draw(lines, args.out.with_suffix(".png"))


def samples_of(args, device, at_once=10):
    """Sample all questions -> rows as in samples.jsonl, with CER's matrices over all solutions."""
    groups, problems = [], load_problems("toy-test", args.questions)
    model, tokenizer = load.load(args.model, device)
    ranks.seed_everything(args.seed)
    for start in tqdm(range(0, len(problems), at_once), unit="batch"):
        batch = problems[start : start + at_once]
        sampled = sample(model, tokenizer, batch, args.samples, max_new_tokens=40)
        R, records = conditional_expectation(sampled, actor=model, tokenizer=tokenizer, M=None)
        for group, R_group, record in zip(sampled, R, records):
            said = [a is not None and verdict(group.problem, a) for a in group.answers]
            record["correct"] = [one == "right" for one in said]
            groups.append(log.group_record(0, group, R_group, record))
    return groups


# ----------------------------------------------------------------------------------- the statistics


def rewards_of(group):
    """The rewards of one group's samples -> {name: R [N]}."""
    answers, a_star, R_cer = group["answers"], group["reference"], torch.tensor(group["R"])
    exact = torch.tensor([float(answer == a_star) for answer in answers])
    rule = torch.tensor([float(toy.same_digits(answer or "", a_star)) for answer in answers])
    P = torch.zeros(len(answers))
    P[group["columns"]] = torch.tensor(group["log_P"]).exp()
    return dict(exact=exact, rule=rule, verifree=P, cer=R_cer) | {"rule+cer": (rule + R_cer) / 2}


def statistics(group):
    """The statistics of one question -> {(statistic, which reward or form): value}. A mean over no
    samples is nan, and is left out later. By Theorem 2 the mean rewards of exact match, VeriFree
    and CER estimate the same number."""
    answers, right = group["answers"], torch.tensor(group["correct"])
    work = right_work(group["question"], group["texts"])
    slips = ~right & work & torch.tensor([answer is not None for answer in answers])
    values = {("right", "samples"): right.float().mean()}
    values["slips among the wrong", "samples"] = slips[~right].float().mean()
    for name, R in rewards_of(group).items():
        values["mean reward", name] = R.mean()
        for kind, wrong in ("", ~right), (", wrong work", ~right & ~slips), (", slips", slips):
            ahead = R[right][:, None] - R[wrong]  # of all pairs
            values[f"AUC{kind}", name] = ((ahead > 0) + 0.5 * (ahead == 0)).mean()
        values["a wrong one ahead", name] = (R[right][:, None] < R[~right]).float().mean()
    values["AUC - verifree", "cer"] = values["AUC", "cer"] - values["AUC", "verifree"]

    # How much of an answer's row of D^-1 W is on right work.
    rows, work_of_columns = group["distinct_answers"], work[group["columns"]]
    posterior = torch.tensor(group["log_W"]).view(len(rows), -1).softmax(1)
    mass = dict(zip(rows, (posterior @ work_of_columns.float()).tolist()))
    mass = torch.tensor([mass.get(answer, torch.nan) for answer in answers])
    values["posterior on right work, right answers", "samples"] = mass[right].mean()
    values["posterior on right work, slips", "samples"] = mass[slips].mean()

    forms = [form_of(answer) for answer in answers]
    for form in toy.FORMS:
        values["share of answers", form] = torch.tensor(forms.count(form) / len(forms))
    P = torch.tensor(group["log_P"]).exp()
    values["P after right work", form_of(group["reference"])] = P[work_of_columns].mean()
    return {key: value.item() for key, value in values.items()}


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
    lines = []
    statistics_of = pandas.DataFrame(by_question).dropna(axis=1, how="all")
    for (statistic, which), values in statistics_of.items():
        values = values.dropna()
        again = numpy.random.default_rng(0).choice(values, (repeats, len(values))).mean(axis=1)
        low, high = numpy.quantile(again, [0.025, 0.975])
        line = dict(statistic=statistic, which=which, mean=values.mean(), low=low, high=high)
        lines.append(line | dict(questions=len(values)))
    return pandas.DataFrame(lines)


# -------------------------------------------------------------------------------- table and figure


def table(lines):
    """For each model, a table of the samples, the rewards and the forms."""
    text = f"*Italics* mark means over fewer than {FEW} questions.\n"
    cells = [f"{x.mean:.3f} ({x.low:.3f} to {x.high:.3f})" for x in lines.itertuples()]
    cells = [f"*{x}*" if few else x for x, few in zip(cells, lines.questions < FEW)]
    by_model = lines.assign(cell=cells).groupby(["model", "seed", "commit"], sort=False)
    for (model, seed, of_commit), chosen in by_model:
        text += f"\n### {model}, seed {seed} (commit {of_commit})\n"
        for which in ["samples"], REWARDS, toy.FORMS:
            part = chosen[chosen.which.isin(which)]
            part = part.pivot(index="which", columns="statistic", values="cell")
            text += "\n" + markdown(part.reindex(which).fillna(""))
    return text


def draw(lines, out):
    """Draw the AUC of each reward against wrong work and slips, and how often each form is given.
    Every panel has a row for each model."""
    models = list(lines.model.unique())
    size = (9.5, 1.5 + 0.6 * len(models))
    figure, axes = plot.plt.subplots(1, 3, figsize=size, sharey=True, layout="constrained")
    for axis, statistic in zip(axes, ["AUC, wrong work", "AUC, slips"]):
        axis.set(title=statistic.replace(",", " against"), xlim=(0, 1.03))
        axis.axvline(0.5, color="grey", linewidth=0.8, linestyle=":")
        for x in lines[lines.statistic == statistic].itertuples():
            y = models.index(x.model) + 0.15 * (REWARDS.index(x.which) - 2)
            colour = plot.COLOURS[x.which] if x.questions >= FEW else "lightgrey"
            axis.plot([x.low, x.high], [y, y], color=colour)
            axis.plot(x.mean, y, "o", color=colour, markersize=5)
    dots = [axes[0].plot([], [], "o", color=plot.COLOURS[name])[0] for name in REWARDS]
    figure.legend(dots, REWARDS, loc="outside upper center", ncols=5)
    forms = lines.pivot(index="model", columns=["statistic", "which"], values="mean")
    forms = forms.loc[models, "share of answers"][toy.FORMS]
    plot.draw_matrix(axes[2], forms.to_numpy(), "Blues", digits=2, top=1.0)
    axes[1].set_xlabel(f"grey: fewer than {FEW} questions")
    axes[2].set_title("share of answers")
    axes[2].set_xticks(range(len(toy.FORMS)), toy.FORMS, rotation=90)
    axes[2].set_yticks(range(len(models)), models)
    plot.save(figure, out)


if __name__ == "__main__":
    cli.run_script(main)
