"""CER-RLOO: reinforcement learning in which the policy's own probabilities are the reward.

    python train.py                                                  # the toy, on a CPU
    python train.py --model Qwen/Qwen3-4B-Base --dataset math7.5k    # the paper, on one GPU
    torchrun --nproc-per-node 4 train.py --model Qwen/Qwen3-4B-Base --dataset webinstruct --epochs 1

Each step: sample N solutions and answers to B questions, reward them, subtract the leave-one-out
baseline, take one optimizer step, copy the weights to the actor.
"""

import functools
import json
import logging
import math
import random
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import toy
from data import (
    InputError,
    Parser,
    load_problems,
    parse_json,
    require,
    require_ranges,
    require_writable,
    run_script,
    write_whole,
)
from evaluate import evaluate
from policy import (
    Row,
    compute_device,
    copy_weights,
    encode_prompt,
    gather,
    init_ranks,
    load,
    load_model,
    microbatches,
    require_memory,
    sample,
    shard,
)
from rewards import REWARDS, Judge, reference_ids
from rloo import NEGLIGIBLE, leave_one_out, policy_gradient_loss, rloo_rows, verifree_rows
from rundir import (
    RunFiles,
    describe,
    load_checkpoint,
    means,
    report,
    save_checkpoint,
    timing,
)

logger = logging.getLogger("train")


# -------------------------------------------------------------------------------------------- flags


def parse_args():
    parser = Parser(description="CER-RLOO. The defaults are the paper's; the toy has its own.")
    add = parser.add_argument
    # what is trained, on what, by which reward
    add("--model", help="Hugging Face id or directory (default: the toy's, warm-started here)")
    add("--dataset", help="data set by name or file (default: toy; with --model math7.5k)")
    add("--reward", default="cer", choices=REWARDS, help="how samples are paid")
    add("--verifier-model", default="TIGER-Lab/general-verifier", help="id or directory")
    # the batch
    add("--questions", type=int, default=32, help="B, questions a step, over all ranks")
    add("--samples", type=int, default=16, help="N, samples of each question")
    add("--m", type=int, help="M, solutions that a CER averages over (default: N)")
    add("--max-prompt-tokens", type=int, default=2048, help="longer prompts are left out")
    add("--max-new-tokens", type=int, default=4096, help="samples cut off here earn 0")
    # optimisation
    add("--lr", type=float, default=1e-6, help="learning rate of Adam")
    add("--lr-end", type=float, default=1.0, help="share of --lr left at the end (1: constant)")
    add("--epochs", type=int, help="(default: 5, as the paper for MATH; it has 1 for WebInstruct)")
    add("--steps", type=int, help="optimizer steps, instead of --epochs")
    add("--microbatch-tokens", type=int, default=16384, help="in one forward and backward pass")
    add("--cpu-offload", action="store_true", help="policy and Adam in the CPU's memory (slower)")
    add("--seed", type=int, default=0, help="of the data order and the samples")
    # evaluation: at the start, every so many steps, and at the end
    add("--eval-dataset", help="data set by name or file (default: none)")
    add("--eval-every", type=int, default=50, help="steps")
    add("--eval-limit", type=int, help="only the first so many questions")
    add("--eval-runs", type=int, default=1, help="samples of each question")
    add("--eval-temperature", type=float, default=0.6, help="0: greedy")
    add("--eval-top-p", type=float, default=0.95, help="1: all")
    add("--eval-top-k", type=int, default=20, help="0: all")
    # files
    add("--out", help="directory of the run (default: runs/TIME-DATASET-REWARD)")
    add("--save-every", type=int, default=100, help="steps; the last step is always saved")
    add("--keep", type=int, default=3, help="checkpoints to keep; older ones are deleted")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")

    args = parser.parse_args()
    if args.resume:
        return resumed_args(parser, args.out)
    if (args.dataset or ("math7.5k" if args.model else "toy")) == "toy":
        parser.set_defaults(dataset="toy", **toy.RECIPE)
        if args.epochs is not None:
            parser.set_defaults(steps=None)
        args = parser.parse_args()
    args.dataset = args.dataset or "math7.5k"
    args.epochs = 5 if args.epochs is None else args.epochs
    args.m = args.samples if args.m is None else args.m
    check_args(args)
    return args


def resumed_args(parser, out):
    """The flags of the run to go on with. Other flags would make it another run."""
    require(out, "--resume needs --out, the run to go on with")
    path = Path(out) / "config.json"
    require(path.is_file(), f"--resume: no run in {out} (it would have a config.json)")
    saved = parse_json(path.read_text(), path).get("flags")
    require(isinstance(saved, dict), f"{path}: not the configuration of a run")
    parser.set_defaults(**saved)
    args = parser.parse_args()
    changed = [(name, was, getattr(args, name, None)) for name, was in saved.items()]
    changed = [f"{name} was {was} and is {now}" for name, was, now in changed if was != now]
    require(not changed, f"--resume goes on with the flags of the run, but {', '.join(changed)}")
    return args


def check_args(args):
    N, counts = args.samples, "questions max_prompt_tokens max_new_tokens epochs steps"
    counts += " microbatch_tokens eval_every eval_limit eval_runs save_every keep"
    require_ranges(args, counts.split(), prefix="eval_")
    require(N >= 2, f"--samples must be at least 2 (RLOO's baseline is the others), got {N}")
    require(1 <= args.m <= N, f"--m must be from 1 to --samples ({N}), got {args.m}")
    require(args.lr > 0, f"--lr must be positive, got {args.lr}")
    require(0 <= args.lr_end <= 1, f"--lr-end must be from 0 to 1, got {args.lr_end}")
    needs_model = f"--dataset {args.dataset} needs --model, an id or a directory"
    require(args.model or args.dataset == "toy", needs_model)


# ------------------------------------------------------------------------------------------ the run


def main():
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logger.setLevel(logging.INFO)
    args = parse_args()
    device = init_ranks()
    rank, world = dist.get_rank(), dist.get_world_size()
    out = directory_of(args)
    if args.questions < world:
        raise InputError(f"--questions {args.questions} cannot be split over {world} ranks")
    if args.dataset == "toy":
        torch.set_num_threads(1)  # so small that threads only wait for each other

    problems = load_problems(args.dataset)
    eval_problems = load_problems(args.eval_dataset, args.eval_limit) if args.eval_dataset else []
    if args.model is None:
        args.model = str(out / "warm-start")
        if rank == 0:
            toy.warm_start(args.model, args.seed)
        dist.barrier()
    longest_row = args.max_prompt_tokens + args.max_new_tokens
    require_memory(args.model, args.microbatch_tokens, longest_row, args.cpu_offload)
    actor, tokenizer = load(args.model, device)
    policy = shard(load_model(args.model, "cpu", torch.float32), args.cpu_offload)
    # fused: the other ways hold a copy of one moment for a step, 4 bytes a parameter
    adam = {"lr": args.lr, "weight_decay": 0.0, "fused": torch.cuda.is_available()}
    optimizer = torch.optim.AdamW(policy.parameters(), **adam)
    needs_verifier = args.reward == "general-verifier"
    verifier = load(args.verifier_model, device, scores=False) if needs_verifier else None
    judge = Judge(actor, tokenizer, args.m, verifier)
    train_set = with_prompts(problems, tokenizer, args)
    last_step = args.steps or max(1, args.epochs * len(train_set) // args.questions)

    torch.manual_seed(args.seed * 1000 + rank)  # every rank samples differently
    first_step = 1 + (load_checkpoint(out, policy, optimizer) if args.resume else 0)
    require(first_step <= last_step, f"--resume: the run in {out} is complete")
    copy_weights(policy, actor)
    run = RunFiles(out, args, first_step) if rank == 0 else None

    stop, not_finite = StopRequest(), 0
    todo = dict(initial=first_step - 1, total=last_step)
    with tqdm(**todo, desc=args.reward, unit="step", disable=rank > 0) as bar:
        if args.eval_dataset and first_step == 1:
            report(run, bar, {"step": 0, **evaluation(actor, tokenizer, eval_problems, args)})
        for step in range(first_step, last_step + 1):
            clock = [time.perf_counter()]

            # 1. Sample: N solutions, each with an answer, to each of the B questions.
            batch = questions_of(step, train_set, args)[rank::world]
            with inner_bar("sample", total=len(batch) * args.samples) as inner:
                limits = {"max_new_tokens": args.max_new_tokens, "progress": inner.update}
                rollouts = sample(actor, tokenizer, *zip(*batch), args.samples, **limits)
            clock.append(time.perf_counter())

            # 2. Reward: R [N] for each question. The policy itself is the judge; no gradient here.
            judged = REWARDS[args.reward](rollouts, judge)
            rewards, notes = zip(*inner_bar("reward", judged, total=len(rollouts)))
            clock.append(time.perf_counter())

            # 3. Leave-one-out: A [N] for each question.
            advantages = [leave_one_out(R) for R in rewards]

            # 4. Update: one optimizer step on the samples of all ranks.
            groups = zip(rollouts, rewards, advantages)
            rows = gather(
                [row for group in groups for row in training_rows(*group, args, tokenizer)]
            )
            progress = (step - 1) / max(1, last_step - 1)
            lr = args.lr * (1 - (1 - args.lr_end) * progress)
            loss, grad_norm = update(policy, optimizer, rows, lr, args.microbatch_tokens)
            copy_weights(policy, actor)
            clock.append(time.perf_counter())
            not_finite = 0 if math.isfinite(grad_norm) else not_finite + 1

            # 5. Report.
            groups = gather([describe(*g) for g in zip(rollouts, rewards, advantages, notes)])
            line = {"step": step, **means(groups), "loss": loss, "grad_norm": grad_norm, "lr": lr}
            line |= {"updates_skipped": int(not_finite > 0), **timing(clock, groups)}
            if args.eval_dataset and (step % args.eval_every == 0 or step == last_step):
                line |= evaluation(actor, tokenizer, eval_problems, args)
            report(run, bar, line)
            if run:
                run.keep_samples(step, rollouts, rewards, notes)
            stopping = any(gather([stop.requested])) or not_finite == 3
            if stopping or step % args.save_every == 0 or step == last_step:
                save_checkpoint(out, step, args.keep, actor, tokenizer, policy, optimizer)
            if not_finite == 3:
                give_up(out, step, rows)
            if stopping:
                break
    if run:
        run.summarise(step)
    dist.destroy_process_group()


def training_rows(rollout, R, A, args, tokenizer):
    """What the update learns from one question: token ids with a weight on each."""
    if args.reward == "verifree":
        return verifree_rows(rollout, A, R, reference_ids(rollout, tokenizer))
    return rloo_rows(rollout, A)


def update(policy, optimizer, rows, lr, microbatch_tokens):
    """One optimizer step on all ranks' rows (the same list on every rank) -> (loss, gradient norm).

    The loss is a sum over tokens and a mean over samples. If the gradient is not finite, nothing is
    changed.
    """
    device, world, samples = compute_device(), dist.get_world_size(), len(rows)
    # A sample that earned what the others did teaches nothing. (Adam's step needs some gradient.)
    nothing = Row(rows[0].ids, [0.0] * len(rows[0].ids))
    rows = [row for row in rows if any(not abs(w) <= NEGLIGIBLE for w in row.weights)] or [nothing]
    loss = torch.zeros((), device=device)
    inner = inner_bar("update", total=len(rows))
    for ids, weights in microbatches(rows, microbatch_tokens):
        logprobs = policy.logprobs(ids.to(device))
        part = policy_gradient_loss(logprobs, weights.to(device)) / samples
        (part * world).backward()  # FSDP averages gradients over the ranks, and this is a sum
        loss = loss + part.detach()
        inner.update(len(ids) * world)
    inner.close()
    dist.all_reduce(loss)
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).full_tensor().item()
    for group in optimizer.param_groups:
        group["lr"] = lr
    if math.isfinite(grad_norm):
        optimizer.step()
    optimizer.zero_grad()
    return loss.item(), grad_norm


def evaluation(actor, tokenizer, problems, args):
    settings = {"temperature": args.eval_temperature, "top_p": args.eval_top_p}
    settings |= {"top_k": args.eval_top_k, "max_new_tokens": args.max_new_tokens}
    settings |= {"seed": args.seed}
    summary, _ = evaluate(actor, tokenizer, problems, args.eval_runs, **settings)
    return {"pass_at_1": summary["pass_at_1"], "pass_at_1_stderr": summary["stderr"]}


class StopRequest:
    """SIGTERM or Ctrl-C: finish the step, save, and end well."""

    def __init__(self):
        self.requested = False
        for number in signal.SIGTERM, signal.SIGINT:
            signal.signal(number, self.request)

    def request(self, number, frame):
        self.requested = True
        signal.signal(number, signal.SIG_DFL)  # a second one ends the run at once
        logger.info("%s: stops after this step", signal.Signals(number).name)


def give_up(out, step, rows):
    """Three steps in a row without a finite gradient: end the run, with the last step's rows
    kept."""
    path = out / f"not-finite-step-{step}.jsonl"
    if dist.get_rank() == 0:
        write_whole(path, "".join(json.dumps(vars(row)) + "\n" for row in rows))
    raise InputError(
        f"the gradient was not finite in steps {step - 2} to {step}, whose updates were skipped. "
        f"The rows of the last are in {path}. To go on from its weights with other flags: "
        f"--model {out}/checkpoints/step-{step} --lr LOWER"
    )


# ------------------------------------------------------------------------------------------ set-up


def directory_of(args):
    """The run's directory, which must be new, or with --resume hold a checkpoint. No rank goes on
    before all have looked, since rank 0 will write."""
    default = time.strftime(f"runs/%Y%m%d-%H%M%S-{Path(args.dataset).stem}-{args.reward}")
    out = Path(args.out or gather([default])[0])
    require_writable(out)
    there = [p.name for p in out.iterdir() if p.suffix != ".partial"] if out.is_dir() else []
    if not args.resume and set(there) - {"warm-start"}:
        raise InputError(f"--out {out} holds another run: choose a new directory (or --resume)")
    dist.barrier()
    return out


def with_prompts(problems, tokenizer, args):
    """-> list of (problem, prompt ids). Prompts over the limit are left out and counted."""
    prompts = [encode_prompt(tokenizer, problem) for problem in problems]
    limit, total = args.max_prompt_tokens, len(problems)
    train_set = [(p, ids) for p, ids in zip(problems, prompts) if len(ids) <= limit]
    if not train_set:
        raise InputError(f"--max-prompt-tokens {limit}: all of {args.dataset} is longer")
    if len(train_set) < total:
        left_out = total - len(train_set)
        logger.info("left out %d of %d prompts over %d tokens", left_out, total, limit)
    return train_set


def questions_of(step, train_set, args):
    """The B (problem, prompt) pairs of a step, counted from 1: epoch after epoch, each in its own
    random order. A function of the step alone, so that a run can be resumed anywhere."""
    size = len(train_set)
    positions = range((step - 1) * args.questions, step * args.questions)
    return [train_set[epoch_order(size, args.seed, i // size)[i % size]] for i in positions]


@functools.lru_cache(maxsize=2)
def epoch_order(size, seed, epoch):
    return random.Random(f"{seed} {epoch}").sample(range(size), size)


def inner_bar(name, iterable=None, total=None):
    """A bar for one part of a step, shown only if that part takes longer than ten seconds."""
    options = {"leave": False, "delay": 10, "disable": dist.get_rank() > 0}
    return tqdm(iterable, desc=name, total=total, **options)


if __name__ == "__main__":
    run_script(main)
