"""The specification of scoring, which cer.py and examples/one_file.py have to meet: a full forward
pass for every pair of an answer and a context, with neither cache nor padding, and a search of the
whole vocabulary for the tokens that close a box. Nothing here is fast."""

import functools

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode


def log_probs(model, ids):
    """One forward pass -> [len(ids), V]. Row t is log pi of what comes after ids[t]."""
    return model(torch.tensor([ids], device=model.device)).logits[0].log_softmax(-1)


def completion_logprobs(model, prompt, ids):
    """log pi of each token of a completion -> [len(ids)]."""
    return log_probs(model, prompt + ids)[len(prompt) - 1 : -1][range(len(ids)), ids]


@functools.cache
def token_bytes(tokenizer):
    byte = {character: number for number, character in bytes_to_unicode().items()}
    tokens = tokenizer.convert_ids_to_tokens(range(1 + max(tokenizer.get_vocab().values())))
    special = tokenizer.all_special_tokens
    return [b"" if token in special else bytes(byte[c] for c in token or "") for token in tokens]


@functools.cache
def closers(tokenizer, rest):
    """All tokens that finish an answer of which these bytes are left, the closing brace included.
    Any text may follow the brace within the token."""
    return [v for v, piece in enumerate(token_bytes(tokenizer)) if piece.startswith(rest)]


@torch.no_grad()
def log_pi(model, tokenizer, context, answer):
    """log pi("{answer}" | context), over all ways to close the box in both spellings. The docstring
    of log_pi in one_file.py explains them."""
    finished = f"{{{answer}}}".encode()
    without_brace = tokenizer.encode("{" + answer, add_special_tokens=False)
    with_brace = tokenizer.encode("{" + answer + "}", add_special_tokens=False)
    ways = {}  # beginning -> log pi of the beginning and of a token that closes the box after it
    for tokens in {tuple(without_brace), tuple(with_brace[:-1])}:  # [-1] holds the closing brace
        logp = log_probs(model, [*context, *tokens])[len(context) - 1 :]  # row i: after t_1..t_i
        for i in range(len(tokens) + 1):
            beginning = tokens[:i]
            rest = finished[sum(len(token_bytes(tokenizer)[t]) for t in beginning) :]
            log_beginning = logp[range(i), beginning].sum()  # 0 for the empty beginning
            ways[beginning] = log_beginning + logp[i, closers(tokenizer, rest)].logsumexp(0)
    return torch.stack(list(ways.values())).logsumexp(0)
