"""How well each reward tells right samples from wrong ones, on questions whose truth is known.

    python benchmarks/judge.py --model DIR --name "SmolLM2, warm start" --seed 0

Within a question that has both: the AUC (how often a right sample is paid more than a wrong one;
ties count half) and the correlation of the reward with being right. Of the toy also: the AUC
against wrong work alone, and against slips alone (wrong answers after right work); and by the form
of an answer, how often it is given, and pi(a*|s) after right work where a* has that form. All are
means over questions, with 95% intervals by a bootstrap over questions.

Every model and seed adds its lines to the CSV; table and figure show them all. The samples stay in
runs/judge, where plot.py --question can draw them; started again, the script goes on there.
"""

import itertools
import json
import re
from pathlib import Path

import numpy
import pandas
import torch
from measure import ROOT, commit
from tqdm import tqdm

import plot
import toy
from cer import cer, choose_solutions
from data import load_problems, read_rows, require
from engine import cli, policy, run
from engine.sampling import encode_prompt, sample
from rewards import Judge, conditional_expectation, is_correct, verdict


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", required=True, help="Hugging Face id or directory")
    add("--name", required=True, help="of the model, in table and figure")
    add("--dataset", default="toy-test", help="data set by name or file")
    add("--questions", type=count, default=150, help="the first so many")
    add("--samples", type=cli.number(int, 2), default=16, help="N, samples of each question")
    add("--max-new-tokens", type=count, default=40, help="samples are cut off here")
    add("--seed", type=int, default=0, help="of the samples")
    add("--out", type=Path, default=ROOT / "benchmarks/results/judge.csv", help="the CSV")
    args = parser.parse_args()
    device = run.init_ranks()
    name = re.sub(r"\W+", "-", args.name)
    directory = ROOT / "runs" / "judge" / f"{name}-{args.seed}"
    directory.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_groups(args, device, directory / "samples.jsonl")

    run.seed_everything(args.seed, "which M solutions")
    lines = summary([statistics(group) for group in read_rows(directory / "samples.jsonl")])
    require("AUC" in set(lines.statistic), "no question has both right and wrong samples")
    lines = lines.assign(model=args.name, seed=args.seed, commit=commit())
    if args.out.exists():
        others = pandas.read_csv(args.out)
        others = others[(others.model != args.name) | (others.seed != args.seed)]
        lines = pandas.concat([others, lines])
    lines.round(4).to_csv(args.out, index=False)
    args.out.with_suffix(".md").write_text(table(lines))
    print(table(lines[(lines.model == args.name) & (lines.seed == args.seed)]))
    draw(lines, args.out.with_suffix(".png"))


def write_groups(args, device, path, at_once=10):
    """Sample the questions and ask CER, with all solutions, into a samples.jsonl."""
    model, tokenizer = policy.load(args.model, device)
    problems = load_problems(args.dataset, args.questions)
    done = len(read_rows(path)) if path.exists() else 0
    with tqdm(total=len(problems), initial=done, unit="question") as bar:
        for start in range(done, len(problems), at_once):
            run.seed_everything(args.seed, start)
            batch = problems[start : start + at_once]
            questions = [(problem, encode_prompt(tokenizer, problem)) for problem in batch]
            rollouts = sample(model, tokenizer, questions, args.samples, args.max_new_tokens)
            judged = conditional_expectation(rollouts, Judge(model, tokenizer, args.samples))
            text = ""
            for rollout, (R, record) in zip(rollouts, judged):
                samples = [(rollout.problem, *pair) for pair in zip(rollout.texts, rollout.answers)]
                record["correct"] = [is_correct(*of) for of in samples]
                record["verdicts"] = [verdict(*of) for of in samples]
                group = {"step": 0, "kind": rollout.problem.kind}
                text += json.dumps(group | run.sample_record(rollout, R, record)) + "\n"
                bar.update()
            with open(path, "a") as file:
                file.write(text)


# ----------------------------------------------------------------------------------- the statistics


def rewards_of(group):
    """-> {reward: R [N]}, all from the same samples; CER with fewer solutions from the same W."""
    answers, solutions = group["answers"], group["solutions"]
    W, P = torch.tensor(group["W"]), torch.tensor(group["P"])
    row = {answer: u for u, answer in enumerate(group["distinct_answers"])}
    led_to = [row[answers[j]] for j in solutions]
    R = {"exact": torch.tensor([float(answer == group["reference"]) for answer in answers])}
    R["rule"] = torch.tensor([float(said == "right") for said in group["verdicts"]])
    R["verifree"] = torch.zeros(len(answers)).index_copy(0, torch.tensor(solutions).long(), P)
    for M in (M for M in (1, 2, 4, 8, 16) if M <= len(answers)):
        R[f"cer, M = {M}"] = torch.zeros(len(answers))
        if solutions:
            chosen = choose_solutions(len(row), led_to, min(M, len(solutions)))
            by_answer = cer(W.log().masked_fill(~chosen, -torch.inf), P.log())
            R[f"cer, M = {M}"][solutions] = by_answer[led_to]
    return R


def statistics(group):
    """Of one question -> {(statistic, of which reward or form): value}."""
    rewards, right, found = rewards_of(group), torch.tensor(group["correct"]), {}
    for name, R in rewards.items():
        found["mean reward", name] = R.mean().item()
        for other in "exact", "verifree":  # Theorem 2: differences of 0
            found[f"mean reward - {other}", name] = (R - rewards[other]).mean().item()
        if right.any() and not right.all():
            found["AUC", name] = auc(R[right], R[~right])
            verifree = auc(rewards["verifree"][right], rewards["verifree"][~right])
            found["AUC - verifree", name] = found["AUC", name] - verifree
            both = torch.stack([R, right.float()])
            found["correlation", name] = torch.corrcoef(both)[0, 1].nan_to_num(0.0).item()
    found["right", "samples"] = right.float().mean().item()
    return found | (toy_statistics(group, rewards, right) if group["kind"] == "toy" else {})


def toy_statistics(group, rewards, right):
    """Where the working shows: wrong work, and slips, which are wrong answers after right work. And
    where the answers have forms."""
    found, forms = {}, [form_of(answer) for answer in group["answers"]]
    first, _, second, _ = WORK[group["question"]]
    planned = torch.tensor([first in text and second in text for text in group["texts"]])
    for name, R in rewards.items():
        for kind, wrong in ("wrong work", ~right & ~planned), ("slips", ~right & planned):
            if right.any() and wrong.any():
                found[f"AUC, {kind}", name] = auc(R[right], R[wrong])
    if not right.all():
        found["slips among the wrong", "samples"] = planned[~right].float().mean().item()
    for form in toy.FORMS:
        found["share of answers", form] = forms.count(form) / len(forms)
    after_right = [p for p, j in zip(group["P"], group["solutions"]) if planned[j]]
    if after_right:
        found["P after right work", form_of(group["reference"])] = numpy.mean(after_right)
    return found


WORK = {story.question(): story.work(story.method) for story in itertools.chain(*toy.stories())}


def auc(right, wrong):
    difference = right[:, None] - wrong
    return ((difference > 0) + 0.5 * (difference == 0)).mean().item()


def form_of(answer):
    value = toy.value_of(answer or "")
    for form, unit in itertools.product(toy.FORMS, toy.UNITS if value is not None else []):
        if answer == form.format(n=value, word=toy.in_words(value), unit=unit):
            return form


def summary(by_question, repeats=2000):
    """One line for each statistic: its mean over the questions that have it."""
    values, lines = pandas.DataFrame(by_question), []
    for statistic, of in values:
        column = values[statistic, of].dropna()
        again = numpy.random.default_rng(0).choice(column, (repeats, len(column))).mean(axis=1)
        low, high = numpy.quantile(again, [0.025, 0.975])
        found = dict(mean=column.mean(), low=low, high=high, stderr=column.sem())
        lines.append(dict(statistic=statistic, of=of, **found, questions=len(column)))
    return pandas.DataFrame(lines)


# -------------------------------------------------------------------------------- table and figure


def table(lines):
    """For each model and seed: the rewards, then the forms."""
    text = ""
    for (model, seed), mine in lines.groupby(["model", "seed"], sort=False):
        text += f"### {model}, seed {seed} (commit {mine.commit.iloc[0]})\n\n"
        for kind in mine.groupby(mine.of.isin(toy.FORMS)):
            cells = kind[1].apply(
                lambda line: f"{line['mean']:.3f} ({line.low:.3f} to {line.high:.3f})", axis=1
            )
            cells = kind[1].assign(cell=cells).pivot(index="of", columns="statistic", values="cell")
            cells = cells.reindex(kind[1].of.unique()).fillna("")
            rows = [["", *cells.columns], ["---"] * (1 + len(cells.columns))]
            rows += [[f"`{of}`", *row] for of, row in zip(cells.index, cells.to_numpy())]
            text += "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n\n"
    return text


def draw(lines, out):
    """A column for each model, means of its seeds: above AUC by M, below the forms."""
    models = list(dict.fromkeys(lines.model))
    size = dict(figsize=(3.6 * len(models), 6.5), squeeze=False, sharex="row", sharey="row")
    figure, axes = plot.plt.subplots(2, len(models), **size)
    for (above, below), model in zip(axes.T, models):
        mine = lines[lines.model == model].groupby(["statistic", "of"], sort=False)
        mine = mine[["mean", "low", "high"]].mean()
        named = mine.index.unique("statistic")
        for style, name in zip("- -- :".split(), ("AUC", "AUC, wrong work", "AUC, slips")):
            by_M = mine.loc[name].filter(like="cer", axis=0) if name in named else []
            if len(by_M):
                error = [by_M["mean"] - by_M.low, by_M.high - by_M["mean"]]
                options = dict(color=plot.COLOURS[0], label=name.replace("AUC", "cer"), capsize=2)
                above.errorbar(range(len(by_M)), by_M["mean"], error, fmt="o" + style, **options)
                above.set_xticks(range(len(by_M)), by_M.index.str.removeprefix("cer, M = "))
        for colour, reward in zip(plot.COLOURS[1:], ("verifree", "rule", "exact")):
            above.axhline(mine.loc[("AUC", reward), "mean"], color=colour, label=reward)
        above.set(ylim=(0.38, 1.02), xlabel="M")
        above.set_title(model, fontsize=10)
        for shift, name in (-0.2, "share of answers"), (0.2, "P after right work"):
            if name in named:
                bars, y = mine.loc[name, "mean"].reindex(toy.FORMS), numpy.arange(len(toy.FORMS))
                below.barh(y + shift, bars, height=0.4, label=name)
                below.set_yticks(y, toy.FORMS)
    axes[0, 0].set_ylabel("AUC within a question")
    for height, axis in (1, axes[0, 0]), (0.49, axes[1, 0]):
        labelled = axis.get_legend_handles_labels()
        figure.legend(*labelled, loc="upper center", bbox_to_anchor=(0.5, height), ncol=6)
    figure.tight_layout(h_pad=3, rect=(0, 0, 1, 0.96))
    plot.save(figure, out)


if __name__ == "__main__":
    cli.run_script(main)
