r"""Conditional Expectation Reward: the model that answers is also the judge.

    q           a question
    s           a solution, sampled from pi(s | q); it ends with `\boxed`
    a           the answer in the box after it, sampled from pi(a | s, q)
    a*          the reference answer
    rho(a, a*)  how likely a* is after the solutions that lead to a: E[ pi(a*|s,q) | a, q ]  (Eq. 3)

With N samples (s_i, a_i) of one question:

    W [N, N]    W_ij = pi(a_i | s_j, q)     probability of answer i after solution j
    P [N]       P_j  = pi(a*  | s_j, q)     probability of the reference after solution j; if there
                                            are several references, of one of them: their sum
    D           the row sums of W, as a diagonal matrix
    R [N]       R = D^-1 W P                the reward of each sample, in [0, 1]             (Eq. 8)

Why this estimates Eq. 3: by Bayes the posterior pi(s|a,q) is proportional to prior times
likelihood, pi(s|q) pi(a|s,q), and the prior needs no factor, because the s_j are drawn from it and
a likely solution is simply there more often. And because s_i itself is among the columns, R_i has
the mean rho at every N, given a_i (docs/theory.md has the proof and its conditions, docs/lesson.md
the reason in words).

R is a constant: no gradient flows through it, although it depends on the weights. Over the model's
own answers the mean of rho is exact match's (Theorem 2), and so is the gradient of this mean, of
which a part goes through rho. With that part CER would be exact match in expectation. Without it,
CER moves probability to paraphrases of the reference, too.

In the code W has one row for each of the U distinct answers, since equal answers have equal rows,
and one column for each sample with a closed box. The file has four parts: Eq. 8; `rewards`, from
the sampled tokens of one question to R; W and P from a model; and what only Eq. 3 and the paper's
Table 3 need.

README.md says in which order to read. For another trainer copy this file and engine/tokens.py, and
leave a line such as "copied from REPOSITORY at COMMIT, MIT licence".
"""

import os
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.tokens import LOGITS_AT_ONCE, batches, pad, positions, split_answer, vocabulary

# ---------------------------------------------------------------------------------- the mathematics


def cer(log_W, log_P):
    """R = D^-1 W P from log W and log P (Eq. 8): log_W [..., U, N], log_P [..., N] -> R [..., U],
    for U answers and N solutions.

    D^-1 W divides each row of W by its sum, and W = exp(log_W), so D^-1 W is a softmax, which keeps
    the proportions of a row even where its entries are near exp(-1000) and exp would give 0 / 0.
    log_W = -inf masks a solution; a row in which all are masked gets reward 0.
    """
    all_masked = (log_W == -torch.inf).all(-1, keepdim=True)  # the softmax of such a row is nan
    posterior = log_W.softmax(-1).masked_fill(all_masked, 0.0)  # each row of W over its sum
    return (posterior * log_P.exp()[..., None, :]).sum(-1)


# ------------------------------------------------------------------------------------- one question


@dataclass(frozen=True)
class Scores:
    """W and P of one question (drawn in the paper's Fig. 2), from which its rewards come."""

    answers: list[str | None]  # N, a_i; None without a closed box
    references: list[str]  # K, the wordings of a*; one of them is enough
    distinct_answers: list[str]  # U, the rows of W
    columns: list[int]  # the samples with a closed box; their solutions are W's columns
    log_W: torch.Tensor  # [U, columns]; -inf if the solution is not among this answer's M
    log_references: torch.Tensor  # [K, columns], log pi(a*_k | s_j)

    @property
    def log_P(self):
        """log P [columns]. The event is that the answer is one of the references. Finished answers
        exclude each other, so their probabilities add up: P_j = sum_k pi(a*_k | s_j)."""
        return self.log_references.logsumexp(0)

    def R_of_samples(self):
        """R [N]. Without an answer, or with an empty box, which states none, it is 0."""
        reward_of = dict(zip(self.distinct_answers, cer(self.log_W, self.log_P).tolist()))
        return torch.tensor([reward_of[answer] if answer else 0.0 for answer in self.answers])

    def P_of_samples(self):
        """VeriFree's reward, P of each sample's own solution [N]. 0 without a closed box, since
        nothing says where the solution ends."""
        P = torch.zeros(len(self.answers))
        P[self.columns] = self.log_P.exp()
        return P

    def sample_references(self):
        """One reference for each column, drawn in proportion to its probability after the column's
        solution -> {sample: reference}."""
        drawn = torch.multinomial(self.log_references.softmax(0).T, 1)[:, 0].tolist()
        return dict(zip(self.columns, (self.references[k] for k in drawn)))


def score(model, tokenizer, prompt, completions, reference, M=None) -> Scores:
    """W and P of the N samples of one question -> Scores, fp32, on the CPU.

    prompt: a list of token ids. completions: N such lists, as they were sampled. reference: a
    string, or a list of strings, several wordings of which each is right. For each answer P is
    averaged over M of the solutions, or over all by default (see choose_solutions).

    model: in eval mode, see answer_logprobs. The samples must be its own, at temperature 1 without
    top-k or top-p, or they are no samples of pi(s|q). This is not checked, and otherwise R is
    wrong. Raises ValueError for inputs of another form.
    """
    references = [reference] if isinstance(reference, str) else reference
    check_inputs(prompt, completions, references, M)
    vocab = vocabulary(tokenizer)
    # Two texts that the tokenizer makes one (é has two codes in Unicode) are one reference. Counted
    # twice, P could exceed 1.
    references = list({tuple(vocab.encode(each)): each for each in references}.values())
    # A sample without a closed box has neither row nor column. If it opened a box that never
    # closed, this biases the other rewards, since its solution is missing (docs/theory.md).
    boxes = [vocab.locate_answer(ids) for ids in completions]
    columns = [j for j, box in enumerate(boxes) if box]
    contexts = [prompt + completions[j][: boxes[j].solution_length] for j in columns]
    distinct = list(dict.fromkeys(boxes[j].answer for j in columns))

    scored = list(dict.fromkeys([*distinct, *references]))  # each is scored once
    scores = answer_logprobs(model, tokenizer, contexts, scored).cpu()  # [len(scored), columns]
    log_W = scores[: len(distinct)]
    log_references = scores[[scored.index(each) for each in references]]
    if M is not None and M < len(columns):
        row_of = [distinct.index(boxes[j].answer) for j in columns]
        log_W = log_W.masked_fill(~choose_solutions(len(distinct), row_of, M), -torch.inf)
    answers = [box.answer if box else None for box in boxes]
    return Scores(answers, references, distinct, columns, log_W, log_references)


def rewards(model, tokenizer, prompt, completions, reference, M=None):
    """CER of the N samples of one question -> (R [N], Scores), for another trainer. The inputs are
    those of `score`. R is a constant."""
    # Padding would be read as a part of the context, except after a completion.
    padding = tokenizer.pad_token_id
    padded = any(ids[:2] == [padding] * 2 and {*ids} > {padding} for ids in (prompt, *completions))
    # A tokenizer may use one token for padding and for the beginning of a text.
    once = prompt[:1] == [padding] and padding != tokenizer.bos_token_id
    if padded or once or prompt[-1:] == [padding]:
        raise ValueError("prompt or completions are padded: pass them without padding")
    scores = score(model, tokenizer, prompt, completions, reference, M)
    return scores.R_of_samples(), scores


def check_inputs(prompt, completions, references, M):
    """Raise ValueError for what would give a wrong reward without an error."""
    lists = [prompt, *completions] if isinstance(completions, list) else [completions]
    if not all(isinstance(ids, list) and all(type(i) is int for i in ids) for ids in lists):
        raise ValueError("expected lists of token ids: .tolist(), or return_dict=False")
    if prompt and completions and all(ids[: len(prompt)] == prompt for ids in completions):
        raise ValueError("the completions begin with the prompt: pass ids[len(prompt):]")
    is_list = isinstance(references, (list, tuple)) and references
    if not is_list or not all(isinstance(each, str) for each in references):
        raise ValueError(f"the reference must be a string, or a list of some, got {references!r}")
    for each in references:  # each must come back whole from its own box
        if not each or split_answer(rf"\boxed{{{each}}}") != (len(r"\boxed"), each):
            raise ValueError(f"{each!r} is empty, holds a box, or has unmatched braces")
    if M is not None and M < 1:
        raise ValueError(f"M must be at least 1, got {M}")


# ----------------------------------------------------------------------------- W and P from a model

TOKENS_AT_ONCE = 4096  # of a batch of contexts, with the answers read after each; padded
ANSWER_TOKENS_AT_ONCE = 1024  # in one pass over answers, except when one answer is longer


@torch.no_grad()
def answer_logprobs(model, tokenizer, contexts: list[list[int]], answers: list[str]):
    r"""log pi("{answer}" | context) -> fp32 [len(answers), len(contexts)], on the model's device.

    contexts: token ids of question and solution, up to just before the brace of `\boxed{`.

    What is scored is a *finished* answer, with its closing brace. Without the brace "1" would
    collect the probability of "14", "15" and "10/3"; the sum over answers could exceed 1 and
    Theorem 2 would not hold. As in examples/one_file.py (log_pi), the probability is the sum over
    all ways to write the answer: a beginning t_1..t_i of its tokens, then one of the tokens that
    close the box there, in both of its spellings. Still rarer ways are left out, so the score is a
    lower bound (experiments/score_is_probability compares it with a model's samples).

    Cost: what a batch of contexts shares, such as the prompt, is read once. Then one forward pass
    keeps their keys and values, and usually one more reads all answers after each of them. A naive
    scorer runs len(contexts) x len(answers) full passes.

    model: a Hugging Face model in eval mode with sdpa attention over the whole context, whose
    logits are lm_head of the last hidden state (check_scoring compares it with plain passes).
    Raises ValueError for another implementation of attention than sdpa, training mode, an empty
    context, or an unsupported tokenizer.
    """
    model = unwrapped(model)
    if model.config._attn_implementation != "sdpa":
        raise ValueError('scoring needs a model with attn_implementation="sdpa"')
    if model.training:
        raise ValueError("scoring needs a model in eval mode: call model.eval()")
    if any(hasattr(p, "full_tensor") for p in model.parameters()):
        raise ValueError("scoring needs whole weights, not shards (FSDP): use a plain copy")
    if not all(contexts):
        raise ValueError("a context needs at least one token")
    vocab = vocabulary(tokenizer)
    ways = [(row, way) for row, answer in enumerate(answers) for way in spellings(vocab, answer)]
    # Usually one pass reads all answers. Its mask grows with the square of their tokens, so many or
    # long answers are split over several passes.
    passes = list(batches(ways, lambda pair: len(pair[1].tokens), ANSWER_TOKENS_AT_ONCE))
    # Contexts are batched beside the usual pass. One that reads a longer answer takes more memory.
    sizes = [sum(len(way.tokens) for _, way in read) for read in passes]
    longest = min(max(sizes, default=0), ANSWER_TOKENS_AT_ONCE)

    scores = torch.full((len(answers), len(contexts)), -torch.inf, device=model.device)
    every = range(len(contexts))
    for columns in batches(every, lambda j: len(contexts[j]) + longest, TOKENS_AT_ONCE):
        lengths, last, cache = read_contexts(model, [contexts[j] for j in columns])
        for read in passes:
            hidden = read_answers(model, [way.tokens for _, way in read], lengths, last, cache)
            for (row, way), states in zip(read, hidden):
                log_pi = log_finished(model.lm_head, states, way)  # [n]
                # After a context that leaves no room for it an answer is never written.
                log_pi[lengths + len(way.tokens) > positions(model)] = -torch.inf
                scores[row, columns] = scores[row, columns].logaddexp(log_pi)  # both spellings
    return scores


def unwrapped(model):
    """The Hugging Face model in DistributedDataParallel or PEFT. The modules are the same, adapters
    included."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class Spelling(NamedTuple):
    """One way in which the tokenizer spells an answer."""

    tokens: list[int]  # t_1..t_k
    closers: list[list[int]]  # for i = 0..k the tokens that close the box after t_1..t_i


def spellings(vocab, answer):
    r"""The ways in which the tokenizer spells "{answer}" -> one or two Spelling.

    Usually one. But the brace that closes the box can change the tokens before it: SmolLM2 ends
    \text{(C)} in `)}` if nothing follows, and in `)` and `}}` if the brace of the box does. Then
    both spellings count. A beginning that they share must count once, so the second has no closers
    there.
    """
    alone = vocab.encode("{" + answer)
    closed = vocab.encode("{" + answer + "}")[:-1]  # without the token that holds the brace
    finished = vocab.join(alone) + b"}"  # not answer.encode(): the tokenizer may normalise it
    counted = set()
    found = []
    for tokens in alone, closed:
        closers = []
        for i in range(len(tokens) + 1):
            beginning = tuple(tokens[:i])
            missing = finished[len(vocab.join(beginning)) :]
            closers.append([] if beginning in counted else vocab.beginning_with(missing))
            counted.add(beginning)
        if any(closers):
            found.append(Spelling(tokens, closers))
    return found


def read_contexts(model, contexts):
    """One pass over n contexts -> their lengths [n], the last hidden state of each, which predicts
    t_1 [n, H], and the cache of their keys and values."""
    n = len(contexts)
    # The contexts of a question begin with its prompt, which is read once. At least the last token
    # of each is left, because its state is needed.
    shared = len(os.path.commonprefix([context[:-1] for context in contexts])) if n > 1 else 0
    cache = None
    if shared:
        prompt = torch.tensor([contexts[0][:shared]], device=model.device)  # [1, shared]
        cache = model.base_model(input_ids=prompt, use_cache=True).past_key_values
        cache.batch_repeat_interleave(n)
    # No token attends to what is on its right, so padding on the right needs no mask.
    ids = pad([context[shared:] for context in contexts]).to(model.device)  # [n, C - shared]
    out = model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    lengths = torch.tensor([len(context) for context in contexts], device=model.device)
    last = out.last_hidden_state[torch.arange(n), lengths - 1 - shared]
    return lengths, last, out.past_key_values


def read_answers(model, token_lists, lengths, last, cache):
    r"""One pass over the answers (lists of token ids, T tokens in all) after each of n contexts,
    whose keys and values are in the cache -> for each answer t_1..t_k, one after the other, the
    last hidden states [n, k + 1, H]. That of the context, last [n, H], predicts t_1, that of t_1
    predicts t_2, and so on.

    The answers lie end to end in one row. A token attends to its context, and to its own answer up
    to itself. For the answers 14 and 9 after the context "so \boxed", the x of a line mark what its
    token attends to:

                 so \boxed    { 1 4    { 9
        {         x    x      x . .    . .
        1         x    x      x x .    . .
        4         x    x      x x x    . .
        {         x    x      . . .    x .
        9         x    x      . . .    x x

    The position ids of every answer start at the length of its context, as if there were neither
    padding nor other answers. lengths [n]: the lengths of the contexts, which are padded to C. The
    cache is left unchanged.
    """
    n, C = len(lengths), cache.get_seq_length()
    device = lengths.device
    sizes = [len(tokens) for tokens in token_lists]
    tokens = torch.tensor([t for tokens in token_lists for t in tokens], device=device)  # [T]
    answer_of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device)  # [T]
    # The position of each token within its answer  [T]
    depth = torch.cat([torch.arange(k, device=device) for k in sizes])
    in_context = torch.arange(C, device=device) < lengths[:, None]  # [n, C]
    in_answer = (answer_of[:, None] == answer_of) & (depth[:, None] >= depth)  # [T, T]
    T = len(tokens)
    mask = torch.cat([in_context[:, None].expand(n, T, C), in_answer.expand(n, T, T)], dim=2)
    hidden = model.base_model(
        input_ids=tokens.expand(n, T),
        attention_mask=mask[:, None],  # [n, 1, T, C + T]
        position_ids=lengths[:, None] + depth,  # [n, T]
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state  # [n, T, H]
    cache.crop(-T)  # drops the answers' T positions
    return (torch.cat([last[:, None], states], dim=1) for states in hidden.split(sizes, dim=1))


def log_finished(lm_head, states, spelling):
    """The sum over all ways to close the box within one spelling. states [n, k + 1, H]: the last
    hidden states after t_1..t_i, i = 0..k -> log pi [n]. Where a beginning has no closers (the
    other spelling has them), the logsumexp over none is -inf and adds nothing."""
    # Summed in fp64, so that hundreds of additions do not add up their rounding errors.
    log_ways = []  # for each i: log pi(t_1..t_i, then a closer)  [n]
    log_beginning = torch.zeros(len(states), dtype=torch.double, device=states.device)
    for i, logp in enumerate(next_token_logprobs(lm_head, states)):
        log_ways.append(log_beginning.float() + logp[:, spelling.closers[i]].logsumexp(1))
        if i < len(spelling.tokens):
            log_beginning = log_beginning + logp[:, spelling.tokens[i]]
    return torch.stack(log_ways).logsumexp(0)


def next_token_logprobs(lm_head, states):
    """states [n, k, H] -> one after the other, for each of the k positions, the log-probabilities
    of the next token [n, V]. The logits of some positions only are held at a time."""
    for part in states.split(max(1, LOGITS_AT_ONCE // len(states)), dim=1):
        yield from lm_head(part).float().log_softmax(-1).unbind(1)


@torch.no_grad()
def check_scoring(model, tokenizer):
    """Raise ValueError if answer_logprobs would be wrong for this model. It compares what scoring
    computes in parts (a cache, several answers in one row, lm_head) with plain forward passes."""
    model = unwrapped(model)
    vocab = vocabulary(tokenizer)
    contexts = [vocab.encode(text) for text in (r"so \boxed", r"that is why it must be \boxed")]
    answers = [vocab.encode(text) for text in ("{14 eggs", r"{\frac{1}{2}")]
    lengths, last, cache = read_contexts(model, contexts)
    errors = []
    for tokens, states in zip(answers, read_answers(model, answers, lengths, last, cache)):
        for context, in_parts in zip(contexts, model.lm_head(states)):
            ids = torch.tensor([context + tokens], device=model.device)
            logits = model(input_ids=ids).logits
            if not torch.equal(model.lm_head(model.base_model(ids).last_hidden_state), logits):
                raise ValueError("its logits are not lm_head of the last hidden state")
            whole = logits[0, -len(tokens) - 1 :].float().log_softmax(-1)
            errors.append((in_parts.float().log_softmax(-1) - whole).abs().mean())
    # In bf16 SmolLM2-135M, which is sound, was .06 off in the mean of the four pairs, and .11 in
    # one of them. Positions off by one made .29 with it, and .18 with a Qwen of 1.5B.
    if not torch.stack(errors).mean() < (0.1 if model.dtype == torch.bfloat16 else 1e-3):
        raise ValueError("scoring an answer in parts changes its probability")


# --------------------------------------------------------------------- Eq. 3, and M < N for Table 3


def exact_cer(prior, likelihood):
    """CER of every pair of answers on a finite distribution (Eq. 3).

    prior [S] = pi(s|q), likelihood [S, A] = pi(a|s,q) -> rho [A, A], rho[a, b] = rho(a, a* = b).
    An answer that no solution leads to has rho = 0. Training does not need it: the tests and the
    lesson compare the samples' R with it.
    """
    joint = prior[:, None] * likelihood  # pi(s, a | q)  [S, A]
    marginal = joint.sum(0)  # pi(a | q)  [A]
    posterior = torch.where(marginal > 0, joint / marginal, 0.0)  # pi(s | a, q)  [S, A]
    return posterior.T @ likelihood


def choose_solutions(U, row_of, M):
    """For each of U distinct answers the M solutions that its reward averages over -> bool [U,
    solutions]. row_of: for each solution which of the answers it produced, from 0 to U - 1.

    For each answer the solutions that produced it come first, then others at random. Eq. 8 leaves
    the choice open; this one is that of the authors' code. If all answers shared the same M
    solutions, M = 1 would give them all the same reward, and every advantage would be 0. With this
    choice M = 1 rewards an answer with P of a solution that produced it. For 1 < M < N the reward
    is biased (docs/theory.md), because which solutions are chosen depends on which answers they
    produced.
    """
    own = torch.arange(U)[:, None] == torch.tensor(row_of)  # [U, solutions]
    key = own + torch.rand(own.shape)  # in [1, 2) for own solutions, in [0, 1) for the others
    return torch.zeros_like(own).scatter(1, key.topk(M, dim=1).indices, True)
