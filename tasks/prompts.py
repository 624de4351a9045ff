"""The prompt of a problem: the paper's wording, through the model's chat template."""

import datetime
import functools
import re

from transformers.utils import chat_template_utils

from engine.tokens import positions
from runtime.cli import as_input_error, progress, require, say, shorten

# The wording of the paper's authors, from their code (the paper does not give it).
SYSTEM = "You are a helpful assistant."
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
LETTER_ONLY = " Please only provide the letter of the answer in the box."


def chat_messages(problem):
    """The prompt for a problem, as chat messages. Worked examples are turns before it."""
    messages = [{"role": "system", "content": SYSTEM}]
    for example in problem.examples:
        messages.append({"role": "user", "content": user_message(example)})
        messages.append({"role": "assistant", "content": example.reference})
    return [*messages, {"role": "user", "content": user_message(problem)}]


def user_message(problem):
    letter_only = LETTER_ONLY if problem.verifier == "letter" else ""
    return f"{problem.question}\n{INSTRUCTION}{letter_only}"


def encode_prompt(tokenizer, problem):
    """The prompt as token ids, through the chat template, or as plain text if the tokenizer has
    none. Whether a model thinks first is left to its template. A thought is then a part of the
    solution, and a box inside it counts like any other: the last closed box is the answer."""
    messages = chat_messages(problem)
    if not tokenizer.chat_template:
        return encode_plain(tokenizer, "".join(m["content"] + "\n\n" for m in messages))
    return tokenizer.encode(through_template(tokenizer, messages), add_special_tokens=False)


class SameDay(datetime.datetime):
    """The clock of chat templates, since some print today's date. A prompt must be the same when
    the run is resumed tomorrow, or its checkpoint evaluated. Llama's template, too, prints this day
    where it knows no date."""

    @classmethod
    @functools.cache  # with one line
    def now(cls):
        say("the prompts hold today's date, for which they always get 26 July 2024")
        return cls(2024, 7, 26)


chat_template_utils.datetime = SameDay


def encode_message(tokenizer, text):
    """What a model is asked about an answer, as token ids, through the chat template, or as plain
    text if the tokenizer has none. The names of special tokens in it are ordinary text: it may hold
    an answer, and a policy could learn to write them."""
    if not tokenizer.chat_template:
        return encode_plain(tokenizer, text)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    before, after = around_message(tokenizer)
    return encode(before) + encode(text, split_special_tokens=True) + encode(after)


def through_template(tokenizer, messages, **options):
    """The text that the chat template makes of messages, with other options of its own. InputError
    if the template, which is a program, fails."""
    options |= {"add_generation_prompt": True, "tokenize": False}
    with as_input_error("the chat template fails"):
        return tokenizer.apply_chat_template(messages, **options)


def around_message(tokenizer, *before):
    """What a chat template puts before and after a user's message, which it has to show once.
    before: other messages. A model that can think before it answers is told not to."""
    placeholder = "\x00"
    messages = [*before, {"role": "user", "content": placeholder}]
    chat = through_template(tokenizer, messages, enable_thinking=False)
    require(chat.count(placeholder) == 1, "the chat template does not show the user's message once")
    return chat.split(placeholder)


def encode_plain(tokenizer, text):
    """A prompt without a template as token ids. The names of special tokens in it are ordinary
    text. Some tokenizers end each text with their end-of-text token, after which a model would
    begin another text."""
    ids = tokenizer.encode(text, split_special_tokens=True)
    while ids[-1] in tokenizer.all_special_ids:
        ids.pop()
    return ids


def control_tokens(tokenizer):
    """Control tokens such as <|im_end|>. Rows that contain one are left out, because it would be a
    control token in the question and plain text in the reference. Not every tokenizer calls its
    marks special (Qwen's <think> is not), and some add what is no mark, such as runs of spaces."""
    added = tokenizer.added_tokens_decoder.values()
    return [t.content for t in added if t.special or re.fullmatch("<.+>", t.content)]


def usable_prompts(model, tokenizer, problems, name, max_new_tokens, most=float("inf")):
    """The rows that fit the model -> (problems, tokens of the longest row: its prompt, a completion
    and its longest reference, which is read after a solution). Questions and references that hold a
    control token are left out, prompts of more than `most` tokens, and rows for which the model has
    too few positions. name: of the data set, for the messages. InputError if none is left."""
    if tokenizer.chat_template:
        before, _ = around_message(tokenizer, *chat_messages(problems[0])[:-1])  # is checked
        shown = all(example.reference.strip() in before for example in problems[0].examples)
        require(shown, "the chat template does not show the solutions of the examples")
    control, limit = control_tokens(tokenizer), positions(model)
    kept, longest, controlled, too_long = [], 0, 0, 0
    for problem in progress("prompts", problems, unit="prompt"):
        shown = [problem, *problem.examples]
        texts = "\n".join(text for each in shown for text in (each.question, *each.references))
        references = [tokenizer.encode(f"{{{each}}}") for each in problem.references]
        prompt = len(encode_prompt(tokenizer, problem))
        row = prompt + max_new_tokens + max(map(len, references))
        if any(token in texts for token in control):
            controlled += 1
        elif prompt > most or row > limit:
            too_long += 1
        else:
            kept.append(problem)
            longest = max(longest, row)
    counts = f"{controlled} of {len(problems)} questions or answers have a control token"
    if too_long:
        row = f"with {max_new_tokens} new tokens and its reference {limit}"
        counts += f", and {too_long} are too long: a prompt may have {min(most, limit)}, {row}"
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
