"""One question to a real model, drawn as the paper's Fig. 2: no training, one group of samples.

    python benchmarks/real_group.py --model DIR --out docs/real-model.png

Small chat models box an answer only after they have seen it done: three worked turns come first,
whose answers differ in form ("8 legs", "ten", "21"). --question K takes another of the questions.
"""

import json

import measure
import torch

import plot
from data import INSTRUCTION, SYSTEM, Problem, require
from engine import cli, policy, run
from engine.sampling import sample
from rewards import Judge, conditional_expectation

WORKED = [
    ("How many legs do 2 cats have?", "A cat has 4 legs, so 2 * 4 = 8.", "8 legs"),
    ("How many wheels do 5 bicycles have?", "A bicycle has 2 wheels, so 5 * 2 = 10.", "ten"),
    ("How many days are in 3 weeks?", "A week has 7 days, so 3 * 7 = 21.", "21"),
]
QUESTIONS = [
    ("How many days are in 2 weeks?", "14 days"),
    ("How many legs do 3 dogs have?", "12"),
    ("How many wheels do 3 cars have?", "twelve"),
    ("How many fingers are on 2 hands?", "10 fingers"),
]


def worked_prompt(tokenizer, question):
    """The prompt of train.py as token ids, after the worked turns."""
    require(tokenizer.chat_template, "the model has no chat template")
    messages = [{"role": "system", "content": SYSTEM}]
    for asked, solution, answer in WORKED:
        messages.append({"role": "user", "content": f"{asked}\n{INSTRUCTION}"})
        text = rf"{solution} The answer is \boxed{{{answer}}}."
        messages.append({"role": "assistant", "content": text})
    messages.append({"role": "user", "content": f"{question}\n{INSTRUCTION}"})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face id or directory")
    parser.add_argument("--question", type=int, default=0)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="real-model.svg")
    args = parser.parse_args()
    require(0 <= args.question < len(QUESTIONS), f"--question must be under {len(QUESTIONS)}")
    model, tokenizer = policy.load(args.model, run.init_ranks())
    problem = Problem(*QUESTIONS[args.question])
    question = problem, worked_prompt(tokenizer, problem.question)
    torch.manual_seed(args.seed)
    (rollout,) = sample(model, tokenizer, [question], args.samples, 64)
    ((R, record),) = conditional_expectation([rollout], Judge(model, tokenizer, args.samples))
    for text, r in sorted(zip(rollout.texts, R.tolist()), key=lambda pair: -pair[1]):
        print(f"{r:.4f}  {json.dumps(text)}")
    plot.draw_group({"step": 0} | run.sample_record(rollout, R, record), args.out)
    print(json.dumps(measure.where()))


if __name__ == "__main__":
    cli.run_script(main)
