"""What a run reports: a header, one line per step, warnings and a summary; and the files that it
writes (see RunLog)."""

import datetime
import json
import math
import time

import torch
import torch.distributed as dist
import transformers

from runtime import sampled
from runtime.cli import InputError, for_shell, is_rank_0, say
from runtime.files import LOGS, append_rows, beginning, how_to_resume, read_config, write_atomically
from runtime.ranks import all_gather

GROUPS_A_STEP = 2  # kept in samples.jsonl
IN_THE_LOG = "reward", "answered", "answer_tokens", "zero_advantage_groups", "entropy"


def warning(numbers):
    """What is wrong with a step and what helps, or None. judge.py asks about samples and a reward
    before there is a gradient. "When nothing is learned" in docs/rewards.md says more."""
    if not math.isfinite(numbers.get("grad_norm", 0.0)):
        return "the gradient is not finite, so no weight changed; if this goes on, lower --lr"
    if numbers["tiny_reward_groups"] > 0.5:
        return f"most groups have no reward over {sampled.TINY:g}: shorten or show the references"
    # A model that boxed, and had room for it, left a tenth of its samples without an answer, and
    # with half of that room a half. They have the reward 0, whatever their work is worth.
    if min(1 - numbers["answered"], numbers["truncated"]) > 0.25:
        # A model that never boxes is cut off, too, and more tokens would not help it.
        problem = "many samples are cut off without an answer: read some. If they are on their way"
        return f"{problem} to a box, raise --max-new-tokens; else fine-tune it first (sft.py)"
    if numbers["answered"] < 0.02:
        return "almost no answers: the model stops without a box. Fine-tune it first (sft.py)"
    if numbers.get("grad_norm") == 0 and numbers["zero_advantage_groups"] == 1:
        return "in every group all samples received the same reward, so this step had no gradient"


class RunLog:
    """The files of a run. Rank 0 prints, writes config.json, and makes, cuts and appends to the
    logs: metrics.jsonl (a line per step, and one per evaluation), samples.jsonl (the first groups
    of each step) and evaluations.jsonl (all held-out samples). All ranks call it, and gather what
    rank 0 writes.

    origin: the fingerprint. step: of the last checkpoint, or 0 if there is none, and the run begins
    anew. logged: what `state` said when the checkpoint was saved."""

    def __init__(self, out, args, origin, step, last_step, logged):
        self.out, self.args = out, args
        self.first_step, self.last_step = step + 1, last_step
        self.warned, self.started = set(), None
        flags = {k: value for k, value in vars(args).items() if k not in ("resume", "out")}
        made = {"world_size": dist.get_world_size(), "torch": torch.__version__}
        made["transformers"] = transformers.__version__
        made["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        made |= {"threads": torch.get_num_threads(), "sampler": args.sampler}
        before = read_config(out) if step else {}  # config.json keeps what began the run
        for name in [name for name in made if before.get(name, made[name]) != made[name]]:
            say(f"{name} was {before[name]} and is {made[name]}: the result may differ")
            made[name] = before[name]
        config = before | {"flags": flags} | origin | made
        write_atomically(out / "config.json", json.dumps(config, indent=2) + "\n")
        self.open_logs(logged)

    def open_logs(self, logged):
        """Make the logs, or cut them to the lengths that they had at the checkpoint: a resumed run
        may repeat what came later, and a kill may leave half a line. Without a checkpoint, what has
        been logged goes to NAME.old."""
        for log in [self.out / name for name in LOGS if is_rank_0()]:
            if not logged and log.exists() and log.stat().st_size:
                log.replace(f"{log}.old")
            with open(log, "ab") as file:
                file.truncate(logged.get(log.name, [0])[0])

    def state(self, due):
        """What rank 0 saves with a checkpoint: what beginning says of the logs, and whether an
        evaluation is due."""
        logs = {name: beginning(self.out / name, -1) for name in LOGS if is_rank_0()}
        return logs | {"due": due}

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
        lora = f", LoRA of rank {args.lora}" if args.lora else ""
        say(
            f"{args.reward} on {args.dataset}: {len(problems):,} questions, verifier {verifiers}; "
            f"{self.last_step:,} steps of {args.questions} questions x {args.samples} samples, "
            f"up to {args.max_new_tokens:,} tokens; learning rate {args.lr:g}"
        )
        say(f"{model}: {actor.num_parameters():,} parameters{lora}, {ranks} x {actor.device.type}")
        say(f"{memory}\nfiles: {self.out}")
        if not args.eval_dataset:
            say("no --eval-dataset: pass@1 is not measured")

    def evaluated(self, step, summary, lines):
        """Write and print an evaluation of a step's weights, and one of its samples."""
        pass_at_1, error = summary["pass_at_1"], summary["stderr"]
        numbers = {"step": step, "pass_at_1": pass_at_1, "pass_at_1_stderr": error}
        numbers["eval_exact_match"] = summary["exact_match"]
        self.append("evaluations.jsonl", [{"step": step} | line for line in lines])
        self.append("metrics.jsonl", [numbers])
        when = f"after step {step}" if step else "before training"
        say(f"{when}  pass@1 {sampled.with_error(pass_at_1, error)}")
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

    def step(self, step, judged, R, A, **numbers):
        """Write a step and print it, and what is wrong with it. Its numbers are means over the
        samples of all ranks, and those of the update."""
        lines = [
            sampled.group_line(each, step=step, R=R_group.tolist(), A=A_group.tolist())
            for each, R_group, A_group in zip(judged, R, A)
        ]
        self.append("samples.jsonl", lines[:GROUPS_A_STEP])
        table = sampled.sample_table(all_gather(lines))
        line = {"step": step} | sampled.of_step(table) | numbers | {"seconds": self.seconds}
        line["tokens_per_second"] = int(table.tokens.sum()) / sum(self.seconds.values())
        self.append("metrics.jsonl", [line])
        # The pace includes evaluations and checkpoints.
        pace = (time.perf_counter() - self.started) / (step - self.first_step + 1)
        eta = datetime.timedelta(seconds=round(pace * (self.last_step - step)))
        shown = [f"{name} {sampled.brief(line[name])}" for name in IN_THE_LOG if name in line]
        say(f"step {step}/{self.last_step}  {'  '.join(shown)}  {pace:.3g} s/step  eta {eta}")
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
        print(f"  curves   python plot.py {for_shell(self.out)}")
        print(f"  samples  open {self.out}/samples.jsonl in docs/samples.html")
        if self.args.eval_dataset:
            lines = sampled.read_lines(self.out)
            sampled.say_pass_at_1(sampled.sample_table(lines), "the run's own verifier")
            sampled.say_grade(lines, self.out)
