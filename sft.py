"""Fine-tune a model: on demonstrations, on references alone, or on its own samples that are kept.

    python sft.py --model HuggingFaceTB/SmolLM2-135M-Instruct --data demos.jsonl --out tuned
    python sft.py --model MODEL --data runs/judged --select cer --lora 32 --out tuned

Each row of a file has a `question` (or `problem`) and a `solution` that ends in \\boxed{...}, as
you would like the model to write it. Twenty rows can be enough. Of a row without a `solution` the
model learns the reference alone, in a box, as the whole completion. Of several references one is
drawn each time the row is shown.

With --select the rows are samples in a directory of judge.py, evaluate.py or train.py: those that
are right, or those with a high reward (rejection sampling, as in STaR, RFT and RAFT).

It is the update of train.py on other rows. Each token of a completion, and the token that ends it,
has the weight of its row: 1, or the advantage of a sample. The loss is the sum of -weight * log pi
over a batch, divided by the number of these tokens.
"""

from runtime import cli  # isort: split

import random
from pathlib import Path

import torch
import torch.distributed as dist

from cer import check_scoring
from engine.checks import check_sampling, check_training
from engine.export import export
from engine.load import DTYPES, load, make_policy
from engine.memory import check_room, plan_memory, saved_bytes
from engine.policy import make_adam
from engine.tokens import positions, vocabulary
from reward_functions import REWARDS
from rloo import completion_row, leave_one_out, update
from runtime.files import read_config, read_rows, to_jsonl, write_atomically
from runtime.ranks import init_ranks, open_run_directory
from runtime.sampled import brief, sample_table
from tasks import data
from tasks.grades import by_grades, choose_questions, read_grades
from tasks.prompts import encode_prompt, show_first, usable_prompts


def main():
    args = parse_args()
    device = init_ranks()

    # Rows: of each a prompt, the completions of which one is learned each time, and a weight.
    if args.select:
        problems, weights = select(args)
    else:
        problems = data.load_problems(args.data, convert=data.to_demonstration)
    problems = data.with_examples(problems, data.load_examples(args.examples))
    out = open_run_directory(args.out, "sft")
    actor, tokenizer = load(args.model, device, check_sampling, check_scoring, dtype=args.dtype)
    if not args.select:
        problems, _ = usable_prompts(actor, tokenizer, problems, args.data, 0)
        weights = [1.0] * len(problems)
    show_first(tokenizer, problems, args.data)
    stop, encode = tokenizer.eos_token_id, vocabulary(tokenizer).encode
    is_stop = stop in actor.generation_config.eos_token_id
    cli.require(is_stop, f"{args.model}: its tokenizer has no end-of-text token")
    rows = []
    for problem, weight in zip(problems, weights):
        prompt = encode_prompt(tokenizer, problem)
        rows.append([(prompt, [*encode(text), stop], weight) for text in problem.references])
    longest = max(len(prompt + completion) for row in rows for prompt, completion, _ in row)
    limit = positions(actor)  # another model may have sampled, with more
    cli.require(longest <= limit, f"{args.data}: a row has {longest} tokens, of at most {limit}")
    if args.select:
        selected = prompt_completion(tokenizer, problems, weights)
        write_atomically(out / "selected.jsonl", to_jsonl(selected))

    # Memory, as in train.py: the policy is trained, and copied to the actor. With --lora the actor
    # is the policy.
    budget, offload, memory = plan_memory(actor, longest, args.microbatch_tokens, lora=args.lora)
    disk = check_room(out, saved_bytes(actor, args.lora), "the model would", "make room")
    policy = make_policy(args.model, actor, offload, args.lora, "dither", args.seed)
    optimizer = make_adam(policy)
    check_training(policy, actor)

    # Steps.
    steps = max(1, args.epochs * len(rows) // args.batch)
    cli.say(f"{len(rows)} rows, {steps} steps of {args.batch}, lr {args.lr:g}\n{memory}\n{disk}")
    order, rng = data.in_epochs(rows, steps * args.batch, args.seed), random.Random(args.seed)
    for step in cli.progress("steps", range(1, steps + 1), unit="step"):
        batch = [rng.choice(row) for row in order[(step - 1) * args.batch : step * args.batch]]
        scale = len(batch) / sum(len(completion) for _, completion, _ in batch)
        training_rows = [completion_row(prompt, ids, scale * w) for prompt, ids, w in batch]
        # The rate rises for a twentieth of the steps, and falls linearly, to 0 after the last.
        lr = args.lr * min(step / (1 + steps // 20), (steps + 1 - step) / steps)
        loss, _ = update(policy, optimizer, training_rows, lr, budget)
        policy.copy_weights(actor)
        cli.require(loss < float("inf"), f"the loss is {loss}: use a lower --lr")
        if step % max(1, steps // 10) == 0:
            cli.say(f"step {step}/{steps}  loss {loss:.3f}")

    # config.json gets to its place last. Without it the directory is no model, whatever a kill or a
    # full disk has left there.
    with cli.as_input_error(f"cannot save {out}"):
        policy.save_adapter(out / "adapter")  # with --lora
        if cli.is_rank_0():
            export(actor, tokenizer, partial := out / "partial")
            for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
                path.rename(out / path.name)
            partial.rmdir()
            model = cli.for_shell(out)
            print(f"final loss {loss:.3f}; next: python judge.py --model {model} --dataset FILE")
            most = max(len(completion) for row in rows for _, completion, _ in row)
            print(f"--max-new-tokens: at least {most}, as many as the longest completion has")
    dist.barrier()  # torchrun ends all ranks when one has ended
    dist.destroy_process_group()


def parse_args():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", required=True, help="Hugging Face model id or directory")
    add("--data", required=True, help="file with demonstrations or references, or a directory")
    add("--out", required=True, help="new directory for the trained model")
    add("--examples", help="file of worked examples, which stand before each question")
    # Which samples of a directory.
    by = [*REWARDS, "right"]  # right: by grades.jsonl, or without it by the rows' verifier
    add("--select", choices=by, help="keep samples that are right, or by a reward")
    add("--at-least", type=cli.number(float, 1e-12), help="those with this reward, with weight 1")
    add("--per-question", type=count, help="at most K of a question")
    # How they are learned.
    add("--epochs", type=count, default=4, help="passes over the rows")
    add("--batch", type=count, default=8, help="rows per step, over all ranks")
    add("--lora", type=count, metavar="RANK", help="train low-rank changes of the linear layers")
    add("--lr", type=cli.number(float, 1e-12, 1), help="peak rate of Adam (5e-5, or --lora: 5e-4)")
    add("--microbatch-tokens", type=count, help="(default: as many as fit)")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="auto: bf16 on a GPU, else fp32")
    add("--seed", type=int, default=0, help="random seed of the order and of what is kept")
    args = parser.parse_args()
    args.lr = args.lr or (5e-4 if args.lora else 5e-5)
    is_directory, of_select = Path(args.data).is_dir(), args.at_least or args.per_question
    right = "expected a directory with --select, or a file without --select and what belongs to it"
    cli.require(args.select if is_directory else not (args.select or of_select), f"--data: {right}")
    return args


# -------------------------------------------------------------------------- which samples are kept


def select(args):
    """The samples of a directory that are kept -> Problems with a sample as the reference, and the
    weights of these samples. A sample is kept if it has a weight and has ended by itself, and each
    text once for a question.

    The text is tokenized again, and may get other tokens than those that were sampled. In train.py
    this would be wrong, because A_i weighs the tokens that were sampled. Here a text is data."""
    directory = Path(args.data)
    samples = read_samples(directory, args.select)
    samples["weight"] = find_weights(samples, args)
    finished = samples[~samples.truncated]
    distinct = finished.drop_duplicates(["case", "texts"])
    kept = finished[finished.weight > 0].drop_duplicates(["case", "texts"])
    kept = kept.iloc[random.Random(args.seed).sample(range(len(kept)), len(kept))]
    kept = kept.groupby("case").head(args.per_question or len(kept))
    cases, without = samples.case.nunique(), samples.case.nunique() - kept.case.nunique()
    counts = f"{len(samples)} samples, {len(finished)} finished, {len(distinct)} distinct"
    counts += f", {len(kept)} kept; {without} of {cases} questions have none that is kept"
    cli.require(len(kept), f"{directory}, by {args.select}: {counts}")
    cli.say(f"{directory}, by {args.select}: {counts}")
    for word, some in ("kept", kept), ("left out", samples.drop(kept.index)):
        for sample in some[:1].itertuples():
            text = cli.shorten(" ".join(sample.texts.split()), 300)
            cli.say(f"  {word} ({args.select} {brief(sample.reward)}): {text}")
    columns = kept[["question", "texts", "verifier"]].itertuples(index=False)
    return [data.Problem(*each) for each in columns], kept.weight.tolist()


def read_samples(directory, name):
    """The samples in a directory, with the `reward` of this name, 1 or 0 if it is "right"."""
    grades = directory / "grades.jsonl"
    needed = "question references verifier texts truncated".split()
    lines = read_rows(directory / "samples.jsonl", needed=needed)
    cli.require(lines, f"{directory} has no samples")
    samples = sample_table(lines)
    if name == "right" and grades.exists():
        samples = by_grades(choose_questions(lines, len(lines)), read_grades(grades), grades)
    elif (directory / "config.json").exists():  # of train.py, which has one reward
        samples[read_config(directory)["flags"]["reward"]] = samples.R
    has = ", ".join(each for each in samples if each in [*REWARDS, "right"])
    known = name in samples and samples[name].notna().all()
    cli.require(known, f"{directory}: not all samples have {name!r} (they have {has or 'none'})")
    return samples.assign(reward=samples[name].astype(float))


def find_weights(samples, args):
    """1 for each sample whose reward is large enough. Without --at-least the advantage that it has
    in train.py, if that is positive: where no sample has a reward all weights are 0."""
    if at_least := args.at_least or (1 if args.select == "right" else None):
        return (samples.reward >= at_least).astype(float)
    groups = samples.groupby("line").reward
    A = groups.transform(lambda R: leave_one_out(torch.tensor(R.to_numpy())).numpy())
    return A.clip(lower=0)


def prompt_completion(tokenizer, problems, weights):
    """Rows as the trainers of others read them. TRL adds the end-of-text token, and knows no
    weights. Some tokenizers begin each text with a token, as the chat template has done."""
    begin = tokenizer.decode(tokenizer.encode(""))
    for problem, weight in zip(problems, weights):
        prompt = tokenizer.decode(encode_prompt(tokenizer, problem)).removeprefix(begin)
        yield {"prompt": prompt, "completion": problem.reference, "weight": weight}


if __name__ == "__main__":
    cli.run_script(main)
