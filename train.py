"""CER-RLOO: reinforcement learning in which the policy's own probabilities are the reward.

    python train.py                                                  # the toy, on a CPU
    python train.py --model Qwen/Qwen3-4B-Base --dataset math7.5k    # the paper, on one GPU
    torchrun --nproc-per-node 4 train.py --model Qwen/Qwen3-4B-Base --dataset webinstruct

Each step: sample N solutions and answers to B questions, reward them, subtract the leave-one-out
baseline, take one optimizer step, copy the weights to the actor.
"""

import functools
import logging
import math
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import toy
from data import InputError, load_problems, require
from engine import cli, run
from engine.policy import copy_weights, load, load_model, require_room, shard
from engine.sampling import encode_prompt, sample
from evaluate import evaluate
from rewards import REWARDS, Judge
from rloo import leave_one_out, rloo_rows, update, verifree_rows

logger = logging.getLogger("train")


# -------------------------------------------------------------------------------------------- flags


# What a resumed run may not change, or it would be another run.
IDENTITY = "model dataset reward questions samples m max_prompt_tokens max_new_tokens seed".split()
IDENTITY += ["lr", "lr_end"]


def parse_args():
    """A flag has the value given on the command line; else that of the run to resume, or of the
    toy; else the paper's. (The first look at the command line decides the defaults of the second.)
    """
    parser = cli.Parser(description="CER-RLOO. The defaults are the paper's; the toy has its own.")
    add, count = parser.add_argument, cli.number(int, 1)
    # what is trained, on what, by which reward
    add("--model", help="Hugging Face id or directory (default: the toy's, warm-started here)")
    add("--dataset", help="data set by name or file (default: toy; with --model math7.5k)")
    add("--reward", default="cer", choices=REWARDS, help="how samples are paid")
    add("--verifier-model", default="TIGER-Lab/general-verifier", help="id or directory")
    # the batch
    add("--questions", type=count, default=32, help="B, questions a step, over all ranks")
    add("--samples", type=cli.number(int, 2), default=16, help="N, samples of each question")
    add("--m", type=count, help="M, solutions that a CER averages over (default: N)")
    add("--max-prompt-tokens", type=count, default=2048, help="longer prompts are left out")
    add("--max-new-tokens", type=count, default=4096, help="samples are cut off here")
    # optimisation
    add("--lr", type=cli.number(float, 1e-12), default=1e-6, help="learning rate of Adam")
    add("--lr-end", type=cli.number(float, 0, 1), default=1.0, help="share of --lr left at the end")
    add("--epochs", type=count, help="(default: the paper's, 1 for webinstruct and 5 otherwise)")
    add("--steps", type=count, help="optimizer steps, instead of --epochs")
    add("--microbatch-tokens", type=count, default=16384, help="in one forward and backward pass")
    add("--cpu-offload", action="store_true", help="policy and Adam in the CPU's memory (slower)")
    add("--seed", type=int, default=0, help="of the data order and the samples")
    # evaluation: at the start, every so many steps, and at the end
    add("--eval-dataset", help="data set by name or file (default: none)")
    add("--eval-every", type=count, default=50, help="steps")
    add("--eval-limit", type=count, help="only the first so many questions")
    add("--eval-runs", type=count, default=1, help="samples of each question")
    cli.add_sampling(parser, "eval-")
    # files
    add("--out", help="directory of the run (default: runs/TIME-DATASET-REWARD)")
    add("--save-every", type=count, default=100, help="steps; the last step is always saved")
    add("--keep", type=count, default=3, help="checkpoints to keep; older ones are deleted")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")

    args, saved = parser.parse_args(), {}
    if args.resume:
        require(args.out, "--resume needs --out, the run to go on with")
        saved = run.read_flags(args.out)
        parser.set_defaults(**saved)
    elif args.dataset == "toy" or not (args.dataset or args.model):
        learning_rate = {} if args.model else toy.LEARNING_RATE
        parser.set_defaults(dataset="toy", **toy.SIZES, **toy.EVALUATION, **learning_rate)
    if args.epochs:
        parser.set_defaults(steps=None)
    args = parser.parse_args()
    args.dataset = args.dataset or "math7.5k"
    args.epochs = args.epochs or (1 if args.dataset == "webinstruct" else 5)
    args.m = args.m or args.samples
    if args.resume:
        pairs = [(name, saved.get(name), getattr(args, name)) for name in IDENTITY]
        changed = [f"{name} was {was} and is {now}" for name, was, now in pairs if was != now]
        require(not changed, f"--resume goes on with the run as it was, but {', '.join(changed)}")
    require(args.m <= args.samples, f"--m {args.m} is more than --samples {args.samples}")
    has_model = args.model or args.dataset == "toy"
    require(has_model, f"--dataset {args.dataset} needs --model, an id or a directory")
    return args


# ------------------------------------------------------------------------------------------ the run


def main():
    logger.setLevel(logging.INFO)
    args = parse_args()
    device = run.init_ranks()
    rank, world = dist.get_rank(), dist.get_world_size()
    name = f"{Path(args.dataset).stem}-{args.reward}"
    out = Path(args.out) if args.resume else run.new_directory(args.out, name)
    require(args.questions >= world, f"--questions {args.questions}: fewer than {world} ranks")
    problems = load_problems(args.dataset)
    eval_problems = load_problems(args.eval_dataset, args.eval_limit) if args.eval_dataset else []
    model = args.model or toy_model(out, args.seed)
    actor, tokenizer = load(model, device)
    questions = with_prompts(problems, tokenizer, args)
    needs_verifier = args.reward == "general-verifier"
    verifier = load(args.verifier_model, device, check=False) if needs_verifier else None
    longest_row = max(len(prompt) for _, prompt in questions) + args.max_new_tokens
    # of what the actor and the verifier leave free
    require_room(actor, args.microbatch_tokens, longest_row, args.cpu_offload)
    policy = shard(load_model(model, "cpu", torch.float32), args.cpu_offload)
    # fused: the other ways hold a copy of one moment for a step, 4 bytes a parameter
    adam = {"lr": args.lr, "weight_decay": 0.0, "fused": torch.cuda.is_available()}
    optimizer = torch.optim.AdamW(policy.parameters(), **adam)
    judge = Judge(actor, tokenizer, args.m, verifier)
    rows_of = verifree_rows if args.reward == "verifree" else rloo_rows

    last_step = args.steps or max(1, args.epochs * len(questions) // args.questions)
    first_step = 1 + (run.load_checkpoint(out, policy, optimizer) if args.resume else 0)
    require(first_step <= last_step, f"--resume: the run in {out} is complete")
    copy_weights(policy, actor)
    files = run.RunFiles(out, args, first_step) if rank == 0 else None
    stop, not_finite = run.StopRequest(), 0
    todo = dict(initial=first_step - 1, total=last_step)
    with tqdm(**todo, desc=args.reward, unit="step", disable=rank > 0) as bar:
        if args.eval_dataset and first_step == 1:
            line = {"step": 0, **evaluation(actor, tokenizer, eval_problems, args)}
            if files:
                files.log(line, bar)
        for step in range(first_step, last_step + 1):
            run.seed_everything(args.seed, step)
            clock = [time.perf_counter()]

            # 1. Sample: N solutions, each with an answer, to each of the B questions.
            batch = questions_of(step, questions, args)[rank::world]
            rollouts = sample(actor, tokenizer, batch, args.samples, args.max_new_tokens)
            clock.append(time.perf_counter())

            # 2. Reward: R [N] for each question. The policy itself is the judge; no gradient here.
            judged = REWARDS[args.reward](rollouts, judge)
            rewards, records = zip(*cli.progress("reward", judged, total=len(rollouts)))
            clock.append(time.perf_counter())

            # 3. Leave-one-out: A [N] for each question.
            advantages = [leave_one_out(R) for R in rewards]

            # 4. Update: one optimizer step on the samples of all ranks.
            groups = list(zip(rollouts, rewards, advantages))
            rows = run.gather([row for group in groups for row in rows_of(*group, tokenizer)])
            lr = args.lr * (1 - (1 - args.lr_end) * (step - 1) / max(1, last_step - 1))
            loss, grad_norm = update(policy, optimizer, rows, lr, args.microbatch_tokens)
            copy_weights(policy, actor)
            clock.append(time.perf_counter())
            not_finite = 0 if math.isfinite(grad_norm) else not_finite + 1

            # 5. Report.
            described = [run.describe(*group, record) for group, record in zip(groups, records)]
            line = {"step": step, **run.means(run.gather(described))}
            line |= {"loss": loss, "grad_norm": grad_norm, "lr": lr}
            line |= {"updates_skipped": int(not_finite > 0), **timing(clock, line, args)}
            stopping = any(run.gather([stop.requested])) or not_finite == 3
            evaluates = step == last_step or (step % args.eval_every == 0 and not stopping)
            if args.eval_dataset and evaluates:
                line |= evaluation(actor, tokenizer, eval_problems, args)
            if files:
                files.log(line, bar)
                files.keep_samples(step, rollouts, rewards, records)
            if stopping or step % args.save_every == 0 or step == last_step:
                run.save_checkpoint(out, step, args.keep, actor, tokenizer, policy, optimizer)
            bar.update()
            if not_finite == 3:
                raise InputError(
                    f"the gradient was not finite in steps {step - 2} to {step}, whose updates "
                    "were skipped. To go on from these weights with other flags: "
                    f"--model {out}/checkpoints/step-{step} --lr LOWER"
                )
            if stopping:
                break
    if files:
        print(f"{args.reward} on {args.dataset}", *files.summary(step), sep="\n")
    dist.destroy_process_group()


def evaluation(actor, tokenizer, problems, args):
    settings = cli.sampling_settings(args, "eval_")
    summary, _ = evaluate(actor, tokenizer, problems, args.eval_runs, seed=args.seed, **settings)
    return {"pass_at_1": summary["pass_at_1"], "pass_at_1_stderr": summary["stderr"]}


def timing(clock, line, args):
    seconds = [after - before for before, after in zip(clock, clock[1:])]
    tokens = line["completion_tokens"] * args.samples * args.questions
    seconds_of = dict(zip(("sample", "reward", "update"), seconds))
    return {"seconds": seconds_of, "tokens_per_second": tokens / sum(seconds)}


# ------------------------------------------------------------------------------------------ set-up


def toy_model(out, seed):
    """The toy's own model in the run's directory, made at the run's beginning -> its path."""
    torch.set_num_threads(1)  # so small that threads only wait for each other
    directory = out / "warm-start"
    if dist.get_rank() == 0 and not directory.exists():
        toy.warm_start(directory, seed)
    dist.barrier()
    return str(directory)


def with_prompts(problems, tokenizer, args):
    """-> list of (problem, prompt ids). Prompts over the limit are left out and counted."""
    prompts = [encode_prompt(tokenizer, problem) for problem in problems]
    limit = args.max_prompt_tokens
    questions = [(p, ids) for p, ids in zip(problems, prompts) if len(ids) <= limit]
    require(questions, f"--max-prompt-tokens {limit}: all of {args.dataset} is longer")
    if left_out := len(problems) - len(questions):
        logger.info("left out %d of %d prompts over %d tokens", left_out, len(problems), limit)
    return questions


def questions_of(step, questions, args):
    """The B (problem, prompt) pairs of a step, counted from 1: epoch after epoch, each in its own
    random order. A function of the step alone, so that a run can be resumed anywhere."""
    size = len(questions)
    positions = range((step - 1) * args.questions, step * args.questions)
    return [questions[epoch_order(size, args.seed, i // size)[i % size]] for i in positions]


@functools.lru_cache(maxsize=2)
def epoch_order(size, seed, epoch):
    return random.Random(f"{seed} {epoch}").sample(range(size), size)


if __name__ == "__main__":
    cli.run_script(main)
