"""The General-verifier: another language model decides if an answer equals the reference."""

import re

from engine.sampling import generate

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


def ask(verifier_model, pairs):
    """(problem, answer) pairs -> the verdict on each, "right", "wrong" or "undecided", by greedy
    decoding. verifier_model: (model, tokenizer)."""
    model, tokenizer = verifier_model
    texts = [
        VERIFIER_PROMPT.format(question=p.question, reference=p.reference, answer=answer)
        for p, answer in pairs
    ]
    prompts = [tokenizer.encode(text, split_special_tokens=True) for text in texts]
    outputs, _ = generate(model, prompts, VERIFIER_TOKENS, name="verifier", temperature=0)
    return [decision(tokenizer.decode(ids, skip_special_tokens=True)) for ids in outputs]


def decision(output):
    """The verdict in the verifier's reply: its last decision. One that is quoted, as in an echo of
    the prompt, is none, and neither is "Yes/No"."""
    said = re.findall(r"""Final Decision: (Yes|No)\b(?![/"'])""", output)
    return {"Yes": "right", "No": "wrong"}[said[-1]] if said else "undecided"
