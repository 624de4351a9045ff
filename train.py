"""CER-RLOO: reinforcement learning in which the policy's own probabilities are the reward.

    python train.py                                                  # the toy, on a CPU
    python train.py --model Qwen/Qwen3-4B-Base --dataset math7.5k    # the paper, on one GPU
    torchrun --nproc-per-node 4 train.py --model Qwen/Qwen3-4B-Base --dataset webinstruct

Each step samples N solutions and answers to B questions, computes their rewards, subtracts the
leave-one-out baseline, takes one optimizer step, and copies the weights to the actor.
"""

import functools
import math
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist

import report
import toy
from data import HUB, TOY, load_problems
from engine import cli, run
from engine.cli import InputError, require
from engine.files import read_flags
from engine.policy import Policy, copy_weights, load, load_model, plan_memory
from evaluate import add_sampling, evaluate, sampling_settings
from rewards import REWARDS
from rloo import leave_one_out, rloo_rows, update, verifree_rows
from rollout import encode_prompt, sample

# -------------------------------------------------------------------------------------------- flags


def make_parser():
    """The flags, with the paper's values as defaults."""
    parser = cli.Parser(description="CER-RLOO. The defaults are the paper's; the toy has its own.")
    count, names = cli.number(int, 1), ", ".join([*TOY, *HUB])
    add = parser.add_argument_group("model, data and reward").add_argument
    add("--model", help="Hugging Face id or directory (default: the toy's, made here)")
    add("--dataset", help=f"{names}, or a file (default: toy, or math7.5k with --model)")
    add("--reward", default="cer", choices=REWARDS, help="reward function")
    add("--verifier-model", default="TIGER-Lab/general-verifier", help="for general-verifier")
    add = parser.add_argument_group("the batch").add_argument
    add("--questions", type=count, default=32, help="B, questions per step, over all ranks")
    add("--samples", type=cli.number(int, 2), default=16, help="N, samples per question")
    add("--m", type=count, help="M, solutions that CER averages over (default: N)")
    add("--max-prompt-tokens", type=count, default=2048, help="longer prompts are left out")
    add("--max-new-tokens", type=count, default=4096, help="longer completions are cut off")
    add = parser.add_argument_group("optimization").add_argument
    add("--lr", type=cli.number(float, 1e-12), default=1e-6, help="learning rate of Adam")
    add("--lr-end", type=cli.number(float, 0, 1), default=1.0, help="last rate / --lr (linear)")
    add("--epochs", type=count, help="passes over the data (default: 1 for webinstruct, else 5)")
    add("--steps", type=count, help="optimizer steps, instead of --epochs")
    add("--microbatch-tokens", type=count, help="(default: as many as fit)")
    add("--cpu-offload", action="store_true", help="policy and Adam in CPU memory; auto if needed")
    add("--seed", type=int, default=0, help="random seed of data order and samples")
    group = parser.add_argument_group("evaluation (also before the first step and at the end)")
    add = group.add_argument
    add("--eval-dataset", help="a name or a file, as for --dataset (default: no evaluation)")
    add("--eval-every", type=count, default=50, help="steps between evaluations")
    add("--eval-limit", type=count, help="evaluate only the first K questions")
    add("--eval-runs", type=count, default=1, help="evaluation samples per question")
    add_sampling(group, "eval-")
    add = parser.add_argument_group("files").add_argument
    add("--out", help="new directory for the run (default: runs/TIME-DATASET-REWARD)")
    add("--save-every", type=count, default=100, help="steps between checkpoints")
    add("--keep", type=count, default=3, help="checkpoints to keep; older ones are deleted")
    add("--resume", action="store_true", help="resume from the last checkpoint in --out")
    return parser


# Flags that a resumed run must not change, because they define the run.
IDENTITY = "model dataset reward verifier_model questions samples m max_prompt_tokens".split()
IDENTITY += "max_new_tokens seed lr lr_end".split()


def parse_args():
    """Take each flag from the command line, else from the run to resume or from the toy's settings,
    else from the paper's defaults."""
    parser = make_parser()
    given = parser.parse_args()
    saved, defaults = {}, {}
    if given.resume:
        require(given.out, "--resume needs --out, the run to resume")
        saved = defaults = read_flags(given.out)
    elif given.dataset == "toy" or not (given.dataset or given.model):
        defaults = {"dataset": "toy"} | toy.FLAGS
        if not given.model:
            defaults |= toy.LEARNING_RATE
    parser.set_defaults(**defaults)
    if given.epochs:
        parser.set_defaults(steps=None)
    args = parser.parse_args()
    args.dataset = args.dataset or "math7.5k"
    args.epochs = args.epochs or (1 if args.dataset == "webinstruct" else 5)
    args.m = args.m or args.samples
    if args.resume:
        fixed = IDENTITY + (["steps", "epochs"] if args.lr_end != 1 else [])  # they set the decay
        pairs = [(name, saved.get(name), getattr(args, name)) for name in fixed]
        changed = [f"{name} was {was} and is {now}" for name, was, now in pairs if was != now]
        require(not changed, f"--resume cannot change these flags: {', '.join(changed)}")
    require(args.m <= args.samples, f"--m {args.m} is more than --samples {args.samples}")
    has_model = args.model or args.dataset == "toy"
    require(has_model, f"--dataset {args.dataset} needs --model, an id or a directory")
    return args


# ------------------------------------------------------------------------------------------ the run


def main():
    args = parse_args()
    device = run.init_ranks()
    rank, world = dist.get_rank(), dist.get_world_size()
    name = f"{Path(args.dataset).name}-{args.reward}"
    out = Path(args.out) if args.resume else run.output_directory(args.out, name)
    require(args.questions >= world, f"--questions must be at least {world}, one per rank")

    # Data and models. The actor samples and scores, and the policy is trained.
    problems = load_problems(args.dataset)
    eval_problems = load_problems(args.eval_dataset, args.eval_limit) if args.eval_dataset else []
    model = args.model or toy_model(out, args)
    actor, tokenizer = load(model, device)
    verifier = None
    if args.reward == "general-verifier":
        verifier = load(args.verifier_model, device, check=False)
    problems, longest_prompt = without_long_prompts(problems, tokenizer, args)
    microbatch_tokens, offload, memory = plan_memory(
        actor, longest_prompt + args.max_new_tokens, args.microbatch_tokens, args.cpu_offload
    )
    policy = Policy(load_model(model, "cpu", torch.float32), offload)
    # Fused, since the others allocate a temporary as large as one moment, 4 bytes per parameter.
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.lr, weight_decay=0.0, fused=torch.cuda.is_available()
    )
    last_step = args.steps or max(1, args.epochs * len(problems) // args.questions)
    first_step = 1 + (run.load_checkpoint(out, policy, optimizer) if args.resume else 0)
    require(
        first_step <= last_step,
        f"the run in {out} has completed {first_step - 1} steps: a larger --steps would extend it. "
        "If its learning rate has decayed (--lr-end), start a new run with its last checkpoint as "
        "--model",
    )
    copy_weights(policy, actor)

    reward = functools.partial(
        REWARDS[args.reward], actor=actor, tokenizer=tokenizer, M=args.m, verifier=verifier
    )
    rows_of = verifree_rows if args.reward == "verifree" else rloo_rows
    log = report.RunLog(out, args, first_step, last_step)
    skipped_in_a_row = 0
    for line in report.header(out, args, actor, problems, last_step, memory):
        cli.say(line)
    with run.StopRequest() as stop:
        if args.eval_dataset and first_step == 1:
            log.add({"step": 0, **evaluation(actor, tokenizer, eval_problems, args)})
        for step in range(first_step, last_step + 1):
            run.seed_everything(args.seed, step)
            start = time.perf_counter()

            # 1. Sample: N completions for each of this rank's questions.
            batch = batch_of(step, problems, args)[rank::world]
            groups = sample(actor, tokenizer, batch, args.samples, args.max_new_tokens)
            sampled = time.perf_counter()

            # 2. Reward: R [B, N]. No gradient flows through it.
            R, records = reward(groups)
            rewarded = time.perf_counter()

            # 3. Leave-one-out: A [B, N].
            A = leave_one_out(R)

            # 4. Update: one optimizer step on the samples of all ranks.
            rows = []
            for group, R_group, A_group in zip(groups, R, A):
                rows += rows_of(group, R_group, A_group, tokenizer)
            fraction = (step - 1) / max(1, last_step - 1)
            lr = args.lr * (1 + fraction * (args.lr_end - 1))
            all_rows = run.all_gather(rows)
            loss, grad_norm = update(policy, optimizer, all_rows, lr, microbatch_tokens)
            copy_weights(policy, actor)
            end = time.perf_counter()

            # 5. Report, evaluate, save.
            numbers = [report.describe(*each) for each in zip(groups, R, A, records)]
            line = {"step": step} | report.means(run.all_gather(numbers))
            line |= {"loss": loss, "grad_norm": grad_norm, "lr": lr}
            seconds = {
                "sample": sampled - start,
                "reward": rewarded - sampled,
                "update": end - rewarded,
            }
            tokens = line["completion_tokens"] * args.samples * args.questions
            line |= {"seconds": seconds, "tokens_per_second": tokens / (end - start)}
            skipped_in_a_row = 0 if math.isfinite(grad_norm) else skipped_in_a_row + 1
            stopped_by = stop.on_any_rank()
            stopping = stopped_by or skipped_in_a_row == 3
            evaluation_due = step % args.eval_every == 0 and not stopping
            if args.eval_dataset and (step == last_step or evaluation_due):
                line |= evaluation(actor, tokenizer, eval_problems, args)
            log.add(line)
            log.keep_samples(step, groups, R, records)
            if stopping or step % args.save_every == 0 or step == last_step:
                run.save_checkpoint(out, step, args.keep, actor, tokenizer, policy, optimizer)
            if stopping:
                break
    log.close()
    if skipped_in_a_row == 3:
        raise InputError(
            f"the gradient was not finite in steps {step - 2} to {step}, whose updates were "
            "skipped. To continue from these weights, start a new run with "
            f"--model {out}/checkpoints/step-{step} --lr LOWER"
        )
    dist.destroy_process_group()
    if step < last_step:
        resume = f"python train.py --resume --out {out}"
        cli.say(f"stopped after step {step} of {last_step}; resume with: {resume}")
        return 128 + stopped_by
    if rank == 0:
        print(f"{args.reward} on {args.dataset}", *report.summary(out, step), sep="\n")


def evaluation(actor, tokenizer, problems, args):
    settings = sampling_settings(args, "eval_")
    summary, _ = evaluate(actor, tokenizer, problems, args.eval_runs, seed=args.seed, **settings)
    return {
        "pass_at_1": summary["pass_at_1"],
        "pass_at_1_stderr": summary["stderr"],
        "eval_exact_match": summary["exact_match"],
    }


# ------------------------------------------------------------------------------------------ set-up


def toy_model(out, args):
    """Make the toy's own model in the run's directory, unless the run is resumed -> its path."""
    torch.set_num_threads(1)  # the model is so small that threads only wait for each other
    directory = out / "warm-start"
    if dist.get_rank() == 0 and not args.resume:
        toy.warm_start(directory, args.seed)
    dist.barrier()
    return str(directory)


def without_long_prompts(problems, tokenizer, args):
    """Leave out prompts over --max-prompt-tokens -> (problems, tokens of their longest prompt)."""
    limit, sizes = args.max_prompt_tokens, [len(encode_prompt(tokenizer, p)) for p in problems]
    kept = [problem for problem, size in zip(problems, sizes) if size <= limit]
    require(kept, f"--max-prompt-tokens {limit}: every prompt of {args.dataset} is longer")
    if left_out := len(problems) - len(kept):
        cli.say(f"left out {left_out} of {len(problems)} prompts over {limit} tokens")
    return kept, max(size for size in sizes if size <= limit)


def batch_of(step, problems, args):
    """The B problems of a step (the first is step 1). Each epoch has its own random order. The
    result depends only on the step and --seed, so that a run can be resumed at any step."""
    size = len(problems)
    positions = range((step - 1) * args.questions, step * args.questions)
    return [problems[epoch_order(size, args.seed, i // size)[i % size]] for i in positions]


@functools.lru_cache(maxsize=2)
def epoch_order(size, seed, epoch):
    return random.Random(f"{seed} {epoch}").sample(range(size), size)


if __name__ == "__main__":
    cli.run_script(main)
