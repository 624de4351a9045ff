"""The General-verifier: another language model decides if an answer equals the reference."""

import re
from pathlib import Path

from engine.sampling import generate
from runtime.cli import require, say
from tasks.prompts import encode_plain

VERIFIER_TOKENS = 1024  # longest reply
FIELDS = re.compile(r"\{(question|reference|answer)\}")
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
    """(problem, answer) pairs -> whether each is right, list of bool. A reply without a decision
    counts as No. verifier_model: (model, tokenizer)."""
    decisions = decide(pairs, verifier_model)
    if undecided := decisions.count(None):
        say(f"the verifier's model: {undecided} of {len(decisions)} replies hold no decision")
    return [decision is True for decision in decisions]


def decide(pairs, verifier_model, prompt=None):
    """(problem, answer) pairs -> what the model decides about each by greedy decoding: True, False,
    or None if its reply holds no decision. prompt: another wording with {question}, {reference} and
    {answer}, which goes through the model's chat template."""
    model, tokenizer = verifier_model
    texts = [filled(prompt or VERIFIER_PROMPT, *pair) for pair in pairs]
    prompts = [encode(tokenizer, text, as_chat=prompt is not None) for text in texts]
    outputs, _ = generate(model, prompts, VERIFIER_TOKENS, name="verifier", temperature=0)
    return [decision(tokenizer.decode(ids, skip_special_tokens=True)) for ids in outputs]


def read_prompt(path: str) -> str:
    """Another wording, from a file, checked."""
    prompt = Path(path).read_text(encoding="utf-8")
    complete = {*FIELDS.findall(prompt)} == {"question", "reference", "answer"}
    require(complete, f"{path} needs {{question}}, {{reference}} and {{answer}}")
    return prompt


def filled(prompt, problem, answer):
    """The prompt about one answer. The fields are filled in one pass, since an answer may hold
    "{question}", and not by str.format, since a prompt may hold other braces."""
    reference = " or ".join(problem.references)
    values = {"question": problem.question, "reference": reference, "answer": answer}
    return FIELDS.sub(lambda field: values[field[1]], prompt)


def encode(tokenizer, text, as_chat):
    """A prompt as token ids. Names of special tokens in it are spelled as ordinary text."""
    if as_chat and tokenizer.chat_template:
        mark = "\x00"  # replaced by the text after the template, in which special names are special
        messages = [{"role": "user", "content": mark}]
        template = dict(add_generation_prompt=True, tokenize=False)
        before, after = tokenizer.apply_chat_template(messages, **template).split(mark)
        plain = dict(add_special_tokens=False)
        middle = tokenizer.encode(text, split_special_tokens=True, **plain)
        return [*tokenizer.encode(before, **plain), *middle, *tokenizer.encode(after, **plain)]
    return encode_plain(tokenizer, text, split_special_tokens=True)


def decision(reply):
    """The last decision in a reply, True for Yes, or None. One that is quoted, as in an echo of the
    prompt, is none, and neither is "Yes/No"."""
    found = re.findall(r"""Final Decision:[\s*]*(Yes|No)\b(?![/"'])""", reply, re.IGNORECASE)
    return found[-1].lower() == "yes" if found else None
