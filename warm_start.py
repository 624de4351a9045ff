"""Give a model that does not box its answers a supervised start, or fine-tune it on references.

    python warm_start.py --model HuggingFaceTB/SmolLM2-135M-Instruct --data demos.jsonl --out warm
    python train.py --model warm --dataset mine.jsonl

Each row of the file has a `question` (or `problem`) and a `solution` that ends in \\boxed{...}, as
you would like the model to write it. Twenty rows can be enough. Of a row without a `solution` the
model learns the reference alone, in a box, as the whole completion (the first of several).
"""

from runtime import cli  # isort: split

import torch.distributed as dist

from cer import check_scoring
from engine.checks import check_sampling
from engine.export import export
from engine.load import load
from engine.tokens import vocabulary
from runtime.ranks import init_ranks, open_run_directory
from tasks.data import in_epochs, load_problems, to_demonstration
from tasks.prompts import encode_prompt, show_first, usable_prompts
from tasks.supervised import finetune


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", required=True, help="Hugging Face model id or directory")
    add("--data", required=True, help="demonstrations: question, and boxed solution or answer")
    add("--out", required=True, help="new directory for the trained model")
    add("--epochs", type=count, default=4, help="passes over the demonstrations")
    add("--batch", type=count, default=8, help="demonstrations per optimizer step")
    add("--lr", type=cli.number(float, 1e-12, 1), default=5e-5, help="peak learning rate of Adam")
    add("--seed", type=int, default=0, help="random seed of the order")
    args = parser.parse_args()
    device = init_ranks()
    cli.require(dist.get_world_size() == 1, "warm_start.py runs in one process, without torchrun")
    demonstrations = load_problems(args.data, convert=to_demonstration)
    out = open_run_directory(args.out, "warm-start")
    model, tokenizer = load(args.model, device, check_sampling, check_scoring, dtype="fp32")
    demonstrations, _ = usable_prompts(model, tokenizer, demonstrations, args.data, 0)
    show_first(tokenizer, demonstrations, args.data)
    encode = vocabulary(tokenizer).encode
    pairs = [(encode_prompt(tokenizer, each), encode(each.reference)) for each in demonstrations]
    # The rate falls to about 0 by the last step, so that a single step would train nothing.
    steps = max(2, args.epochs * len(pairs) // args.batch)
    print(f"{len(pairs)} demonstrations, {steps} steps of {args.batch}, lr {args.lr:g}, {device}")
    model.train()
    if device.type == "cuda":
        model.activation_checkpointing_enable()
    stop = tokenizer.eos_token_id
    is_stop = stop in model.generation_config.eos_token_id
    cli.require(is_stop, f"{args.model}: its tokenizer has no end-of-text token")
    order = iter(in_epochs(pairs, steps * args.batch, args.seed))
    loss = finetune(model, order, steps, args.batch, args.lr, stop)
    cli.require(loss < float("inf"), f"the loss is {loss}: use a lower --lr")
    with cli.as_input_error(f"cannot save {out}"):
        export(model, tokenizer, out)
    print(f"final loss {loss:.3f}; next: python judge.py --model {out} --dataset FILE")
    longest = 1 + max(len(solution) for _, solution in pairs)  # with its end-of-text token
    print(f"--max-new-tokens: at least {longest}, as many as the longest demonstration has")


if __name__ == "__main__":
    cli.run_script(main)
