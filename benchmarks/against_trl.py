"""Time a training step with exact match, of TRL's RLOOTrainer and GRPOTrainer and of train.py.

    pip install -r requirements-dev.txt
    python benchmarks/against_trl.py
    python benchmarks/against_trl.py --model DIR --questions 4 --samples 4 --cases exact-match

Both have the same model, questions, sizes and learning rate, fp32 and one thread. Steps of TRL and
of ours alternate in one process. Times are CPU seconds, so other programs on the machine hardly
affect them. The first step of each is a warm-up and is left out. The cases:

    exact-match      plain rewards; our update skips the rows with advantage 0
    every-row        a little noise is added to each reward, so that every row has an advantage
    long-tail        as every-row, but nothing is sampled. Both get the same completions, whose
                     lengths are log-normal with mean L = --max-new-tokens, cut at 4 L

TRL is set up for speed, with no KL term, gradient checkpointing or logs, and one micro-batch.
"""

import itertools
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
import trl
from datasets import Dataset
from measure import ROOT, markdown, where
from transformers import TrainerCallback

import toy
from data import load_problems
from engine import cli, run
from engine.policy import MOST_TOKENS, Policy, copy_weights, load, load_model
from engine.tokens import split_answer
from rewards import exact_match
from rloo import leave_one_out, rloo_rows, update
from rollout import chat_messages, encode_prompt, sample, to_group

CASES, LR = ("exact-match", "every-row", "long-tail"), 1e-5


class Alternate(TrainerCallback):
    """Times TRL's step, then takes and times one of ours."""

    def __init__(self, our_step):
        self.our_step, self.trl, self.ours = our_step, [], []

    def on_step_begin(self, *_, **__):
        self.start = time.process_time()

    def on_step_end(self, *_, **__):
        between = time.process_time()
        self.our_step()
        self.trl.append(between - self.start)
        self.ours.append(time.process_time() - between)


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", help="Hugging Face directory (default: the toy's, made here)")
    add("--cases", nargs="+", choices=CASES, default=CASES)
    add("--questions", type=count, default=toy.FLAGS["questions"])
    add("--samples", type=cli.number(int, 2), default=toy.FLAGS["samples"])
    add("--max-new-tokens", type=count, default=toy.FLAGS["max_new_tokens"])
    add("--steps", type=cli.number(int, 2), default=20, help="including the warm-up")
    add("--out", type=Path, default=ROOT / "benchmarks/results/against_trl.md", help="appended to")
    args = parser.parse_args()
    run.init_ranks()
    torch.set_num_threads(1)
    rows, name = [], Path(args.model or "toy").name
    source = ", ".join([f"{k} {v}" for k, v in where().items()] + [f"trl {trl.__version__}"])
    with tempfile.TemporaryDirectory() as directory:
        if not args.model:
            args.model = f"{directory}/toy"
            toy.warm_start(args.model, seed=0)
        for case, trainer in itertools.product(args.cases, ("RLOO", "GRPO")):
            (theirs, ours), cells = zip(*map(summary, alternate(case, trainer, args, directory)))
            rows.append([name, case, f"{trainer}Trainer", *cells, f"{theirs / ours:.2f}"])
    head = ["model", "case", "trainer", "TRL, CPU seconds per step", "ours", "TRL / ours"]
    text = f"{markdown(head, rows)}\n\n{source}\n"
    print(text)
    with args.out.open("a") as file:
        file.write(text + "\n")


def summary(times):
    times = times[1:]  # the first is a warm-up
    median = statistics.median(times)
    return median, f"{median:.3g} ({min(times):.3g} to {max(times):.3g})"


def alternate(case, trainer, args, directory):
    """Take TRL's steps and ours in turn -> CPU seconds of TRL's, CPU seconds of ours."""
    B, N, L = args.questions, args.samples, args.max_new_tokens
    problems, rng, noise = load_problems("toy"), random.Random(0), 1e-3 * (case != "exact-match")
    given = None
    if case == "long-tail":
        lengths = [min(4 * L, 1 + int(L * rng.lognormvariate(-0.5, 1))) for _ in range(B * N)]
        given = [rng.choices(range(10, 250), k=length) for length in lengths]

    actor, tokenizer = load(args.model, "cpu")
    policy = Policy(load_model(args.model, "cpu", torch.float32))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0)

    def our_step():
        batch = rng.sample(problems, B)
        if given:
            groups = [
                to_group(
                    tokenizer,
                    stops=[],
                    problem=problem,
                    prompt=encode_prompt(tokenizer, problem),
                    completions=given[k * N : (k + 1) * N],
                    entropies=[0.0] * N,
                )
                for k, problem in enumerate(batch)
            ]
        else:
            groups = sample(actor, tokenizer, batch, N, L)
        R = exact_match(groups)[0] + noise * torch.rand(B, N)
        each = zip(groups, R, leave_one_out(R))
        rows = [row for question in each for row in rloo_rows(*question, tokenizer)]
        update(policy, optimizer, rows, LR, MOST_TOKENS["cpu"])
        copy_weights(policy, actor)

    def exact(completions, reference, **_):
        found = [split_answer(completion[0]["content"]) for completion in completions]
        right = [bool(box) and box[1] == a_star for box, a_star in zip(found, reference)]
        return [one + noise * rng.random() for one in right]

    config = getattr(trl, f"{trainer}Config")(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        max_completion_length=L,
        num_generations=N,
        per_device_train_batch_size=B * N,
        max_steps=args.steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        output_dir=directory,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    if trainer == "GRPO":
        config.scale_rewards, config.loss_type = "none", "dr_grpo"
    data = [{"prompt": chat_messages(p), "reference": p.reference} for p in problems]
    callback = Alternate(our_step)
    theirs = getattr(trl, f"{trainer}Trainer")(
        load(args.model, "cpu")[0],
        processing_class=tokenizer,
        callbacks=[callback],
        args=config,
        reward_funcs=exact,
        train_dataset=Dataset.from_list(data),
    )
    if given:  # in place of sampling
        sampled = (given, None) if trainer == "GRPO" else given
        theirs._generate_single_turn = lambda *_, **__: sampled
    theirs.train()
    return callback.trl, callback.ours


if __name__ == "__main__":
    cli.run_script(main)
