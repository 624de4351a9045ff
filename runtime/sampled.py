"""What a run has sampled: in its files a line for each group, and from these one table with a row
for each sample. What a sample is (answered, right, ...) is derived there and nowhere else."""

import json
import math
import unicodedata

import pandas

from runtime.cli import for_shell, require
from runtime.files import read_rows

TINY = 1e-6  # rewards below this teach next to nothing
OF_LINES = "run question references verifier document".split()
OF_SAMPLES = "texts answers truncated tokens solution_tokens answer_tokens".split()
OF_SAMPLES += "entropies right R A".split()


def verbatim(answer, references):
    """Whether an answer is one of the references, which are composed (NFC) when they are loaded."""
    return unicodedata.normalize("NFC", answer or "") in references


def case_of(line):
    return json.dumps([line["question"], line["references"]])


def group_line(judged, **more):
    """One group as a line of samples.jsonl or evaluations.jsonl: what was asked and sampled, and
    what the judges said. more: what the script adds, such as its rewards."""
    group, scores = judged.group, judged.scores
    line = {
        "question": group.problem.question,
        # As scored: wordings that the tokenizer makes one are one (cer.score).
        "references": list(scores.references if scores else group.problem.references),
        "verifier": group.problem.verifier,
        "texts": group.texts,
        "answers": group.answers,  # null without a closed box
        "truncated": group.truncated,
        "tokens": [len(ids) for ids in group.completions],
        "solution_tokens": [len(group.solution(i)) for i in range(len(group.texts))],
        "answer_tokens": [box.answer_length if box else 0 for box in group.boxes],
    }
    if group.problem.document:
        line["document"] = group.problem.document
    if group.entropies:
        line["entropies"] = group.entropies
    right = judged.accepted if judged.right is None else judged.right
    if right is not None:
        line["right"] = right.tolist()
    if scores:
        line |= {"distinct_answers": scores.distinct_answers, "columns": scores.columns}
        for name in "log_W", "log_references", "log_P":
            line[name] = getattr(scores, name).tolist()
    return line | more


def sample_table(lines):
    """Lines of group_line -> a DataFrame with a row for each sample, and a column for each reward.
    `line` is the number of its line, and `case` what it answers: a question and its references.
    `cluster` is what may be dependent: all samples of a document, or of a question without one."""
    rows = []
    for line_number, line in enumerate(lines):
        own = {name: line.get(name) for name in OF_LINES}
        own |= {"line": line_number, "case": case_of(line), "scored": "log_W" in line}
        own["cluster"] = line.get("document") or line["question"]
        lists = {name: line[name] for name in OF_SAMPLES if name in line} | line.get("rewards", {})
        for values in zip(*lists.values()):
            row = own | dict(zip(lists, values))
            row["answers"] = row["answers"] or ""  # an empty box is no answer
            row["answered"] = row["answers"] != ""
            row["verbatim"] = verbatim(row["answers"], line["references"])
            rows.append(row)
    return pandas.DataFrame(rows)


def of_questions(samples):
    """pass@1: see mean_of_questions. Lines with the same question and references are one."""
    by_case = samples.groupby("case", sort=False)
    return mean_of_questions(by_case.right.mean(), by_case.cluster.first())


def mean_of_questions(values, clusters):
    """The mean of a value that each question has, and its standard error, which allows for
    questions of one cluster that vary together. With one question in each it is that of the mean of
    independent values. A single cluster has none."""
    mean, count = values.mean(), clusters.nunique()
    if count < 2:
        return mean, None
    of_clusters = (values - mean).groupby(clusters).sum()
    return mean, math.sqrt((of_clusters**2).sum() * count / (count - 1)) / len(values)


def of_step(samples):
    """What a line of metrics.jsonl says of the samples of a step."""
    answered, by_line = samples[samples.answered], samples.line
    numbers = {
        "reward": samples.R.mean(),
        "exact_match": samples.verbatim.mean(),
        "answered": samples.answered.mean(),
        "answer_tokens": answered.answer_tokens.mean() if len(answered) else 0.0,
        "truncated": samples.truncated.mean(),
        "unique_answers": samples.answers.where(samples.answered).groupby(by_line).nunique().mean(),
        "solution_tokens": samples.solution_tokens.mean(),
        "completion_tokens": samples.tokens.mean(),
        "zero_advantage_groups": (samples.A == 0).groupby(by_line).all().mean(),
        "tiny_reward_groups": tiny_reward_groups(samples, samples.R, samples.scored),
    }
    for name, column in ("entropy", "entropies"), ("right", "right"):
        if column in samples:
            numbers[name] = samples[column].mean()
    return {name: float(value) for name, value in numbers.items()}


def tiny_reward_groups(samples, R, scored):
    """The share of groups in which no sample receives a reward to speak of. R: of each sample.
    scored: whether an actor gives it."""
    best = R.groupby(samples.line).max()
    # Where an actor gives every answer a reward of exactly 0, it is too small for fp32.
    is_reward = (best > 0) | (samples.answered & scored).groupby(samples.line).any()
    return ((best < TINY) & is_reward).mean()


# ----------------------------------------------------------------------------------------- in words


def brief(x, digits=3):
    """So many significant digits."""
    text = f"{x:.{digits}g}"
    return text.replace("0.", ".", 1) if abs(x) < 1 else text


def with_error(mean, error):
    """A mean and its standard error, which a single question does not have."""
    return brief(mean) + ("" if pandas.isna(error) else f" ± {brief(error, 2)}")


def read_lines(directory):
    """The lines of judge.py or of an evaluation, each with its run: the directory, or an evaluation
    of a training run. Of these the first, the last and the one in the middle are read."""
    place, run = directory.resolve().parent, directory.parent.parent
    require(place.name != "checkpoints", f"{directory} is a checkpoint: name its run, {run}")
    name = "evaluations.jsonl" if (directory / "config.json").exists() else "samples.jsonl"
    lines = read_rows(directory / name, needed=("question", "references", "answers", "right"))
    require(lines, f"{directory} has no evaluation: train.py makes them with --eval-dataset")
    for line in lines:
        line["run"] = f"{directory} step {line['step']}" if "step" in line else str(directory)
    runs = list(dict.fromkeys(line["run"] for line in lines))
    chosen = runs[0], runs[len(runs) // 2], runs[-1]
    return [line for line in lines if line["run"] in chosen]


def say_pass_at_1(samples, by):
    """Print pass@1 of each run, and its change from the first run. ±: standard errors over
    questions, or over documents where there are some; noise may reach two of them. The change is
    paired by question, which takes the questions' own spread out of its error. Lines with the same
    question and references are one."""
    shares = samples.pivot_table("right", "case", "run", sort=False)
    clusters = samples.groupby("case").cluster.first().reindex(shares.index)
    documents = f" about {count} documents" if (count := samples.document.nunique()) else ""
    print(f"\n{len(shares)} questions{documents}, what is right by {by}:")
    for run in shares:
        line = f"  {run}: pass@1 {with_error(*mean_of_questions(shares[run], clusters))}"
        if run != shares.columns[0]:
            change = shares[run] - shares.iloc[:, 0]
            line += f", change {with_error(*mean_of_questions(change, clusters))}"
        print(line)


def say_grade(lines, directory):
    """Name grade.py where the truth is `text`, which calls a paraphrase wrong."""
    if "text" in {line.get("verifier") for line in lines}:
        grade = f"python grade.py {for_shell(directory)}"
        print(f"`text` calls paraphrases wrong, which flatters exact and overlap: {grade}")
