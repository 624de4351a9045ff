"""Give a model that does not box its answers a supervised start.

    python warm_start.py --model HuggingFaceTB/SmolLM2-135M-Instruct --data demos.jsonl --out warm
    python train.py --model warm --dataset mine.jsonl

Each row of the file has a `question` (or `problem`) and a `solution` that ends in \\boxed{...}, as
you would like the model to write it. Twenty rows can be enough.
"""

import os
import shlex
import shutil

import torch.distributed as dist

from cer import check_scoring
from engine.load import check_sampling, load
from engine.supervised import supervise
from engine.tokens import split_answer, vocabulary
from runtime import cli
from runtime.cli import require
from runtime.files import lock, read_rows
from runtime.ranks import choose_directory, init_ranks
from tasks.data import in_epochs, to_problem
from tasks.prompts import encode_prompt, usable_prompts


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", required=True, help="Hugging Face model id or directory")
    add("--data", required=True, help="file of demonstrations: question and boxed solution")
    add("--out", required=True, help="new directory for the trained model")
    add("--epochs", type=count, default=4, help="passes over the demonstrations")
    add("--batch", type=count, default=8, help="demonstrations per optimizer step")
    add("--lr", type=cli.number(float, 1e-12), default=5e-5, help="peak learning rate of Adam")
    add("--seed", type=int, default=0, help="random seed of the order")
    args = parser.parse_args()
    device = init_ranks()
    require(dist.get_world_size() == 1, "warm_start.py runs in one process, without torchrun")
    out = choose_directory(args.out, "warm-start")
    demonstrations = read_demonstrations(args.data)
    model, tokenizer = load(args.model, device, check_sampling, check_scoring)
    encode = vocabulary(tokenizer).encode
    problems, _ = usable_prompts(tokenizer, [problem for problem, _ in demonstrations], args.data)
    usable = set(problems)
    demonstrations = [(problem, text) for problem, text in demonstrations if problem in usable]
    pairs = [(encode_prompt(tokenizer, problem), encode(text)) for problem, text in demonstrations]
    claim = lock(out)  # noqa: F841  before the training, and until this process ends
    # The rate falls to about 0 by the last step, so that a single step would train nothing.
    steps = max(2, args.epochs * len(pairs) // args.batch)
    print(f"{len(pairs)} demonstrations, {steps} steps of {args.batch}, lr {args.lr:g}, {device}")
    model = model.float().train()  # Adam would hardly move bf16 weights
    if device.type == "cuda":
        model.activation_checkpointing_enable()
    stop = tokenizer.eos_token_id
    require(stop is not None, f"{args.model}: its tokenizer has no end-of-text token")
    order = iter(in_epochs(pairs, steps * args.batch, args.seed))
    loss = supervise(model, order, steps, args.batch, args.lr, stop)
    require(loss < float("inf"), f"the loss is {loss}: use a lower --lr")
    save(model.eval(), tokenizer, out)
    judge = shlex.join(["python", "judge.py", "--model", str(out), "--dataset", "FILE"])
    print(f"final loss {loss:.3f}; see what it answers with: {judge}")


def save(model, tokenizer, out):
    """Save in out/, or nothing at all: all files are written in out/partial, and moved then."""
    partial = out / "partial"
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        os.sync()
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            path.rename(out / path.name)  # config.json last, without which this is no model
        partial.rmdir()
    except Exception as error:  # a full disk raises errors of many types
        shutil.rmtree(partial, ignore_errors=True)
        raise cli.InputError(f"cannot save {out} ({cli.first_line(error)})") from error


def read_demonstrations(path):
    """-> list of (Problem, solution text)."""
    demonstrations = []
    for number, row in enumerate(read_rows(path), start=1):
        solution = row.get("solution")
        boxed = isinstance(solution, str) and split_answer(solution)
        require(boxed, rf"{path}, row {number}: expected a `solution` with a closed \boxed{{...}}")
        try:
            solution.encode()  # a lone surrogate is valid in JSON, but not in UTF-8
            demonstrations.append((to_problem(row | {"answer": boxed[1]}, "text"), solution))
        except (cli.InputError, UnicodeEncodeError) as reason:
            raise cli.InputError(f"{path}, row {number}: {reason}") from reason
    require(demonstrations, f"{path} is empty")
    return demonstrations


if __name__ == "__main__":
    cli.run_script(main)
