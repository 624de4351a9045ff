"""Is pi(a|s,q) the probability that the model gives answer a? Compare three ways of scoring it with
the model's samples after one context.

    python benchmarks/closing_brace.py --model DIR

The probabilities of a list of answers should sum to the share of samples that give one of them.
"no brace" scores the answer's tokens after `\\boxed{`. "plain" scores the tokens of "{answer}" as
the tokenizer spells it. "cover" is answer_logprobs.
"""

import json

import measure
import pandas
import torch

from cer import answer_logprobs
from engine import cli, policy, run
from engine.sampling import generate
from engine.tokens import pad, vocabulary

COLOURS = "red orange yellow green blue purple violet indigo black white pink brown grey".split()
LISTS = {
    "0, 1, ... 199": ("How many days are in 2 weeks? The answer is $\\boxed", map(str, range(200))),
    "colours in \\text{}": (
        "What colour is grass? The answer is $\\boxed{\\text{green}}$.\n"
        "What colour is the sky? The answer is $\\boxed",
        [rf"\text{{{colour}}}" for colour in COLOURS],
    ),
}


@torch.no_grad()
def sum_logprobs(model, context, continuations):
    """log pi of each list of token ids after the context -> [len(continuations)]."""
    ids = pad([context + ids for ids in continuations]).to(model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    logp = policy.token_logprobs(hidden.flatten(0, 1), model.lm_head, ids[:, 1:].flatten())
    rows = zip(logp.view(len(ids), -1)[:, len(context) - 1 :], continuations)
    return torch.stack([row[: len(ids)].sum() for row, ids in rows])


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face id or directory")
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model, tokenizer = policy.load(args.model, run.init_ranks())
    torch.manual_seed(args.seed)
    vocab, rows = vocabulary(tokenizer), {}
    for name, (text, answers) in LISTS.items():
        answers, context = list(answers), vocab.encode(text)
        sampled, _ = generate(model, [context] * args.samples, 12)
        found = [vocab.locate_answer(context + ids) for ids in sampled]
        found = [box for box in found if box and box.solution_length == len(context)]
        given = sum(box.answer in answers for box in found)
        after_brace = context + vocab.encode("{")
        p = {
            "no brace": sum_logprobs(model, after_brace, [vocab.encode(a) for a in answers]),
            "plain": sum_logprobs(model, context, [vocab.encode(f"{{{a}}}") for a in answers]),
            "cover": answer_logprobs(model, tokenizer, [context], answers)[:, 0],
        }
        rows[name] = {"sampled": given / args.samples}
        rows[name] |= {way: log_p.exp().sum().item() for way, log_p in p.items()}
    print(pandas.DataFrame(rows).T.to_string(float_format="{:.3f}".format))
    print(json.dumps(measure.where()))


if __name__ == "__main__":
    cli.run_script(main)
