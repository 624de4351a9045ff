"""The prompt of a problem: the paper's wording, through the model's chat template."""

import math

from engine.tokens import vocabulary
from runtime.cli import as_input_error, progress, require, say

# The wording of the paper's authors, from their code (the paper does not give it).
SYSTEM = "You are a helpful assistant."
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
LETTER_ONLY = " Please only provide the letter of the answer in the box."


def chat_messages(problem):
    """The prompt for a problem, as chat messages."""
    user = f"{problem.question}\n{INSTRUCTION}"
    user += LETTER_ONLY if problem.verifier == "letter" else ""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]


def encode_prompt(tokenizer, problem):
    """The prompt as token ids, through the chat template, or as plain text if the tokenizer has
    none. InputError if the template fails, or if the question is not in the prompt."""
    messages = chat_messages(problem)
    if not tokenizer.chat_template:
        return tokenizer.encode("".join(message["content"] + "\n\n" for message in messages))
    options = {"add_generation_prompt": True, "return_dict": False}
    with as_input_error("the chat template fails"):  # it is a program
        prompt = tokenizer.apply_chat_template(messages, **options)
    # Compared without white space, and after what the tokenizer normalises.
    vocab = vocabulary(tokenizer)
    texts = vocab.join(vocab.encode(problem.question)), vocab.join(prompt)
    question, whole = ("".join(text.decode("utf-8", "replace").split()) for text in texts)
    require(question in whole, f"the chat template drops the question {problem.question[:80]!r}")
    return prompt


def usable_prompts(tokenizer, problems, name, most=math.inf):
    """Leave out questions that hold a control token, and prompts of more than `most` tokens ->
    (problems, tokens of the longest prompt). name: of the data set, for the messages. InputError if
    no question is left."""
    control = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    kept, longest, controlled, too_long = [], 0, 0, 0
    for problem in progress("prompts", problems, unit="prompt"):
        if any(token in problem.question for token in control):
            controlled += 1
        elif (size := len(encode_prompt(tokenizer, problem))) > most:
            too_long += 1
        else:
            kept.append(problem)
            longest = max(longest, size)
    counts = f"{controlled} of {len(problems)} questions have a control token"
    if most < math.inf:
        counts += f", and {too_long} prompts more than {most} tokens"
    require(kept, f"{name}: no question is left; {counts}")
    if len(kept) < len(problems):
        say(f"{name}: left out: {counts}")
    return kept, longest
