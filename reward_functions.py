"""Who is asked about a group, and the rewards by name.

`ask_judges` is the only stage of the loop that asks a model or a program about answers: the actor
for W and P, a verifier for what is right, a model for Yes or No. A reward is then a small function
of what they said, Judged -> R [N], in [0, 1], and 0 for a sample without a closed box. An empty box
is no answer either, and has the reward 0 except with `verifree` and what is averaged with it. A
reward calls no model. For a reward of your own add a function and a line to REWARDS.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

import cer
from engine.tokens import batches, positions, vocabulary
from rloo import rloo_rows, verifree_rows
from rollout import Group
from runtime.cli import as_input_error, progress, require, say
from runtime.sampled import verbatim
from tasks import general_verifier
from tasks.prompts import encode_message
from tasks.verifiers import verify, words


@dataclass(frozen=True)
class Judged:
    """One question with its N samples, and what was said about them."""

    group: Group
    scores: cer.Scores | None  # W and P, if the actor was asked
    gains: torch.Tensor | None = None  # [N], if it was asked about tokens, see reference_gains
    right: torch.Tensor | None = None  # [N], bool, if the question's verifier was asked, a program
    accepted: torch.Tensor | None = None  # [N], bool, if General-verifier's model was asked
    yes: torch.Tensor | None = None  # [N], P(Yes), if a model was asked whether the answer is right


def ask_judges(groups, judges, actor, tokenizer, M=None, verifier_model=None) -> list[Judged]:
    """Ask about each Group in a list. judges: a set of "actor", for W and P; for what is right
    "verifier", the program that the question names, or "general-verifier", by the written reply of
    another language model; "asked", for P(Yes), of another model or of the actor. verifier_model:
    that model and its tokenizer. Each is asked once about each distinct answer to a question.
    "tokens" asks the actor about the references' tokens alone."""
    scores = gains = [None] * len(groups)
    if "actor" in judges:
        inputs = [(g.prompt, g.completions, g.problem.references, M) for g in groups]
        scores = [cer.score(actor, tokenizer, *each) for each in progress("score", inputs)]
    pairs = list(dict.fromkeys((g.problem, a) for g in groups for a in g.answers if a))
    said = {}  # by the name of the field, what was said about each pair
    if "verifier" in judges:
        said["right"] = dict(zip(pairs, verify(pairs)))
    if "general-verifier" in judges:
        decisions, _ = general_verifier.ask(pairs, verifier_model)
        said["accepted"] = {pair: decided is True for pair, decided in zip(pairs, decisions)}
    if "asked" in judges:
        said["yes"] = probability_of_yes(pairs, verifier_model or (actor, tokenizer))
    if "tokens" in judges:
        gains = [reference_gains(group, actor, tokenizer) for group in progress("tokens", groups)]
    return [
        Judged(group, *of, **{name: of_samples(each, group) for name, each in said.items()})
        for group, *of in zip(groups, scores, gains)
    ]


def of_samples(verdicts, group):
    """What was said about the answer of each sample [N], False without an answer."""
    return torch.tensor([verdicts.get((group.problem, a), False) for a in group.answers])


# --------------------------------------------------------------------------- the reference's tokens


@torch.no_grad()
def reference_gains(group, actor, tokenizer):
    """What each sample's solution adds to the mean probability of the reference's tokens, which is
    first taken right after the prompt -> [N], in [-1, 1]. Of several references the one that gains
    most counts. 0 without a closed box.

    The tokens are those of "{a*" in the tokenizer's spelling. Their mean is no probability of an
    answer: a long reference keeps a mean far above 0, and one unlikely token costs it little.
    """
    vocab, model = vocabulary(tokenizer), cer.unwrapped(actor)
    boxed = [i for i, box in enumerate(group.boxes) if box]
    contexts = [group.prompt + group.solution(i) for i in boxed]
    contexts.append(group.prompt + vocab.encode(r"\boxed"))  # without a solution
    references = [vocab.encode("{" + reference) for reference in group.problem.references]
    means = torch.empty(len(references), len(contexts))
    of_each = range(len(contexts))
    for columns in batches(of_each, lambda j: len(contexts[j]), cer.TOKENS_AT_ONCE):
        lengths, last, cache = cer.read_contexts(model, [contexts[j] for j in columns])
        for row, tokens in enumerate(references):
            [states] = cer.read_answers(model, [tokens], lengths, last, cache)
            logp = cer.next_token_logprobs(model.lm_head, states)
            p = [at[:, token].exp() for at, token in zip(logp, tokens)]
            means[row, columns] = torch.stack(p).mean(0).cpu()
    gains = torch.zeros(len(group.boxes))
    gains[boxed] = (means[:, :-1] - means[:, -1:]).amax(0)
    return gains


# --------------------------------------------------------------------------------------- Yes or No

ASK = """\
A student answered the question below. Decide whether the student's answer is right: it must mean \
the same as a reference answer, in any wording. Reply with Yes or No only.

Question: {question}
Reference answer: {references}
Student's answer:"""
ASK_END = "\n\nIs the student's answer right? Yes or No?"


def probability_of_yes(pairs, verifier_model) -> dict[tuple, float]:
    """P(Yes) / (P(Yes) + P(No)) of the next token, for each of some distinct pairs (problem,
    answer) -> {pair: P}. verifier_model: (model, tokenizer). One forward pass, nothing is
    generated. What the answers to a question share is read once, if their pairs lie side by side.
    """
    model, tokenizer = verifier_model
    yes, no = decision_tokens(tokenizer)
    of_problems = [[*of_one] for _, of_one in itertools.groupby(pairs, key=lambda pair: pair[0])]
    P = {}
    for of_one in progress("ask", of_problems):
        prompts = asking_prompts(tokenizer, of_one[0][0], [answer for _, answer in of_one])
        asked_about = [*zip(of_one, prompts)]
        for batch in batches(asked_about, lambda each: len(each[1]), cer.TOKENS_AT_ONCE):
            with torch.no_grad():
                _, last, _ = cer.read_contexts(model, [prompt for _, prompt in batch])
                logits = model.lm_head(last).float()  # [n, V]
            odds = logits[:, yes].logsumexp(1) - logits[:, no].logsumexp(1)
            P |= dict(zip((pair for pair, _ in batch), odds.sigmoid().tolist()))
    return P


def asking_prompts(tokenizer, problem, answers):
    """What a model is asked about each answer, as token ids. Names of special tokens in an answer
    are ordinary text."""
    references = " or ".join(f'"{reference}"' for reference in problem.references)
    # In one pass, since a reference may hold "{question}".
    text = ASK.format(question=problem.question.strip(), references=references)
    return [encode_message(tokenizer, f"{text} {answer}{ASK_END}") for answer in answers]


def decision_tokens(tokenizer):
    """The first tokens of Yes and of No in their usual spellings, without those that both have."""
    encode = vocabulary(tokenizer).encode
    yes, no = (
        {encode(each)[0] for each in (word, word.lower(), word.upper(), f" {word}")}
        for word in ("Yes", "No")
    )
    return sorted(yes - no), sorted(no - yes)


@torch.no_grad()
def check_asked(problems, verifier_model, max_new_tokens):
    """InputError if a model cannot be asked about these problems, with answers of at most
    max_new_tokens. If it would write something else than Yes or No about the references of the
    first ones, a line says so."""
    model, tokenizer = verifier_model
    cannot, decisions = "this model cannot be asked", decision_tokens(tokenizer)
    require(all(decisions), f"{cannot}: its tokenizer begins Yes and No with the same token")
    with as_input_error(cannot):
        longest = max(len(asking_prompts(tokenizer, each, [""])[0]) for each in problems)
    too_few = f"it has {positions(model)} positions, too few for a prompt of {longest} tokens and"
    require(longest + max_new_tokens <= positions(model), f"{cannot}: {too_few} --max-new-tokens")
    first = [asking_prompts(tokenizer, each, [each.reference])[0] for each in problems[:4]]
    _, last, _ = cer.read_contexts(model, first)
    p = model.lm_head(last).float().softmax(-1).mean(0)  # [V]
    if (share := p[sum(decisions, [])].sum().item()) < 0.5:
        instead = f"the model would begin with {tokenizer.decode(p.argmax())!r}"
        say(f"asked: Yes and No have {share:.2g} of the probability, and {instead}")


# -------------------------------------------------------------------------------------- the rewards


def conditional_expectation(judged):
    """Conditional Expectation Reward, R = D^-1 W P (Eq. 8). The actor itself is the judge."""
    return judged.scores.R_of_samples()


def exact_match(judged):
    """1 where the answer is a reference verbatim."""
    references = judged.group.problem.references
    return torch.tensor([float(verbatim(answer, references)) for answer in judged.group.answers])


def verdict(judged):
    """1 where the question's verifier, a program, accepts the answer."""
    return judged.right.float()


def written_verdict(judged):
    """1 where General-verifier's model accepts the answer. A reply that decides nothing, which
    grade.py leaves out, is 0 here, since training needs a number."""
    return judged.accepted.float()


def verifree(judged):
    """VeriFree: R_i = P_i = pi(a*|s_i, q), whatever answer was sampled. (An answer is needed only
    to know where the solution ends.) The update teaches a* in its place (rloo.verifree_rows)."""
    return judged.scores.P_of_samples()


def rlpr(judged):
    """RLPR's reward (arXiv 2506.18254): what the sample's own solution adds to the mean probability
    of the reference's tokens, at least 0. docs/paper.md says what its authors do beside it."""
    return judged.gains.clamp(min=0)


def overlap(judged):
    """The token F1 of SQuAD between the answer and the reference that fits best: the harmonic mean
    of the shares of their words that they have in common. It needs no model. It cannot see that
    "no" and "they are the same" may say one thing, gives "not guilty" .67 for "guilty", and since
    punctuation does not count it takes 15 for 1.5."""
    references = [words(reference) for reference in judged.group.problem.references]
    answers = [words(answer or "") for answer in judged.group.answers]
    return torch.tensor([max(f1(answer, each) for each in references) for answer in answers])


def f1(one, other):
    """For two Counters of words twice what they share over what they hold, in [0, 1]."""
    return 2 * (one & other).total() / max(1, one.total() + other.total())


def asked(judged):
    """How sure a language model is that the answer is right, when it is asked. On honest answers it
    is ahead of CER, if the model is large enough. It also rewards answers that say nothing
    (experiments/asking)."""
    return judged.yes.float()


def any_box(judged):
    """1 for any answer: the control, which shows how much of a gain is to answer at all."""
    return torch.tensor([float(bool(answer)) for answer in judged.group.answers])


def mean_of(*rewards):
    """The plain average of rewards."""
    return lambda judged: torch.stack([reward(judged) for reward in rewards]).mean(0)


@dataclass(frozen=True)
class Reward:
    of: Callable[[Judged], torch.Tensor]  # -> R [N]
    judges: set[str]  # who has to be asked, see ask_judges
    training_rows: Callable = rloo_rows  # (Judged, R, A, tokenizer) -> those of the question


REWARDS = {
    "cer": Reward(conditional_expectation, {"actor"}),
    "exact": Reward(exact_match, set()),
    "rule": Reward(verdict, {"verifier"}),
    "rule+cer": Reward(mean_of(verdict, conditional_expectation), {"verifier", "actor"}),
    "verifree": Reward(verifree, {"actor"}, verifree_rows),
    "rlpr": Reward(rlpr, {"tokens"}),
    "general-verifier": Reward(written_verdict, {"general-verifier"}),
    "overlap": Reward(overlap, set()),
    "overlap+cer": Reward(mean_of(overlap, conditional_expectation), {"actor"}),
    "asked": Reward(asked, {"asked"}),
    "any-box": Reward(any_box, set()),
}


def R_by_name(name: str, judged: list[Judged]) -> torch.Tensor:
    """R [B, N] of a step, checked."""
    R = [REWARDS[name].of(each) for each in judged]
    for i, each in enumerate(judged):
        problem = f"the reward {name!r} must give each sample a finite number, not {R[i]}"
        with as_input_error(problem):  # of what is no number
            R[i] = torch.as_tensor(R[i], dtype=torch.float32, device="cpu")
        require(R[i].shape == (len(each.group.answers),) and R[i].isfinite().all(), problem)
    return torch.stack(R)
