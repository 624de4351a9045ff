"""What a run reports: a header, one line per step, warnings and a summary; and the files that it
writes (see RunLog). Also what judge.py prints."""

import datetime
import json
import math
import time

import numpy
import pandas
import torch
import torch.distributed as dist
import transformers

from rloo import leave_one_out
from runtime.cli import is_rank_0, say
from runtime.files import append_rows, read_rows, references_of, to_jsonl, write_atomically
from runtime.ranks import all_gather

GROUPS_A_STEP = 2  # kept in samples.jsonl
TINY = 1e-6  # rewards below this teach next to nothing
FEW = 10  # with fewer questions the standard error is itself too uncertain for an interval
RARE = 1e-4  # a question without a larger reward has hardly any weight beside the others


# --------------------------------------------------------------------------------------- in numbers


def describe(judged, R, A):
    """The metrics of one group. R, A [N]."""
    group, N = judged.group, len(R)
    # Tiny is not 0: P of a long reference can underflow, and its recorded logarithm does not.
    log_P = judged.scores.log_P if judged.scores and judged.scores.columns else R.log()
    stated = [answer for answer in group.answers if answer]  # an empty box is no answer
    numbers = {
        "reward": R.mean().item(),
        "exact_match": sum(answer in group.problem.references for answer in group.answers) / N,
        "answered": len(stated) / N,
        "truncated": sum(group.truncated) / N,
        "unique_answers": len(set(stated)),
        "solution_tokens": sum(len(group.solution(i)) for i in range(N)) / N,
        "completion_tokens": sum(len(ids) for ids in group.completions) / N,
        "zero_advantage_groups": float(not A.any()),
        "tiny_reward_groups": float(R.max() < TINY and log_P.max() > -math.inf),
    }
    if group.entropies:
        numbers["entropy"] = sum(group.entropies) / N
    if judged.right is not None:
        numbers["verifier_right"] = judged.right.mean().item()
    return numbers


def means(described):
    """The mean over the groups of a step. A metric that is missing from a group counts as 0."""
    names = sorted({name for numbers in described for name in numbers})
    return {n: sum(numbers.get(n, 0) for numbers in described) / len(described) for n in names}


def group_record(step, judged, R):
    """One group as a row of samples.jsonl."""
    group, scores, said = judged.group, judged.scores, {}
    if judged.right is not None:
        words = zip(group.answers, judged.right.tolist())
        said["verdicts"] = [a if a is None else "right" if yes else "wrong" for a, yes in words]
    if scores:
        matrices = {"log_W": scores.log_W.tolist(), "log_P": scores.log_P.tolist()}
        said |= matrices | {"distinct_answers": scores.distinct_answers, "columns": scores.columns}
    return {
        "step": step,
        "question": group.problem.question,
        "reference": group.problem.reference,
        "references": group.problem.references,
        "texts": group.texts,
        "answers": group.answers,
        "truncated": group.truncated,
        "R": R.tolist(),
        **said,
    }


IN_THE_LOG = "reward", "answered", "truncated", "zero_advantage_groups", "entropy"


def brief(x):
    """Three significant digits."""
    return f"{x:.3g}".replace("0.", ".", 1) if abs(x) < 1 else f"{x:.3g}"


def plus_minus(numbers):
    error = numbers["pass_at_1_stderr"]  # null if there is one question
    return "" if error is None else f" ± {brief(error)}"


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


# ----------------------------------------------------------------------------------- rewards judged


def say_judgement(rows):
    """Print what judge.py's rows of samples.jsonl say about their rewards -> the table."""
    names, lists = [*rows[0]["rewards"]], ["answers", "right", "truncated"]
    frame = pandas.DataFrame([row | row["rewards"] for row in rows])
    samples = frame[[*lists, *names]].explode([*lists, *names]).infer_objects()
    samples["answered"] = samples.answers.fillna("") != ""  # an empty box is no answer
    samples["verbatim"] = [a in references_of(rows[k]) for k, a in samples.answers.items()]
    shares = samples[["answered", "right", "verbatim", "truncated"]].mean()
    both, table = judge_rewards(samples, names)
    sampled = ", ".join(f"{name} {brief(share)}" for name, share in shares.items())
    print(f"{len(rows)} questions x {len(rows[0]['answers'])} samples: {sampled}")
    print(f"{both} questions have both right and wrong answers; AUC is their mean")
    print(table.to_string(float_format="{:.3g}".format, na_rep="-"))
    if "cer" in names and samples.right.any():
        print("least CER of right answers; the model rarely writes such references:")
        for k, reward in samples[samples.right].groupby(level=0).cer.mean().nsmallest(3).items():
            answer = samples.loc[[k]].query("right").answers.iloc[0]
            reference = " or ".join(references_of(rows[k]))
            print(f"  {reward:.1e}  {answer!r:.50} for a* = {reference!r:.50}")
    print(advice(shares, table, len(rows)))
    return table


def judge_rewards(samples, names):
    """-> how many questions have both right and wrong answers, and judge.py's table with a row for
    each reward. samples: indexed by question. The interval is a bootstrap over questions."""
    answered = samples[samples.answered]
    right, wrong = answered[answered.right][names], answered[~answered.right][names]
    both = sorted({*right.index} & {*wrong.index})
    aucs = [auc(right.loc[[k]], wrong.loc[[k]]) for k in both] or [[math.nan] * len(names)]
    means = numpy.random.default_rng(0).choice(aucs, (2000, len(aucs))).mean(1)  # [2000, names]
    groups = samples.groupby(level=0)[names]
    columns = {
        "AUC": numpy.mean(aucs, axis=0),
        "from": numpy.quantile(means, 0.025, axis=0),
        "to": numpy.quantile(means, 0.975, axis=0),
        "aim": [aim(samples[name], samples.right) for name in names],
        "mean if right": right.mean(),
        "if wrong": wrong.mean(),
        "right, nothing": (right < TINY).mean(),
        "groups, equal": (groups.nunique() == 1).sum(),
        "groups, tiny": (groups.max() < RARE).sum(),
    }
    return len(both), pandas.DataFrame(columns, index=names)


def auc(right, wrong):
    """For each reward how often a right sample of a question receives more than a wrong one; ties
    count half. right, wrong [samples, rewards]."""
    difference = right.to_numpy()[:, None] - wrong.to_numpy()
    return ((difference > 0) + 0.5 * (difference == 0)).mean((0, 1))


def aim(R, right):
    """The cosine between the advantages of a reward and those of the truth, over all samples: 1 if
    training would push every sample as the truth does. Unlike AUC it knows the size of rewards: one
    that is tiny in most groups teaches the others alone. Nan if one of the two has no advantage.
    R, right: Series, indexed by question."""

    def advantages(series):
        groups = [torch.tensor(group.to_numpy(float)) for _, group in series.groupby(level=0)]
        return torch.cat([leave_one_out(group) for group in groups])

    A, A_truth = advantages(R), advantages(right)
    return (A @ A_truth / (A.norm() * A_truth.norm())).item()


def advice(shares, table, questions):
    """What the numbers mean for training, in a sentence."""
    if "cer" in table.index and table["from"]["cer"] < 0.6:
        return "cer may not tell right from wrong here (see its interval): look at samples first"
    if shares.right < 0.1:
        return "Few samples are right: take easier questions, or a supervised start (warm_start.py)"
    if "cer" in table.index and table["groups, tiny"]["cer"] > questions / 2:
        return "Most rewards are tiny: shorten the references"
    if shares.verbatim < 0.7 * shares.right:
        return "Many right answers are not verbatim: use cer, or rule if a verifier reads them all"
    return "Most right answers are verbatim: exact may do, and costs least"


def say_pass_at_1(samples):
    """Print pass@1 of each run by the user's grades, and how it differs from the first run's.
    samples: a DataFrame with run, question, and two columns of bool: you, verifier."""
    runs, samples = list(samples.run.unique()), samples.astype({"you": bool, "verifier": bool})
    samples["agree"] = samples.you == samples.verifier
    shares = samples.groupby(["question", "run"])[["you", "verifier", "agree"]].mean().unstack()
    yours = shares.you[runs]  # [questions, runs]
    columns = {"pass@1": yours.mean(), "SE": yours.sem()}
    columns |= {"its verifier's": shares.verifier.mean(), "you agree on": shares.agree.mean()}
    table = pandas.DataFrame(columns, index=runs)
    print(f"\n{len(yours)} questions by your grades")
    print(table.to_string(float_format="{:.3g}".format, na_rep="-"))
    for run in runs[1:]:
        change = yours[run] - yours[runs[0]]  # paired by question
        low, high = (change.mean() + sign * 1.96 * change.sem() for sign in (-1, 1))
        interval = f"95%: {low:.3g} to {high:.3g}"
        interval = interval if len(change) >= FEW else f"grade {FEW} questions for an interval"
        print(f"{run} minus {runs[0]}: {brief(change.mean())} ({interval})")


# ------------------------------------------------------------------------------------------ the log


class RunLog:
    """Rank 0 prints, and writes config.json, metrics.jsonl (one line per step), samples.jsonl (the
    first groups of each step), questions.jsonl (the largest reward of each group) and
    evaluations.jsonl (all held-out samples). All ranks call it, and gather what rank 0 writes."""

    def __init__(self, out, args, data, first_step, last_step):
        self.out, self.args, self.warned = out, args, set()
        self.first_step, self.last_step = first_step, last_step
        kept = {}  # the steps before the first one; a resumed run repeats later steps
        for name in "metrics.jsonl", "samples.jsonl", "questions.jsonl", "evaluations.jsonl":
            rows = read_rows(out / name, log=True) if first_step > 1 else []
            kept[name] = [row for row in rows if row["step"] < first_step]
        # A kill may have come between the two writes of an evaluation.
        complete = {line["step"] for line in kept["metrics.jsonl"] if "pass_at_1" in line}
        kept["evaluations.jsonl"] = [r for r in kept["evaluations.jsonl"] if r["step"] in complete]
        self.lines = kept["metrics.jsonl"] or [{"step": first_step - 1}]
        flags = {k: value for k, value in vars(args).items() if k not in ("resume", "out")}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        config = {"flags": flags, "data": data, "world_size": dist.get_world_size()}
        config = json.dumps(config | {"versions": versions}, indent=2)
        write_atomically(out / "config.json", config + "\n")
        for name, rows in kept.items():
            write_atomically(out / name, to_jsonl(rows))

    def header(self, actor, problems, memory):
        """Print the first lines of a run. memory: what memory.py says."""
        args, parameters = self.args, sum(p.numel() for p in actor.parameters())
        verifiers = ", ".join(sorted({problem.verifier for problem in problems}))
        model, ranks = args.model or "the toy model", dist.get_world_size()
        say(
            f"{args.reward} on {args.dataset}: {len(problems):,} questions, verifier {verifiers}; "
            f"{self.last_step:,} steps of {args.questions} questions x {args.samples} samples, "
            f"up to {args.max_new_tokens:,} tokens; learning rate {args.lr:g}"
        )
        say(f"{model}: {parameters:,} parameters, {ranks} x {actor.device.type}")
        say(f"{memory}\nfiles: {self.out}")

    def has_evaluation(self):
        """Whether the weights that this process starts from have been evaluated."""
        return "pass_at_1" in self.lines[-1]

    def evaluated(self, summary, records):
        """Write and print an evaluation of the last step's weights, and one of its samples."""
        numbers = {"pass_at_1": summary["pass_at_1"], "pass_at_1_stderr": summary["stderr"]}
        self.lines[-1] |= numbers | {"eval_exact_match": summary["exact_match"]}
        step, sample = self.lines[-1]["step"], records[0]
        append_rows(self.out / "evaluations.jsonl", [{"step": step} | row for row in records])
        write_atomically(self.out / "metrics.jsonl", to_jsonl(self.lines))
        when = f"after step {step}" if step else "before training"
        say(f"{when}  pass@1 {brief(numbers['pass_at_1'])}{plus_minus(numbers)}")
        a_star = " or ".join(sample["references"])
        right = "right" if sample["correct"] else f"wrong, a* is {a_star}"
        question, text = (" ".join(sample[key].split()) for key in ("question", "text"))
        say(f"  a sample: {question[-100:]} -> {text[-160:]}  ({right})")

    def start(self):
        """Start the clock of a step."""
        self.seconds, self.since = {}, time.perf_counter()

    def lap(self, part):
        """Note the seconds of a part of the step, which ends here. The first thing for which ranks
        wait for each other is the update, so rank 0's wait counts as that."""
        now = time.perf_counter()
        self.seconds[part], self.since = now - self.since, now

    def step(self, step, judged, R, A, numbers):
        """Write and print a step: the means over the groups of all ranks, and more numbers."""
        described = all_gather([describe(*each) for each in zip(judged, R, A)])
        largest = [
            {"step": step, "question": each.group.problem.question, "best": best}
            for each, best in zip(judged, R.amax(1).tolist())
        ]
        largest = all_gather(largest)
        line = {"step": step} | means(described) | numbers | {"seconds": self.seconds}
        tokens = line["completion_tokens"] * R.shape[1] * len(described)
        line |= {"tokens_per_second": tokens / sum(self.seconds.values())}
        self.lines.append(line)
        append_rows(self.out / "questions.jsonl", largest)
        append_rows(self.out / "metrics.jsonl", [line])
        kept = list(zip(judged, R))[:GROUPS_A_STEP]
        append_rows(self.out / "samples.jsonl", [group_record(step, *each) for each in kept])

        now = time.perf_counter()
        if step == self.first_step:
            self.started = now - sum(self.seconds.values())
        seconds = (now - self.started) / (step - self.first_step + 1)
        eta = datetime.timedelta(seconds=round(seconds * (self.last_step - step)))
        shown = "  ".join(f"{name} {brief(line[name])}" for name in IN_THE_LOG if name in line)
        say(f"step {step}/{self.last_step}  {shown}  {seconds:.3g} s/step  eta {eta}")
        problem = warning(line)
        if problem and problem not in self.warned:
            self.warned.add(problem)
            say(f"warning at step {step}: {problem}")

    def stopped(self, step):
        """Print how to go on with a run that was stopped."""
        say(f"stopped after step {step} of {self.last_step}; go on with --resume --out {self.out}")

    def summary(self):
        """Print the last lines of a finished run."""
        if not is_rank_0():
            return
        print(f"{self.args.reward} on {self.args.dataset}")
        if tests := [line for line in self.lines if "pass_at_1" in line]:
            first, last = (brief(x["pass_at_1"]) + plus_minus(x) for x in (tests[0], tests[-1]))
            rows = pandas.DataFrame(read_rows(self.out / "evaluations.jsonl"))
            by_step = rows.groupby(["index", "step"]).correct.mean().unstack()  # [questions, steps]
            change = by_step.iloc[:, -1] - by_step.iloc[:, 0]  # paired by question
            error = f" ± {brief(change.sem())} (SE; noise may reach 2 SE)"
            change = brief(change.mean()) + (error if len(change) > 1 else "")
            print(f"  pass@1            first {first}, last {last}, change {change}")
        steps = pandas.DataFrame([line for line in self.lines if "seconds" in line])
        largest = pandas.DataFrame(read_rows(self.out / "questions.jsonl"))
        best = largest.groupby("question", sort=False).best.max()
        span = min(10, math.ceil(len(steps) / 2))  # since single steps ask different questions
        for name in "reward", "exact_match", "answered":
            first, last = (brief(part[name].mean()) for part in (steps[:span], steps[-span:]))
            print(f"  {name:16}  first {first}, last {last} (mean of {span} of {len(steps)} steps)")
        if rare := list(best[best < RARE].index):
            print(f"  {len(rare)} of {len(best)} questions never had a reward > {RARE:g}, such as")
            for question in rare[:3]:
                print(f"    {' '.join(question.split())[-90:]}")
        minutes = pandas.DataFrame(list(steps.seconds)).sum() / 60
        print("  training minutes  " + ", ".join(f"{part} {m:.1f}" for part, m in minutes.items()))
        print(f"  model             {self.out}/checkpoints/step-{self.last_step}")
        print(f"  curves            python plot.py {self.out}")
        print(f"  samples           open {self.out}/samples.jsonl in docs/explore.html")
