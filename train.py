"""CER-RLOO: reinforcement learning in which the policy's own probabilities are the reward. The
defaults are the paper's, except that of --rounding. The toy has its own.

    python train.py                                                  # the toy, on a CPU
    python train.py --model Qwen/Qwen3-4B-Base --dataset math7.5k    # the paper's model and data
    torchrun --nproc-per-node 4 train.py --model Qwen/Qwen3-4B-Base --dataset webinstruct

main() is the method. Below it stand its parts, and the flags.
"""

from runtime import cli  # isort: split

from pathlib import Path

import torch.distributed as dist

from cer import check_scoring
from engine.checkpoints import check_resumed, fingerprint, load_checkpoint, save_checkpoint
from engine.checks import check_sampling, check_training
from engine.load import add_flags, load, make_policy
from engine.memory import check_disk, moments_stay, plan_memory
from engine.policy import make_adam, moments_on_host
from measure import evaluate
from reward_functions import REWARDS, R_by_name, ask_judges, check_asked
from rloo import leave_one_out, update
from rollout import sample
from runtime.files import checkpoints, how_to_resume, read_config, remove_partial
from runtime.ranks import Stop, all_gather, init_ranks, open_run_directory, seed_everything
from runtime.report import RunLog
from tasks import toy_model
from tasks.data import NAMES, in_epochs, load_examples, load_problems, with_examples
from tasks.prompts import encode_prompt, show_first, usable_prompts
from tasks.verifiers import VERIFIERS


def main():
    args = parse_args()
    device = init_ranks()
    rank, world = dist.get_rank(), dist.get_world_size()
    cli.require(args.questions >= world, f"--questions must be at least {world}, one per rank")

    # Questions, a directory for the run, and the actor, which samples and scores.
    problems, held_out = load_questions(args)
    out = open_run_directory(args.out, f"{Path(args.dataset).name}-{args.reward}", args.resume)
    model_path = args.model or toy_model.make_model(out / "warm-start", args)
    # A resumed run goes on with the weights of its last checkpoint, whatever --model says now. With
    # --lora they are added to the model that it began with, which is loaded again.
    saved = [] if args.lora else checkpoints(out)
    if saved:
        args.model, model_path = read_config(out)["flags"]["model"], saved[-1][1]
    (actor, tokenizer), verifier_model = load_models(args, model_path, device)
    problems, held_out, longest = fit_questions(
        args, problems, held_out, actor, tokenizer, verifier_model
    )

    # A resumed run keeps its data, its flags, and the model it began with if that is loaded again.
    prompts = [encode_prompt(tokenizer, problem) for problem in [*problems, *held_out][:1000]]
    judge = verifier_model and verifier_model[0].name_or_path
    origin = fingerprint(problems, held_out, prompts, judge, None if saved else model_path)
    last_step = args.steps or max(1, args.epochs * len(problems) // args.questions)
    if args.resume:
        check_resumed(out, vars(args) | origin, RESUME_MAY_CHANGE, last_step)
        remove_partial(out)

    # The policy is trained, and copied to the actor after each step (see engine/policy.py). With
    # --lora the actor is the policy, and small matrices beside its weights are trained.
    microbatch, lora = args.microbatch_tokens, args.lora
    budget, offload, memory = plan_memory(actor, longest, microbatch, args.cpu_offload, lora)
    # Evaluations and the last step save, too. The oldest goes when a new one is complete.
    often = [args.save_every, args.eval_every] if held_out else [args.save_every]
    saves = 1 + sum(any(step % each == 0 for each in often) for step in range(1, last_step))
    disk = check_disk(actor, out, min(args.keep + 1, saves), lora)
    policy = make_policy(model_path, actor, offload, lora, args.rounding, args.seed)
    optimizer = make_adam(policy)
    moments_move = not (lora or offload or moments_stay(actor))
    step, logged = load_checkpoint(out, policy, optimizer)  # a new run has none: 0, {}
    policy.copy_weights(actor)
    check_training(policy, actor)

    log = RunLog(out, args, origin, step, last_step, logged)
    log.header(actor, problems, f"{memory}\n{disk}")
    show_first(tokenizer, problems, args.dataset)
    if held_out:
        show_first(tokenizer, held_out, args.eval_dataset)
    reward, order = REWARDS[args.reward], in_epochs(problems, last_step * args.questions, args.seed)
    evaluating = actor, tokenizer, held_out, args.eval_runs, args.max_new_tokens, args.seed
    stop = Stop()

    def evaluate_now():
        with moments_on_host(optimizer, moments_move):
            log.evaluated(step, *evaluate(*evaluating))

    # Evaluate the model that training starts from, or after --resume the checkpoint, if its own
    # evaluation was cut from the logs.
    if held_out and (logged.get("due") or step % args.eval_every == 0 or step == last_step):
        evaluate_now()

    # "Free" and "fixed" say what may be changed in a stage. docs/extending.md names the tests.
    for step in range(log.first_step, last_step + 1):
        seed_everything(args.seed, step)
        log.start()

        # 1. Sample N solutions and answers to each of this rank's b questions: b groups.
        # Free: the questions and the sampler. Fixed: samples follow the actor's own distribution.
        batch = order[(step - 1) * args.questions : step * args.questions][rank::world]
        with moments_on_host(optimizer, moments_move):
            groups = sample(actor, tokenizer, batch, args.samples, args.max_new_tokens)
        log.lap("sample")

        # 2. Judge: ask the actor for W and P of each group, or a verifier for what is right.
        # Free: who is asked. Fixed: W and P come from the weights that have sampled the group.
        judged = ask_judges(groups, reward.judges, actor, tokenizer, args.m, verifier_model)
        log.lap("reward")

        # 3. Reward: a function of what they said, with CER R = D^-1 W P (Eq. 8). R [b, N].
        # Free: the function. Fixed: R is a constant, and nothing is added to it or rescales it.
        R = R_by_name(args.reward, judged)

        # 4. Leave-one-out: from each reward subtract the mean of the others in its group. A [b, N].
        # Fixed: the mean of the others, and no division: each changes the objective or its noise.
        A = leave_one_out(R)

        # 5. Update: one optimizer step on the loss, the mean over the samples of all ranks of
        # -A_i log pi(sample i), where log pi is a sum over tokens. A row has A_i on every token.
        # Free: which rows, with which weights (VeriFree has its own). Fixed: one step on a batch.
        training_rows = []
        for each, R_group, A_group in zip(judged, R, A):
            training_rows += reward.training_rows(each, R_group, A_group, tokenizer)
        fraction = (step - 1) / max(1, last_step - 1)  # the rate falls linearly to --lr-end of it
        lr = args.lr * (1 + fraction * (args.lr_end - 1))
        loss, grad_norm = update(policy, optimizer, all_gather(training_rows), lr, budget)
        policy.copy_weights(actor)
        log.lap("update")

        # 6. Report, save, evaluate.
        # Free: what is written. Fixed: a checkpoint comes after the lines whose lengths it notes.
        last, stopping = step == last_step, stop.after(grad_norm)
        log.step(step, judged, R, A, loss=loss, grad_norm=grad_norm, lr=lr)
        due = bool(held_out) and (last or step % args.eval_every == 0)
        if last or stopping or due or step % args.save_every == 0:
            logged = log.state(due)
            save_checkpoint(out, step, args.keep, logged, actor, tokenizer, policy, optimizer)
        if due and (last or not stopping):
            evaluate_now()
        if stopping:
            break

    problem = f"the gradient was not finite in steps {step - 2} to {step}"
    cli.require(stop.skipped < 3, f"{problem}: start a new run with a lower --lr")
    dist.destroy_process_group()
    if step < last_step:
        cli.say(f"stopped after step {step} of {last_step}; {how_to_resume(out)}")
        return 128 + stop.signal
    log.summary()


# ----------------------------------------------------------------------------- before the loop

GENERAL_VERIFIER = "TIGER-Lab/general-verifier"


def load_questions(args):
    """-> the problems to train on, and those that are held out, if there are any."""
    problems, held_out = load_problems(args.dataset, verifier=args.verifier), []
    examples = load_examples(args.examples)
    if args.eval_dataset:
        held_out = load_problems(args.eval_dataset, args.eval_limit, args.verifier)
        if both := {each.question for each in problems} & {each.question for each in held_out}:
            trained = f"{len(both)} of its {len(held_out)} questions are also in {args.dataset}"
            cli.say(f"{args.eval_dataset}: {trained}, so pass@1 is not that of new questions")
    return with_examples(problems, examples), with_examples(held_out, examples)


def load_models(args, model_path, device):
    """-> the actor, and another model that judges, or None: each with its tokenizer."""
    judges, options = REWARDS[args.reward].judges, dict(dtype=args.dtype, sampler=args.sampler)
    actor = load(model_path, device, check_sampling, check_scoring, **options)
    if "general-verifier" in judges:
        return actor, load(args.verifier_model or GENERAL_VERIFIER, device, **options)
    if "asked" in judges and args.verifier_model:
        return actor, load(args.verifier_model, device, check_scoring, **options)
    return actor, None


def fit_questions(args, problems, held_out, actor, tokenizer, verifier_model):
    """Leave out what does not fit the models -> problems, held_out, and the tokens of the longest
    row to train on."""
    tokens, most = args.max_new_tokens, args.max_prompt_tokens
    problems, longest = usable_prompts(actor, tokenizer, problems, args.dataset, tokens, most)
    if "asked" in REWARDS[args.reward].judges:
        check_asked(problems, verifier_model or (actor, tokenizer), tokens)
    if held_out:
        held_out, _ = usable_prompts(actor, tokenizer, held_out, args.eval_dataset, tokens)
    return problems, held_out, longest


# -------------------------------------------------------------------------------------------- flags

# What --resume may change. The other flags define the run and how it is measured. Files may have
# moved: the model is in the checkpoint, and the fingerprint knows the questions, the verifier's
# model and, where it is loaded again, the model.
RESUME_MAY_CHANGE = "out resume steps epochs sampler microbatch_tokens cpu_offload".split()
RESUME_MAY_CHANGE += "eval_every save_every keep".split()
RESUME_MAY_CHANGE += "model dataset eval_dataset examples verifier_model".split()


def make_parser():
    """The flags, with their defaults."""
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    # The model, the data and the reward.
    add("--model", help="Hugging Face id or directory (default: the toy's, made here)")
    add("--dataset", help=f"{NAMES}, or a file (default: toy, or math7.5k with --model)")
    add("--reward", default="cer", choices=REWARDS, help="(asked: by the policy, which changes)")
    add_flags(add)
    add("--verifier", choices=VERIFIERS, help="for rows that name none (default: math or text)")
    add("--examples", help="file of worked examples, which stand before each question")
    add("--verifier-model", help=f"of asked, and of general-verifier ({GENERAL_VERIFIER})")
    # The batch.
    add("--questions", type=count, default=32, help="B, questions per step, over all ranks")
    add("--samples", type=cli.number(int, 2), default=16, help="N, samples per question")
    add("--m", type=count, help="M, solutions that CER averages over (default: N)")
    add("--max-prompt-tokens", type=count, default=2048, help="longer prompts are left out")
    add("--max-new-tokens", type=count, default=4096, help="longer completions are cut off")
    # Optimization.
    add("--lora", type=count, metavar="RANK", help="train low-rank changes of the linear layers")
    add("--lr", type=cli.number(float, 1e-12, 1), default=1e-6, help="rate of Adam (--lora: 1e-4)")
    add("--lr-end", type=cli.number(float, 0, 1), default=1.0, help="last rate / --lr (linear)")
    add("--rounding", default="dither", choices=["dither", "nearest"], help="nearest: the paper's")
    length = parser.add_mutually_exclusive_group().add_argument
    length("--epochs", type=count, help="passes over the data (default: 1 for webinstruct, else 5)")
    length("--steps", type=count, help="optimizer steps, instead of --epochs")
    add("--microbatch-tokens", type=count, help="(default: as many as fit)")
    add("--cpu-offload", action="store_true", help="policy and Adam in CPU memory; auto if needed")
    add("--seed", type=int, default=0, help="random seed of data order and samples")
    # Evaluation: samples as in training. (evaluate.py has the paper's settings.)
    add("--eval-dataset", help="a name or a file, as for --dataset (default: no evaluation)")
    add("--eval-every", type=count, default=50, help="steps between evaluations, also at both ends")
    add("--eval-limit", type=count, help="evaluate only the first K questions")
    add("--eval-runs", type=count, default=1, help="evaluation samples per question")
    # Files.
    add("--out", help="new directory for the run (default: runs/TIME-DATASET-REWARD-PID)")
    add("--save-every", type=count, default=100, help="steps between checkpoints")
    add("--keep", type=count, default=3, help="checkpoints to keep; older ones are deleted")
    add("--resume", action="store_true", help="resume from the last checkpoint in --out")
    return parser


def parse_args():
    """Take each flag from the command line, else from the run to resume or from the toy's settings,
    else from the defaults."""
    parser = make_parser()
    given = parser.parse_args()
    if given.lora:
        parser.set_defaults(lr=1e-4)  # 1e-5 taught SmolLM2-135M nothing in 30 steps
    if given.resume:
        cli.require(given.out, "--resume needs --out, the run to resume")
        parser.set_defaults(**read_config(given.out)["flags"])
    elif given.dataset == "toy" or not (given.dataset or given.model):
        parser.set_defaults(**toy_model.FLAGS)
        if not given.model:
            parser.set_defaults(**toy_model.LORA_RATE if given.lora else toy_model.LEARNING_RATE)
    if given.epochs:  # in place of the --steps of the resumed run, or of the toy
        parser.set_defaults(steps=None)
    args = parser.parse_args()

    # argparse does not check what comes from the run to resume.
    cli.require(args.reward in REWARDS, f"no reward {args.reward!r}, only {', '.join(REWARDS)}")
    args.dataset = args.dataset or "math7.5k"
    args.epochs = args.epochs or (1 if args.dataset == "webinstruct" else 5)
    args.m = args.m or args.samples
    cli.require(args.m <= args.samples, f"--m {args.m} is more than --samples {args.samples}")
    cli.require(args.model or args.dataset == "toy", f"--dataset {args.dataset} needs --model")
    judges = REWARDS[args.reward].judges
    if given.m and ("actor" not in judges or args.reward == "verifree"):
        cli.say(f"--m does nothing with --reward {args.reward}")
    if given.verifier_model and not judges & {"asked", "general-verifier"}:
        cli.say(f"--verifier-model does nothing with --reward {args.reward}")
    nothing = "--lora has nothing that --cpu-offload could move: leave it out"
    cli.require(not (args.lora and args.cpu_offload), nothing)
    return args


if __name__ == "__main__":
    cli.run_script(main)
