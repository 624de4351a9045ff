"""Numbers in docs/ that are computed again from what was measured, or from other numbers."""

import re

import numpy
import pandas
from conftest import ROOT
from test_readme import COMMAND

import measure
from experiments.rare_reference import rare_reference
from experiments.tests.told import (
    in_words,
    names_of,
    over_questions_and_seeds,
    page_of,
    section,
    shown,
    words_of,
)
from runtime.files import read_rows
from runtime.sampled import sample_table


def test_the_table_of_choices_is_that_of_the_trainings():
    """docs/rewards.md: the levels at which trainings ended, and differences with seeds counted."""
    page = (ROOT / "docs/rewards.md").read_text()
    page = words_of(section(page, "Which one for your answers?"))
    rivals = names_of(section(page_of("people_trained"), "What came out of the rivals"))["read"]
    small = names_of(section(page_of("people_trained"), "What came out on the GPU"))["read"]
    small = small[small.model == "135M"]
    rare = pandas.read_csv(ROOT / "experiments/rare_reference/rare-reference.csv")
    ends = [of.groupby(["run", "seed"])["read"].mean() for of in (rivals, rare, small)]
    on_several, on_rare, on_small = (of.groupby("run").mean() for of in ends)
    for mean in on_several, on_rare, on_small:
        assert mean["verifree"] == mean.max() and mean["overlap"] >= mean["cer"]
    assert on_small["verifree"] - on_small["overlap"] < 0.01  # "level with"
    several = rivals.groupby(["run", "seed", "line"])["read"].mean()
    ahead = over_questions_and_seeds(several["verifree"] - several["cer"])
    _, difference, error, *_ = list(rare_reference.comparisons(rare))[1]  # cer - overlap
    for said in (
        f"at {on_several['verifree']:.2f} with [several references]",
        f"at {on_rare['verifree']:.2f} with [one rare wording]",
        f"where `overlap` has {on_rare['overlap']:.2f} and `cer` {on_rare['cer']:.2f}.",
        f"It ended {in_words(-difference, error)} above `cer` with one rare wording",
        f"[{in_words(*ahead)}](../experiments/people_trained",
    ):
        assert said.replace(" 0.", " .") in page, said


def test_the_first_hour_on_a_gpu_is_as_it_was_measured():
    of = pandas.read_json(ROOT / "benchmarks/results/gpu-h100.jsonl", lines=True).set_index("part")
    page = (ROOT / "docs/machines.md").read_text()
    fast = pandas.read_json(ROOT / "benchmarks/results/gpu-h100-slots.jsonl", lines=True)
    decoding = fast[(fast.part == "decoding") & (fast.commit == "956b4fd")]
    for name, sampler in ("generate()", "generate"), ("engine/slots.py", "auto"):
        steps = decoding[decoding.command.str.endswith(sampler)].seconds
        assert f"| `{name}` | {' | '.join(f'{x:.3f}'.lstrip('0') for x in steps)} |" in page
    away, there = fast[fast.part == "flagship"].seconds
    moments = fast[fast.what == "moments back"].seconds.item()  # from the first copy on
    # Scoring, between contexts of 1,000 and of 2,000 tokens, for a prompt of 110 and 1,250 more.
    ten = of.loc["scoring"].query("U == 10").groupby("context").seconds.first()
    one = ten[1000] + (110 + 1250 - 1000) / 1000 * (ten[2000] - ten[1000])
    said = f"32 times {one:.2f} s, between {ten[1000]:.2f} s at contexts of 1,000 tokens and "
    said = f"| scoring | {32 * one:.0f} | {said}{ten[2000]:.2f} s at 2,000 |"
    assert re.sub(r"\b0\.", ".", said) in page
    step = away + moments + 32 * one + 61
    assert f"| {away:.0f} |" in page and f"a step takes {step:.0f} s" in page
    assert f"about {step * 1171 / 3600:.0f} hours" in page
    about = f"[about {32 * one / step:.0%}](machines.md#hours)"
    assert about in (ROOT / "docs/rewards.md").read_text()
    paper = 67.4 * 3600 * 4 / 1560  # GPU-seconds of a step
    times = f"620 GPU-seconds, {paper / step:.1f} times"
    assert round(paper, -1) == 620 and times in " ".join(page.split())
    speed = " ".join((ROOT / "benchmarks/results/speed.md").read_text().split())
    assert f"in place sampling took {there:.0f} s" in speed and f"of the host {away:.0f} s" in speed
    rates = fast[fast.how.notna() & fast["length"].eq(1000) & (fast.rows == 256)].tb_per_s
    assert [f"{x:.1f}" for x in rates] == ["2.1", "2.9"] and "read 2.1 TB/s" in speed
    update = of.loc["updating"]
    assert f"| {update.tokens_per_second:,.0f} |" in page
    assert f"| {update.policy_peak_gib:.1f}, {update.policy_estimate_gib:.1f} |" in page
    scored = of.loc["scoring"].query("U == 10 and context == 1000").iloc[0]
    assert f"| {scored.seconds:.2f} ({scored.ratio:.1f} times".replace("0.", ".", 1) in page


def test_the_printed_table_of_judge_is_that_of_its_samples(capsys):
    lines = read_rows(ROOT / "experiments/asking/judge-example.jsonl")
    measure.say_ratings(sample_table([{"question": k} | line for k, line in enumerate(lines)]))
    printed = "".join(f"    {line}\n" for line in capsys.readouterr().out.splitlines())
    assert printed in (ROOT / "docs/rewards.md").read_text()


def test_by_cer_answers_that_say_nothing_receive_the_mean():
    """Their reward minus the mean of the question's answers, and the standard error."""
    lines = read_rows(ROOT / "experiments/asking/judge-example.jsonl")
    page = (ROOT / "docs/failures.md").read_text()
    for name in "cer", "asked":
        of_answers = [
            [R for R, answer in zip(line["rewards"][name], line["answers"]) if answer]
            for line in lines
        ]
        more = [line["nothing"][name] - sum(R) / len(R) for line, R in zip(lines, of_answers) if R]
        said = f"{numpy.mean(more):.3f} ± {pandas.Series(more).sem():.3f}".replace("0.", ".")
        assert said in " ".join(page.split()), said


def test_what_is_said_of_the_paper_s_table_follows_from_it():
    page = (ROOT / "docs/paper.md").read_text()
    rows = section(page, "What the paper reports")
    names = "exact match", "a rule", "VeriFree", "CER", "Rule+CER", "General-verifier"
    exact, rule, verifree, cer, both, judged = (numpy.array(shown(rows, of)[-4:]) for of in names)
    assert (both > numpy.maximum.reduce([exact, rule, verifree, cer, judged])).all()
    said = "CER alone is ahead of exact match in each, by {:.1f} to {:.1f} points, and of VeriFree,"
    ahead = [x for other in (exact, verifree) for x in (min(cer - other), max(cer - other))]
    words = " ".join(rows.split())
    assert (said + " by {:.1f} to {:.1f}.").format(*ahead) in words
    said = "the rule is {:.1f} and {:.1f} points ahead of CER".format(*(rule - cer)[2:])
    assert said.replace("0.", ".") in words


def test_every_experiment_says_first_what_was_found():
    """Then its script and data, and last what was declared and what ran. The commands with the
    script, which are today's, name real scripts and flags."""
    late = re.compile("Declared|What ran|What was changed")
    for page in [*ROOT.glob("experiments/*/README.md"), ROOT / "experiments" / "TEMPLATE.md"]:
        head, *parts = page.read_text().split("\n## ")
        assert "| made by | from | commit | status |\n" in head, page
        for script in (part for part in parts if part.startswith("Script, data, picture\n")):
            for name, flags in COMMAND.findall("\n".join(re.findall(r"`([^`\n]*)`", script))):
                if "NAME" not in name:
                    defined = re.findall(r'"(--[a-z][\w-]*)"', (ROOT / f"{name}.py").read_text())
                    assert set(re.findall(r"--[a-z][\w-]*", flags)) <= set(defined), (page, name)
        kinds = [2 if late.match(x) else x.startswith("Script, data, picture\n") for x in parts]
        assert kinds == sorted(kinds) and kinds.count(1) == 1, page
