"""How well each reward tells right samples from wrong ones, on questions whose truth is known.

    python benchmarks/judge.py --model DIR --name "SmolLM2, warm start" --seed 0

"Right" is what pass@1 counts: the number on the toy, elsewhere the rule, which is then perfect by
definition. Within a question that has both: the AUC (how often a right sample is paid more than a
wrong one; ties count half) and the correlation of the reward with being right. Of the toy also: the
AUC against wrong work alone, and against slips alone (wrong answers after right work); and by the
form of an answer, how often it is given, and pi(a*|s) after right work where a* has that form. All
are means over questions, with 95% intervals by a bootstrap over questions.

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
from measure import ROOT, commit, markdown
from tqdm import tqdm

import plot
import toy
from cer import Group, reward_group
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
    run.init_ranks()
    slug = re.sub(r"\W+", "-", args.name)
    groups = samples_of(args, ROOT / "runs" / "judge" / f"{slug}-{args.seed}")

    run.seed_everything(args.seed, "which M solutions")
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


def samples_of(args, directory, at_once=10):
    """The samples of all questions, with CER's matrices from all solutions. They are sampled and
    scored into directory/samples.jsonl, unless they are there."""
    path, config = directory / "samples.jsonl", directory / "config.json"
    directory.mkdir(parents=True, exist_ok=True)
    flags = {name: getattr(args, name) for name in SAMPLING}
    if not config.exists():
        run.write_whole(config, json.dumps(flags))
    same = json.loads(config.read_text()) == flags
    require(same, f"--name {args.name}: {directory} holds samples taken with other flags")
    groups = read_rows(path) if path.exists() else []
    problems = load_problems(args.dataset, args.questions)
    if len(groups) >= len(problems):
        return groups[: len(problems)]

    model, tokenizer = policy.load(args.model, run.compute_device())
    with tqdm(total=len(problems), initial=len(groups), unit="question") as bar:
        for start in range(len(groups), len(problems), at_once):
            run.seed_everything(args.seed, start)
            batch = problems[start : start + at_once]
            questions = [(problem, encode_prompt(tokenizer, problem)) for problem in batch]
            rollouts = sample(model, tokenizer, questions, args.samples, args.max_new_tokens)
            judged = conditional_expectation(rollouts, Judge(model, tokenizer, args.samples))
            for rollout, (R, record) in zip(rollouts, judged):
                samples = [(rollout.problem, *pair) for pair in zip(rollout.texts, rollout.answers)]
                record["correct"] = [is_correct(*each) for each in samples]
                record["verdicts"] = [verdict(*each) for each in samples]
                group = {"step": 0, "kind": rollout.problem.kind}
                groups.append(group | run.sample_record(rollout, R, record))
                bar.update()
            run.write_whole(path, "".join(json.dumps(group) + "\n" for group in groups))
    return groups


SAMPLING = "model dataset samples max_new_tokens seed".split()  # the flags that samples depend on


# ----------------------------------------------------------------------------------- the statistics


def rewards_of(group):
    """-> {reward: R [N]}, all of the same samples; CER with M < N solutions from the same W."""
    answers, a_star, solutions = group["answers"], group["reference"], group["solutions"]
    distinct, P = group["distinct_answers"], torch.tensor(group["P"])
    log_W = torch.tensor(group["W"]).reshape(len(distinct), len(solutions)).log()
    matrices = Group(a_star, answers, distinct, solutions, log_W, P.log())
    R = {"exact": torch.tensor([float(answer == a_star) for answer in answers])}
    R["rule"] = torch.tensor([float(verdict == "right") for verdict in group["verdicts"]])
    R["verifree"] = torch.zeros(len(answers)).index_copy(0, torch.tensor(solutions).long(), P)
    for M in [M for M in (1, 2, 4, 8, 16) if M < len(answers)] + [len(answers)]:
        R[f"cer, M = {M}"], _ = reward_group(matrices, M)
    return R


def statistics(group):
    """Of one question -> {(statistic, which reward or form): value}. A sample without an answer
    counts as wrong; where all samples are paid alike the correlation is 0. By Theorem 2 the mean
    rewards of exact match, VeriFree and CER estimate one number."""
    rewards, right, values = rewards_of(group), torch.tensor(group["correct"]), {}
    for name, R in rewards.items():
        values["mean reward", name] = R.mean().item()
        for other in "exact", "verifree":
            values[f"mean reward - {other}", name] = (R - rewards[other]).mean().item()
        if right.any() and not right.all():
            values["AUC", name] = auc(R[right], R[~right])
            both = torch.stack([R, right.float()])
            values["correlation", name] = torch.corrcoef(both)[0, 1].nan_to_num(0.0).item()
    for name in rewards if ("AUC", "verifree") in values else ():
        values["AUC - verifree", name] = values["AUC", name] - values["AUC", "verifree"]
    values["right", "samples"] = right.float().mean().item()
    return values | (toy_statistics(group, rewards, right) if group["kind"] == "toy" else {})


def toy_statistics(group, rewards, right):
    """The toy's working shows which wrong answers are slips; and its answers have forms."""
    values, forms = {}, [form_of(answer) for answer in group["answers"]]
    first, x, second, value = WORK[group["question"]]
    first, second = re.escape(f"{first}={x}"), re.escape(second)
    working = re.compile(rf"{first}\b.*\b{second}(?:={value}\b|(?![=\d]))")
    right_work = torch.tensor([bool(working.search(text)) for text in group["texts"]])
    slips = ~right & right_work & torch.tensor([answer is not None for answer in group["answers"]])
    for name, R in rewards.items():
        for kind, wrong in ("wrong work", ~right & ~right_work), ("slips", slips):
            if right.any() and wrong.any():
                values[f"AUC, {kind}", name] = auc(R[right], R[wrong])
    if not right.all():
        values["slips among the wrong", "samples"] = slips[~right].float().mean().item()
    for kind, some in ("right answers", right), ("slips", slips):
        if some.any():  # their rows of D^-1 W, on the solutions with right work
            rows = [group["distinct_answers"].index(group["answers"][i]) for i in some.nonzero()]
            posterior = torch.tensor(group["W"])[rows].log().softmax(1)
            mass = (posterior @ right_work[group["solutions"]].float()).mean().item()
            values[f"posterior on right work, {kind}", "samples"] = mass
    for form in toy.FORMS:
        values["share of answers", form] = forms.count(form) / len(forms)
    after_right = [p for p, j in zip(group["P"], group["solutions"]) if right_work[j]]
    if after_right:
        values["P after right work", form_of(group["reference"])] = numpy.mean(after_right)
    return values


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
    table, lines = pandas.DataFrame(by_question), []
    for statistic, which in table:
        values = table[statistic, which].dropna()
        again = numpy.random.default_rng(0).choice(values, (repeats, len(values))).mean(axis=1)
        low, high = numpy.quantile(again, [0.025, 0.975])
        line = dict(statistic=statistic, which=which, mean=values.mean(), low=low, high=high)
        lines.append(line | dict(stderr=values.sem(), questions=len(values)))
    return pandas.DataFrame(lines)


# -------------------------------------------------------------------------------- table and figure


def table(lines):
    """For each model and seed: the samples, the rewards, the forms. In brackets the most questions
    that a row of the column has."""
    text = ""
    for (model, seed), chosen in lines.groupby(["model", "seed"], sort=False):
        text += f"### {model}, seed {seed} (commit {chosen.commit.iloc[0]})\n\n"
        is_form, is_all = chosen.which.isin(toy.FORMS), chosen.which == "samples"
        for part in chosen[is_all], chosen[~is_form & ~is_all], chosen[is_form]:
            cells = part.apply(lambda x: f"{x['mean']:.3f} ({x.low:.3f} to {x.high:.3f})", axis=1)
            cells = part.assign(cell=cells).pivot(index="which", columns="statistic", values="cell")
            cells = cells.reindex(part.which.unique()).fillna("")
            asked = part.groupby("statistic").questions.max()
            head = ["", *(f"{name} [{asked[name]}]" for name in cells)]
            rows = [[f"`{which}`", *row] for which, row in zip(cells.index, cells.to_numpy())]
            text += markdown(head, rows) + "\n\n"
    return text


def draw(lines, out):
    """A column for each model, means of its seeds: above AUC by M, with the mean of their
    intervals; below the forms."""
    models = list(dict.fromkeys(lines.model))
    size = dict(figsize=(3.6 * len(models), 6.5), squeeze=False, sharex="row", sharey="row")
    figure, axes = plot.plt.subplots(2, len(models), **size)
    for (above, below), model in zip(axes.T, models):
        means = lines[lines.model == model].groupby(["statistic", "which"], sort=False)
        means = means[["mean", "low", "high"]].mean()
        there = means.index.unique("statistic")
        for style, name in zip("- -- :".split(), ("AUC", "AUC, wrong work", "AUC, slips")):
            if name in there:
                by_M = means.loc[name].filter(like="cer", axis=0)
                M = [int(reward.split("=")[1]) for reward in by_M.index]
                error = [by_M["mean"] - by_M.low, by_M.high - by_M["mean"]]
                options = dict(color=plot.COLOURS[0], label=name.replace("AUC", "cer"), capsize=2)
                above.errorbar(M, by_M["mean"], error, fmt="o" + style, **options)
                above.set_xscale("log")
                above.set_xticks(M, M)
                above.minorticks_off()
        for colour, reward in zip(plot.COLOURS[1:], ("verifree", "rule", "exact")):
            if "AUC" in there:
                above.axhline(means.loc[("AUC", reward), "mean"], color=colour, label=reward)
        above.set_xlabel("M")
        above.set_title(model, fontsize=10)
        for shift, name in (-0.2, "share of answers"), (0.2, "P after right work"):
            if name in there:
                bars, y = means.loc[name, "mean"].reindex(toy.FORMS), numpy.arange(len(toy.FORMS))
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
