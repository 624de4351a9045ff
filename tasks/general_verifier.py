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


def ask(pairs, verifier_model, prompt=None):
    """(problem, answer) pairs -> whether each is right, list of bool, by greedy decoding. A reply
    without a decision counts as No. verifier_model: (model, tokenizer). prompt: another wording
    with {question}, {reference} and {answer}, which goes through the model's chat template."""
    model, tokenizer = verifier_model
    prompts = [encode(tokenizer, pair, prompt) for pair in pairs]
    outputs, _ = generate(model, prompts, VERIFIER_TOKENS, name="verifier", temperature=0)
    decisions = [decision(tokenizer.decode(ids, skip_special_tokens=True)) for ids in outputs]
    if undecided := decisions.count(None):
        say(f"the verifier's model: {undecided} of {len(decisions)} replies hold no decision")
    return [decided is True for decided in decisions]


def read_prompt(path: str) -> str:
    """Another wording, from a file, checked."""
    prompt = Path(path).read_text(encoding="utf-8")
    complete = {*FIELDS.findall(prompt)} == {"question", "reference", "answer"}
    require(complete, f"{path} needs {{question}}, {{reference}} and {{answer}}")
    return prompt


def encode(tokenizer, pair, prompt):
    """What the model is asked about one answer, as token ids. The fields are filled in one pass,
    since an answer may hold "{question}", and not by str.format, since a prompt may hold other
    braces."""
    problem, answer = pair
    reference = " or ".join(problem.references)
    values = {"question": problem.question, "reference": reference, "answer": answer}
    text = FIELDS.sub(lambda field: values[field[1]], prompt or VERIFIER_PROMPT)
    if prompt and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        options = {"add_generation_prompt": True, "return_dict": False}
        return tokenizer.apply_chat_template(messages, **options)
    # Names of special tokens are spelled as ordinary text: a policy could learn to write them.
    return encode_plain(tokenizer, text, split_special_tokens=True)


def decision(reply):
    """The last decision in a reply, True for Yes, or None. One that is quoted, as in an echo of the
    prompt, is none, and neither is "Yes/No"."""
    found = re.findall(r"""Final Decision:[\s*]*(Yes|No)\b(?![/"'])""", reply, re.IGNORECASE)
    return found[-1].lower() == "yes" if found else None
