r"""Tokens as bytes: cut a completion into solution and answer, and find the tokens that close a
box. Also pad and batch lists of token ids.

Token boundaries do not follow characters: `}` may be sampled as the token `}$`, and half of an
emoji may be one token. So answers are located and scored on bytes.

This file needs torch and transformers only, so that it can be copied together with cer.py (leave a
line such as "copied from REPOSITORY at COMMIT, MIT licence").
"""

import bisect
import functools
import itertools
import re
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.convert_slow_tokenizer import bytes_to_unicode

LOGITS_AT_ONCE = 1024  # tokens whose logits are held at a time: 0.6 GB in fp32 with Qwen3


# ------------------------------------------------------------------------------------------ the box


def split_answer(text: str) -> tuple[int, str] | None:
    r"""The last closed \boxed{...} of a text -> (offset of the brace that opens it, answer), or
    None.

    >>> split_answer(r"so \boxed{\frac{1}{2}}.")
    (9, '\\frac{1}{2}')

    Braces nest. An escaped brace (`\{`, `\}`) is a symbol and neither opens nor closes. A box that
    is never closed is skipped in favour of an earlier one. The answer is not stripped, so " 14 " is
    not "14".
    """
    last = None
    opened = []  # the braces not yet closed, as (offset, whether it opens a box)
    for brace in BRACES.finditer(text):
        if brace[0] == "}":
            offset, is_box = opened.pop() if opened else (0, False)
            if is_box and (last is None or offset > last[0]):
                last = offset, text[offset + 1 : brace.start()]
        elif brace[0].endswith("{") and brace[0] != r"\{":
            opened.append((brace.end() - 1, brace[0] != "{"))
    return last


# A box, any other escape (which must not consume the backslash of a box), or a plain brace.
BRACES = re.compile(r"\\boxed\{|\\(?!\\boxed\{).|[{}]", re.DOTALL)


class Box(NamedTuple):
    """The last closed box of a completion, in its sampled token ids."""

    solution_length: int  # ids[:solution_length] is the solution; it ends just before the brace
    answer: str
    closing: str  # "}" and the rest of the token that holds it, such as "}.\n"
    answer_length: int = 0  # sampled tokens that hold a part of the answer


# ----------------------------------------------------------------------------------- the vocabulary


class Vocabulary:
    """The bytes of every token, and which tokens begin with given bytes. Special tokens have no
    bytes. Raises ValueError if answers cannot be cut out or scored with this tokenizer."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.bytes = token_bytes(tokenizer)  # id -> bytes
        self.order = sorted(range(len(self.bytes)), key=self.bytes.__getitem__)
        self.sorted = [self.bytes[i] for i in self.order]
        # A context ends just before the brace, and the scored text begins with it.
        for text in r"so \boxed", "{14":
            if self.join(self.encode(text)) != text.encode():
                raise ValueError(f"the tokenizer changes {text!r} and is not supported")
        if not self.locate_answer(self.encode(r"so \boxed{14}")):
            raise ValueError("the tokenizer merges 'boxed' and '{', so no answer can be cut out")

    def encode(self, text):
        """Text -> ids. The name of a special token is encoded as ordinary text. Some tokenizers
        normalise the text first (Qwen's composes accents)."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def join(self, ids):
        """Ids -> the bytes that they spell."""
        return b"".join(self.bytes[i] for i in ids)

    def beginning_with(self, prefix):
        """The ids of all tokens whose bytes begin with `prefix` -> list, possibly empty. In byte
        order they lie between the prefix and the same prefix with its last byte, a "}", raised by
        one to "~"."""
        low = bisect.bisect_left(self.sorted, prefix)
        high = bisect.bisect_left(self.sorted, prefix[:-1] + bytes([prefix[-1] + 1]))
        return self.order[low:high]

    def locate_answer(self, ids):
        """The last closed box of a completion's sampled ids -> Box, or None without one.

        The ids are cut as they were sampled and never tokenised again. The result is also None in
        two rare cases: the opening brace is not the first byte of its token, so that the ids cannot
        be cut there, or the answer is not UTF-8. Raises ValueError for ids that the tokenizer does
        not have."""
        if not all(0 <= i < len(self.bytes) for i in ids):
            raise ValueError(f"a token id is not in the tokenizer's range of {len(self.bytes)}")
        # latin-1 reads every byte as one character, so that offsets count bytes.
        box = split_answer(self.join(ids).decode("latin-1"))
        if box is None:
            return None
        opening, answer = box[0], box[1].encode("latin-1")
        closing = opening + 1 + len(answer)  # the offset of the brace that closes the box
        ends = list(itertools.accumulate(len(self.bytes[i]) for i in ids))  # of each token
        if opening not in ends:  # no token ends where the brace begins
            return None
        opening_token = bisect.bisect_right(ends, opening)
        closing_token = bisect.bisect_right(ends, closing)
        rest = self.bytes[ids[closing_token]][closing - ends[closing_token] :]
        length = 1 + bisect.bisect_left(ends, closing) - bisect.bisect_right(ends, opening + 1)
        try:
            answer = answer.decode("utf-8")
        except UnicodeDecodeError:  # half a character is no text
            return None
        return Box(opening_token, answer, rest.decode("utf-8", "replace"), length)


def vocabulary(tokenizer):
    """The Vocabulary of a tokenizer, made once, and again after tokenizer.add_tokens."""
    return cached_vocabulary(tokenizer, len(tokenizer))


@functools.lru_cache(maxsize=8)
def cached_vocabulary(tokenizer, size):
    return Vocabulary(tokenizer)


def token_bytes(tokenizer):
    """The bytes of each token, by id up to the largest; b"" for special tokens and unused ids."""
    # As in Qwen, Llama 3 and most others, each byte of a token is stored as a printable character.
    if not (tokenizer.is_fast and "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)):
        raise ValueError("only byte-level tokenizers (with a tokenizer.json) are supported")
    byte = {character: b for b, character in bytes_to_unicode().items()}
    added, table = tokenizer.added_tokens_decoder, []
    ids = range(1 + max(tokenizer.get_vocab().values()))  # len(tokenizer) is less if there are gaps
    for i, token in enumerate(tokenizer.convert_ids_to_tokens(ids)):
        if i in added:
            table.append(b"" if added[i].special else added[i].content.encode())
        else:
            table.append(bytes(byte[character] for character in token or ""))
    return table


# ------------------------------------------------------------------------------------------ batches


def pad(lists, side="right", value=0):
    """Lists of numbers -> one tensor [len(lists), longest], filled with value."""
    rows = [torch.tensor(numbers) for numbers in lists]
    return pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)


def batches(items, size, budget):
    """Split items, smallest first, into lists whose padded size (how many x the largest) stays
    within the budget. size: item -> number. An item over the budget gets a list of its own."""
    batch = []
    for item in sorted(items, key=size):
        if batch and (len(batch) + 1) * size(item) > budget:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def positions(model):
    """How many tokens a row may have."""
    return getattr(model.config, "max_position_embeddings", None) or float("inf")
