"""N samples of each question, and each sample cut into solution and answer. Nothing here depends on
the reward.
"""

from dataclasses import dataclass

from engine.sampling import generate
from engine.tokens import Box, vocabulary
from tasks.data import Problem
from tasks.prompts import encode_prompt


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


# -------------------------------------------------------------------------------------- the samples


def sample(model, tokenizer, problems, N, max_new_tokens, **settings) -> list[Group]:
    """N samples of each Problem in a list -> its Group. settings: see engine.sampling.generate."""
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
    texts = [vocab.join(ids).decode("utf-8", "replace") for ids in completions]
    boxes = [vocab.locate_answer(ids) for ids in completions]
    truncated = [ids[-1] not in stops for ids in completions]
    return Group(problem, prompt, completions, texts, boxes, truncated, entropies)
