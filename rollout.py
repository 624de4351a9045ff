"""Prompts, N samples for each question, and each sample cut into solution and answer. Nothing here
depends on the reward.
"""

from dataclasses import dataclass

import jinja2

from engine.cli import InputError, first_line, require
from engine.sampling import generate
from engine.tokens import Box, vocabulary
from tasks.data import Problem


@dataclass(frozen=True)
class Group:
    """One question with its N samples."""

    problem: Problem
    prompt: list[int]
    completions: list[list[int]]  # N, as sampled, the stop token included
    texts: list[str]  # N, decoded, without special tokens
    boxes: list[Box | None]  # N; where the answer is, None without a closed box
    truncated: list[bool]  # N; whether the length limit cut it off
    entropies: list[float]  # N, or none if the sampler does not know them

    @property
    def answers(self):
        """a_i, or None without a closed box [N]."""
        return [box.answer if box else None for box in self.boxes]

    def solution(self, i):
        """s_i, the token ids up to just before the brace of the box; all of them without a box."""
        box = self.boxes[i]
        return self.completions[i][: box.solution_length if box else None]


# --------------------------------------------------------------------------------------- the prompt

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
    none."""
    messages = chat_messages(problem)
    control = [token for token in tokenizer.all_special_tokens if token in problem.question]
    require(not control, f"the question {problem.question[:80]!r} has a control token, {control}")
    if not tokenizer.chat_template:
        return tokenizer.encode("".join(message["content"] + "\n\n" for message in messages))
    options = {"add_generation_prompt": True, "return_dict": False}
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except jinja2.TemplateError as error:
        raise InputError(f"the chat template fails ({first_line(error)})") from error


# -------------------------------------------------------------------------------------- the samples


def sample(model, tokenizer, problems, N, max_new_tokens, **settings):
    """N samples of each problem -> list of Group. settings: see engine.sampling.generate."""
    prompts = [encode_prompt(tokenizer, problem) for problem in problems]
    repeated = [prompt for prompt in prompts for _ in range(N)]
    completions, entropies = generate(model, repeated, max_new_tokens, **settings)
    stops = model.generation_config.eos_token_id
    groups = []
    for k, (problem, prompt) in enumerate(zip(problems, prompts)):
        own = slice(k * N, (k + 1) * N)
        groups.append(to_group(tokenizer, stops, problem, prompt, completions[own], entropies[own]))
    return groups


def to_group(tokenizer, stops, problem, prompt, completions, entropies):
    """Locate the last closed box of each completion, even if the text was truncated after it. Base
    models often go on writing after the box. Those tokens stay in the completion."""
    vocab = vocabulary(tokenizer)
    return Group(
        problem=problem,
        prompt=prompt,
        completions=completions,
        texts=[vocab.join(ids).decode("utf-8", "replace") for ids in completions],
        boxes=[vocab.locate_answer(ids) for ids in completions],
        truncated=[ids[-1] not in stops for ids in completions],
        entropies=entropies,
    )
