"""A training step of TRL's RLOOTrainer or GRPOTrainer against train.py's own, on prompts of yours.

    pip install -r requirements-dev.txt
    python benchmarks/against_trl.py --model DIR --dataset FILE --questions 2 --samples 8

The model, the questions, the sizes and the learning rate are the same; fp32, one thread. A step of
TRL's and a step of ours alternate in one process. Times are CPU seconds, so that other programs on
the machine hardly count. The first step of each warms up and is left out. A little noise on each
reward gives every sample an advantage. Otherwise ours would leave samples out of its update.

TRL is set up for speed: no KL term, no gradient checkpointing, no logs, one micro-batch.
"""

import itertools
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository's modules
from benchmarks.measure import commit
from engine.load import load, load_model
from engine.policy import Policy, make_adam
from engine.tokens import split_answer
from examples.trl_cer import cer_rewards
from reward_functions import REWARDS, R_by_name, ask_judges
from rloo import leave_one_out, rloo_rows, update
from rollout import sample
from runtime import cli
from runtime.ranks import init_ranks
from tasks.data import load_problems
from tasks.prompts import chat_messages

LR, TOKENS_OF_A_MICROBATCH = 1e-5, 16_384


class Alternate(TrainerCallback):
    """Times TRL's step, and then takes and times one of ours."""

    def __init__(self, our_step):
        self.our_step, self.trl, self.ours = our_step, [], []

    def on_step_begin(self, *_, **__):
        self.start = time.process_time()

    def on_step_end(self, *_, **__):
        between = time.process_time()
        self.our_step()
        self.trl.append(between - self.start)
        self.ours.append(time.process_time() - between)


def alternate(kind, reward, args, directory):
    """-> CPU seconds of each of TRL's steps, and of ours."""
    count = args.steps * args.questions
    problems = load_problems(args.dataset, count)
    cli.require(len(problems) == count, f"--dataset: expected {count} questions or more")
    starts = range(0, len(problems), args.questions)
    batches = (problems[k : k + args.questions] for k in starts)

    actor, tokenizer = load(args.model, "cpu")
    policy = Policy(load_model(args.model, "cpu", "auto"))
    optimizer = make_adam(policy)

    def our_step():
        groups = sample(actor, tokenizer, next(batches), args.samples, args.max_new_tokens)
        judged = ask_judges(groups, REWARDS[reward].judges, actor, tokenizer)
        R = R_by_name(reward, judged)
        A = leave_one_out(R + noise(R.shape))
        rows = [row for each in zip(judged, R, A) for row in rloo_rows(*each, tokenizer)]
        update(policy, optimizer, rows, LR, TOKENS_OF_A_MICROBATCH)
        policy.copy_weights(actor)

    def their_reward(prompts, completions, completion_ids, references, **_):
        if reward == "cer":
            R = cer_rewards(theirs, prompts, completion_ids, references)
        else:
            boxes = [split_answer(completion[0]["content"]) for completion in completions]
            R = [box is not None and box[1] in a for box, a in zip(boxes, references)]
        return (torch.tensor(R).float() + noise(len(R))).tolist()

    def noise(shape):
        return 1e-3 * torch.rand(shape)

    samples = args.questions * args.samples
    settings = dict(temperature=1.0, top_p=1.0, top_k=0, beta=0.0, num_generations=args.samples)
    settings |= dict(per_device_train_batch_size=samples, max_steps=args.steps, learning_rate=LR)
    settings |= dict(max_completion_length=args.max_new_tokens, gradient_checkpointing=False)
    settings |= dict(use_cpu=True, bf16=False, dataloader_pin_memory=False, output_dir=directory)
    settings |= dict(report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True)
    if kind == "GRPO":
        settings |= dict(scale_rewards="none", loss_type="dr_grpo")
    data = [{"prompt": chat_messages(p), "references": list(p.references)} for p in problems]
    callback = Alternate(our_step)
    theirs = getattr(trl, f"{kind}Trainer")(
        load(args.model, "cpu")[0],
        processing_class=tokenizer,
        callbacks=[callback],
        args=getattr(trl, f"{kind}Config")(**settings),
        reward_funcs=their_reward,
        train_dataset=Dataset.from_list(data),
    )
    theirs.train()
    return callback.trl, callback.ours


def summary(times):
    """The median of all steps but the first, and their range, in words."""
    times = times[1:]
    median = statistics.median(times)
    return median, f"{median:.3g} ({min(times):.3g} to {max(times):.3g})"


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", required=True)
    add("--dataset", required=True)
    add("--trainers", nargs="+", default=["RLOO"], choices=["RLOO", "GRPO"])
    add("--rewards", nargs="+", default=["exact", "cer"], choices=["exact", "cer"])
    add("--questions", type=int, default=2)
    add("--samples", type=int, default=8)
    add("--max-new-tokens", type=int, default=24)
    add("--steps", type=int, default=4, help="the first is not counted")
    args = parser.parse_args()
    init_ranks()
    torch.set_num_threads(1)
    print("| reward | trainer | TRL, CPU seconds a step | ours | TRL / ours |", flush=True)
    print("| --- | --- | --- | --- | --- |", flush=True)
    for kind, reward in itertools.product(args.trainers, args.rewards):
        with tempfile.TemporaryDirectory() as directory:
            (theirs, of_theirs), (ours, of_ours) = map(
                summary, alternate(kind, reward, args, directory)
            )
        cells = reward, f"{kind}Trainer", of_theirs, of_ours, f"{theirs / ours:.2f}"
        print(f"| {' | '.join(cells)} |", flush=True)
    versions = f"torch {torch.__version__}, trl {trl.__version__}, 1 thread"
    print(f"\ncommand {shlex.join(['python', *sys.argv])}, commit {commit()}, {versions}")


if __name__ == "__main__":
    cli.run_script(main)
