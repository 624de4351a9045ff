"""The General-verifier: another language model decides if an answer equals the reference."""

import re
from pathlib import Path

from engine.sampling import generate
from runtime.cli import as_input_error, require, say, shorten
from tasks.prompts import encode_message, encode_plain

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
    """(problem, answer) pairs -> whether each is right, and the replies, by greedy decoding. It is
    None if the reply holds no decision or does not end, or if the prompt fills all positions of the
    model, so that the reply is empty. verifier_model: (model, tokenizer). prompt: another wording
    with {question}, {reference} and {answer}, which goes through the model's chat template."""
    model, tokenizer = verifier_model
    prompts = [encode(tokenizer, pair, prompt) for pair in pairs]
    outputs, _ = generate(model, prompts, VERIFIER_TOKENS, name="verifier", temperature=0)
    stops = model.generation_config.eos_token_id
    replies = [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
    ended = [bool(ids) and ids[-1] in stops for ids in outputs]
    decisions = [decision(reply) if end else None for reply, end in zip(replies, ended)]
    if undecided := [reply for reply, decided in zip(replies, decisions) if decided is None]:
        count = f"{len(undecided)} of {len(replies)} replies hold no decision"
        too_long = f"{outputs.count([])} prompts are too long for it"
        example = shorten(max(undecided, key=len), 200)
        say(f"the verifier's model: {count} ({too_long}), such as {example!r}")
    return decisions, replies


def read_prompt(path: str) -> str:
    """Another wording, from a file, checked."""
    with as_input_error(f"cannot read the prompt {path}"):
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
    return encode_message(tokenizer, text) if prompt else encode_plain(tokenizer, text)


MARKS = r"[\s*_#`$]*"  # Markdown's
DECISION = re.compile(
    rf"(?i)Final Decision{MARKS}(?:[:：]{MARKS})?(?:\\boxed\{{)?(Yes|No)[}}*_`$ ]*(?=[.!\n]|$)"
)


def decision(reply):
    """The last decision in a reply, True for Yes, or None. It ends a line or a sentence, so it is
    none if it is quoted, as in an echo of the prompt, or goes on ("Yes or No", "Yes if")."""
    found = DECISION.findall(reply)
    return found[-1].lower() == "yes" if found else None
