"""The General-verifier: another language model decides if an answer equals the reference."""

import re

from engine.sampling import generate
from runtime.cli import say

GENERAL_VERIFIER = "TIGER-Lab/general-verifier"  # what --verifier-model is by default
VERIFIER_TOKENS = 1024  # longest reply
# The prompt that TIGER-Lab/general-verifier was trained on, verbatim. It uses no chat template.
VERIFIER_PROMPT = """\
User: ### Question: {question}

### Ground Truth Answer: {reference}

### Student Answer: {answer}

For the above question, please verify if the student's answer is equivalent to the ground truth \
answer.
Do not solve the question by yourself; just check if the student's answer is equivalent to the \
ground truth answer.
If the student's answer is correct, output "Final Decision: Yes". If the student's answer is \
incorrect, output "Final Decision: No". Assistant:"""


def ask(pairs, verifier_model):
    """(problem, answer) pairs -> whether each is right, by greedy decoding. verifier_model: (model,
    tokenizer)."""
    model, tokenizer = verifier_model
    texts = [
        VERIFIER_PROMPT.format(
            question=problem.question, reference=" or ".join(problem.references), answer=answer
        )
        for problem, answer in pairs
    ]
    prompts = [tokenizer.encode(text, split_special_tokens=True) for text in texts]
    outputs, _ = generate(model, prompts, VERIFIER_TOKENS, name="verifier", temperature=0)
    replies = [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
    undecided = sum("Final Decision: " not in reply for reply in replies)
    if undecided > len(replies) / 2:  # a model that was not trained on this prompt
        say(f"the verifier's model: {undecided} of {len(replies)} replies hold no decision (wrong)")
    return [accepts(reply) for reply in replies]


def accepts(reply):
    """Whether the last decision in the verifier's reply is Yes. One that is quoted, as in an echo
    of the prompt, is none, and neither is "Yes/No"."""
    decisions = re.findall(r"""Final Decision: (Yes|No)\b(?![/"'])""", reply)
    return decisions[-1:] == ["Yes"]
