"""The prompt of a problem: the paper's wording, through the model's chat template."""

import math
import re

from runtime.cli import as_input_error, progress, require, say, shorten

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
    none. InputError if the template fails."""
    messages = chat_messages(problem)
    if not tokenizer.chat_template:
        return encode_plain(tokenizer, "".join(m["content"] + "\n\n" for m in messages))
    options = {"add_generation_prompt": True, "return_dict": False}
    with as_input_error("the chat template fails"):  # it is a program
        return tokenizer.apply_chat_template(messages, **options)


def around_message(tokenizer):
    """The token ids that a chat template puts before and after a user's message. The message is
    encoded on its own, with the names of special tokens as ordinary text: it may hold an answer,
    and a policy could learn to write them. Without a template there is nothing around it."""
    if not tokenizer.chat_template:
        return [], []
    mark = "\x00"
    messages = [{"role": "user", "content": mark}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, after = chat.split(mark)
    encode = tokenizer.encode
    return encode(before, add_special_tokens=False), encode(after, add_special_tokens=False)


def encode_plain(tokenizer, text, **options):
    """A prompt without a template as token ids. Some tokenizers end each text with their
    end-of-text token, after which a model would begin another text."""
    ids = tokenizer.encode(text, **options)
    while ids[-1] in tokenizer.all_special_ids:
        ids.pop()
    return ids


def control_tokens(tokenizer):
    """What must not be in the texts of a data set, where it is a token in a question and ordinary
    text in a reference. Not every tokenizer calls its marks special (Qwen's <think> is not), and
    some add what is no mark, such as runs of spaces."""
    added = tokenizer.added_tokens_decoder.values()
    return [t.content for t in added if t.special or re.fullmatch("<.+>", t.content)]


def usable_prompts(tokenizer, problems, name, most=math.inf):
    """Leave out questions and references that hold a control token, and prompts of more than `most`
    tokens -> (problems, tokens of the longest prompt). name: of the data set, for the messages.
    InputError if no question is left."""
    control = control_tokens(tokenizer)
    kept, longest, controlled, too_long = [], 0, 0, 0
    for problem in progress("prompts", problems, unit="prompt"):
        texts = "\n".join([problem.question, *problem.references])
        if any(token in texts for token in control):
            controlled += 1
        elif (size := len(encode_prompt(tokenizer, problem))) > most:
            too_long += 1
        else:
            kept.append(problem)
            longest = max(longest, size)
    counts = f"{controlled} of {len(problems)} questions or answers have a control token"
    if most < math.inf:
        counts += f", and {too_long} prompts more than {most} tokens"
    require(kept, f"{name}: no question is left; {counts}")
    if len(kept) < len(problems):
        say(f"{name}: left out: {counts}")
    return kept, longest


def show_first(tokenizer, problems, name):
    """Print the first prompt and what is right. There a user sees what is missing."""
    problem = problems[0]
    prompt = shorten(tokenizer.decode(encode_prompt(tokenizer, problem)), 800)
    reference = shorten(" or ".join(problem.references), 200)
    say(f"{name}: the first prompt, as the model sees it:")
    say("\n".join(f"  | {line}" for line in prompt.splitlines()))
    say(f"  its reference: {reference}; its verifier: {problem.verifier}")
