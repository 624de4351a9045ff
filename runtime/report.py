"""What a run reports: a header, one line per step, warnings and a summary; and the files that it
writes (see RunLog)."""

import datetime
import json
import math
import time
import unicodedata

import pandas
import torch
import torch.distributed as dist
import transformers

from runtime.cli import InputError, is_rank_0, require, say
from runtime.files import append_rows, how_to_resume, read_rows, write_atomically
from runtime.ranks import all_gather

GROUPS_A_STEP = 2  # kept in samples.jsonl
TINY = 1e-6  # rewards below this teach next to nothing
IN_THE_LOG = "reward", "answered", "answer_tokens", "zero_advantage_groups", "entropy"


# --------------------------------------------------------------------------------------- in numbers


def verbatim(answer, references):
    """Whether an answer is one of the references, which are composed (NFC) when they are loaded."""
    return unicodedata.normalize("NFC", answer or "") in references


def group_metrics(judged, R, A):
    """The metrics of one group. R, A [N]."""
    group, N = judged.group, len(R)
    # If the actor gives every answer a reward of exactly 0, it is too small for fp32.
    nothing = R.max() == 0 and not (judged.scores and any(group.answers))
    numbers = {
        "reward": R.mean().item(),
        "exact_match": sum(verbatim(a, group.problem.references) for a in group.answers) / N,
        "answered": sum(bool(answer) for answer in group.answers) / N,  # an empty box is none
        "answer_tokens": sum(box.answer_length for box in group.boxes if box and box.answer) / N,
        "truncated": sum(group.truncated) / N,
        "unique_answers": len({*group.answers} - {None, ""}),
        "solution_tokens": sum(len(group.solution(i)) for i in range(N)) / N,
        "completion_tokens": sum(len(ids) for ids in group.completions) / N,
        "zero_advantage_groups": float(not A.any()),
        "tiny_reward_groups": float(R.max() < TINY and not nothing),
    }
    if group.entropies:
        numbers["entropy"] = sum(group.entropies) / N
    if judged.right is not None:
        numbers["right"] = judged.right.float().mean().item()
    return numbers


def means(described):
    """The mean over the groups of a step."""
    return {name: sum(of[name] for of in described) / len(described) for name in described[0]}


def group_record(judged, **more):
    """One group as a line of samples.jsonl or evaluations.jsonl: what was asked and sampled, and
    what the judges said. more: what the script adds, such as its rewards."""
    group, scores = judged.group, judged.scores
    record = {
        "question": group.problem.question,
        # As scored: wordings that the tokenizer makes one are one (cer.score).
        "references": list(scores.references if scores else group.problem.references),
        "verifier": group.problem.verifier,
        "texts": group.texts,
        "answers": group.answers,  # null without a closed box
        "truncated": group.truncated,
        "tokens": [len(ids) for ids in group.completions],
    }
    if judged.right is not None:
        record["right"] = judged.right.tolist()
    if scores:
        record |= {"distinct_answers": scores.distinct_answers, "columns": scores.columns}
        for name in "log_W", "log_references", "log_P":
            record[name] = getattr(scores, name).tolist()
    return record | more


def sample_table(lines, *more):
    """Lines of group_record -> a DataFrame with a row for each sample, indexed by the line. more:
    names of other lists of N."""
    names = ["answers", "right", "truncated", *more]
    samples = pandas.DataFrame(lines)[names].explode(names).infer_objects()
    answers = samples.answers.fillna("")  # an empty box is no answer
    samples["answered"] = answers != ""
    samples["verbatim"] = [verbatim(a, lines[k]["references"]) for k, a in answers.items()]
    return samples


def say_grade(verifiers, directory):
    """Name grade.py where the truth is `text`, which calls a paraphrase wrong."""
    if "text" in verifiers:
        grade = f"python grade.py {directory}"
        print(f"`text` calls paraphrases wrong, which flatters exact and overlap: {grade}")


def brief(x, digits=3):
    """So many significant digits."""
    text = f"{x:.{digits}g}"
    return text.replace("0.", ".", 1) if abs(x) < 1 else text


def with_error(mean, error):
    """A mean and its standard error, which a single question does not have."""
    return brief(mean) + ("" if error is None or math.isnan(error) else f" ± {brief(error, 2)}")


def over_questions(shares):
    """The mean of what each question has, and its standard error."""
    return with_error(shares.mean(), shares.sem())


def warning(numbers):
    """What is wrong with a step and what helps, or None. "When nothing is learned" in
    docs/running.md says more."""
    if not math.isfinite(numbers["grad_norm"]):
        return "the gradient is not finite, so no weight changed; if this goes on, lower --lr"
    if numbers["answered"] < 0.02 and numbers["truncated"] > 0.5:
        return "almost no answers, and most samples are cut off: raise --max-new-tokens"
    if numbers["answered"] < 0.02:
        return "almost no answers: the model stops without a box. Give it a warm_start.py"
    if numbers["tiny_reward_groups"] > 0.5:
        return f"most groups have no reward over {TINY:g}: shorten or demonstrate the references"
    if numbers["zero_advantage_groups"] == 1 and numbers["grad_norm"] == 0:
        return "in every group all samples received the same reward, so this step had no gradient"


# ------------------------------------------------------------------------------------------- pass@1


def read_lines(directory):
    """The lines of judge.py or of an evaluation, each with its run: the directory, or an evaluation
    of a training run. Of these the first and the last are read."""
    is_run = (directory / "config.json").exists()
    lines = read_rows(directory / ("evaluations.jsonl" if is_run else "samples.jsonl"))
    require(lines, f"{directory} has no evaluation: train.py makes them with --eval-dataset")
    needed = {"question", "references", "answers", "right"}
    whole = all(needed <= line.keys() for line in lines)
    require(whole, f"{directory}: its lines lack some of {', '.join(sorted(needed))}")
    for line in lines:
        line["run"] = f"{directory} step {line['step']}" if "step" in line else str(directory)
    return [line for line in lines if line["run"] in (lines[0]["run"], lines[-1]["run"])]


def case_of(row):
    """What is graded: a question with its references."""
    return row["question"], tuple(row["references"])


def say_pass_at_1(lines, by):
    """Print pass@1 of each run, and its change from the first run. ±: standard errors over
    questions; noise may reach two of them. The change is paired by question, which takes the
    questions' own spread out of its error. Lines with the same question and references are one."""
    of_lines = [(x["run"], repr(case_of(x)), sum(x["right"]) / len(x["right"])) for x in lines]
    table = pandas.DataFrame(of_lines, columns=["run", "case", "share"])
    table = table.pivot_table("share", "case", "run", sort=False)
    print(f"\n{len(table)} questions, what is right by {by}:")
    for run in table:
        line = f"  {run}: pass@1 {over_questions(table[run])}"
        if run != table.columns[0]:
            line += f", change {over_questions(table[run] - table.iloc[:, 0])}"
        print(line)


# ------------------------------------------------------------------------------------------ the log


class RunLog:
    """Rank 0 prints, and appends to metrics.jsonl (a line per step, and one per evaluation),
    samples.jsonl (the first groups of each step) and evaluations.jsonl (all held-out samples). All
    ranks call it, and gather what rank 0 writes."""

    def __init__(self, out, args, data, first_step, last_step):
        self.out, self.args = out, args
        self.first_step, self.last_step = first_step, last_step
        self.warned, self.started = set(), None
        flags = {k: value for k, value in vars(args).items() if k not in ("resume", "out")}
        config = {"flags": flags, "data": data, "world_size": dist.get_world_size()}
        config["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
        write_atomically(out / "config.json", json.dumps(config, indent=2) + "\n")

    def append(self, name, rows):
        """Append rows to a log. Where that fails, as on a full disk, say how to go on."""
        try:
            append_rows(self.out / name, rows)
        except InputError as error:
            raise InputError(f"{error}; {how_to_resume(self.out)}") from error

    def header(self, actor, problems, memory):
        """Print the first lines of a run. memory: what memory.py says."""
        args = self.args
        verifiers = ", ".join(sorted({problem.verifier for problem in problems}))
        model, ranks = args.model or "the toy model", dist.get_world_size()
        say(
            f"{args.reward} on {args.dataset}: {len(problems):,} questions, verifier {verifiers}; "
            f"{self.last_step:,} steps of {args.questions} questions x {args.samples} samples, "
            f"up to {args.max_new_tokens:,} tokens; learning rate {args.lr:g}"
        )
        say(f"{model}: {actor.num_parameters():,} parameters, {ranks} x {actor.device.type}")
        say(f"{memory}\nfiles: {self.out}")

    def evaluated(self, step, summary, lines):
        """Write and print an evaluation of a step's weights, and one of its samples."""
        pass_at_1, error = summary["pass_at_1"], summary["stderr"]
        numbers = {"step": step, "pass_at_1": pass_at_1, "pass_at_1_stderr": error}
        numbers["eval_exact_match"] = summary["exact_match"]
        self.append("evaluations.jsonl", [{"step": step} | line for line in lines])
        self.append("metrics.jsonl", [numbers])
        when = f"after step {step}" if step else "before training"
        say(f"{when}  pass@1 {with_error(pass_at_1, error)}")
        sample = lines[0]
        a_star = " or ".join(sample["references"])
        right = "right" if sample["right"][0] else f"wrong, a* is {a_star}"
        question, text = (" ".join(x.split()) for x in (sample["question"], sample["texts"][0]))
        say(f"  a sample: {question[-100:]} -> {text[-160:]}  ({right})")

    def start(self):
        """Start the clock of a step."""
        self.seconds, self.since = {}, time.perf_counter()
        self.started = self.started or self.since

    def lap(self, part):
        """Note the seconds of a part of the step, which ends here. The first thing for which ranks
        wait for each other is the update, so rank 0's wait counts as that."""
        now = time.perf_counter()
        self.seconds[part], self.since = now - self.since, now

    def step(self, step, judged, R, A, numbers):
        """Write a step and print it, and what is wrong with it. Its numbers are means over the
        groups of all ranks."""
        described = all_gather([group_metrics(*each) for each in zip(judged, R, A)])
        line = {"step": step} | means(described) | numbers | {"seconds": self.seconds}
        line["answer_tokens"] /= line["answered"] or 1  # the mean of the samples with an answer
        sampled = line["completion_tokens"] * R.shape[1] * len(described)
        line["tokens_per_second"] = sampled / sum(self.seconds.values())
        self.append("metrics.jsonl", [line])
        kept = [
            group_record(each, step=step, R=R_group.tolist())
            for each, R_group in zip(judged[:GROUPS_A_STEP], R)
        ]
        self.append("samples.jsonl", kept)
        # The pace includes evaluations and checkpoints.
        pace = (time.perf_counter() - self.started) / (step - self.first_step + 1)
        eta = datetime.timedelta(seconds=round(pace * (self.last_step - step)))
        shown = "  ".join(f"{name} {brief(line[name])}" for name in IN_THE_LOG if name in line)
        say(f"step {step}/{self.last_step}  {shown}  {pace:.3g} s/step  eta {eta}")
        problem = warning(line)
        if problem and problem not in self.warned:  # once in a run
            self.warned.add(problem)
            say(f"warning at step {step}: {problem}")

    def summary(self):
        """Print the last lines of a finished run."""
        if not is_rank_0():
            return
        print(f"{self.args.reward} on {self.args.dataset}")
        print(f"  model    {self.out}/checkpoints/step-{self.last_step}")
        print(f"  curves   python plot.py {self.out}")
        print(f"  samples  open {self.out}/samples.jsonl in docs/samples.html")
        if self.args.eval_dataset:
            lines = read_lines(self.out)
            say_pass_at_1(lines, "the run's own verifier")
            say_grade([line.get("verifier") for line in lines], self.out)
