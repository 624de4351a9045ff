"""Tokens as bytes: where a completion is cut into solution and answer, and which tokens close a
box. And lists of tokens as padded batches.

Token boundaries do not follow characters: `}` may be sampled as the token `}$`, and half of an
emoji may be one token. So answers are located and scored on bytes.
"""

import bisect
import functools

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.convert_slow_tokenizer import bytes_to_unicode

from data import require, split_answer


class Vocabulary:
    """The bytes of every token, and which tokens begin with given bytes. Special tokens have no
    bytes."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.bytes = token_bytes(tokenizer)  # id -> bytes
        self.order = sorted(range(len(self.bytes)), key=self.bytes.__getitem__)
        self.sorted = [self.bytes[i] for i in self.order]
        # A context ends just before the brace, and what is scored begins with it.
        for text in r"so \boxed", "{14":
            spelled = self.join(self.encode(text)) == text.encode()
            require(spelled, f"the tokenizer does not give {text!r} back: it cannot be scored")
        cut = self.locate_answer(self.encode(r"so \boxed{14}"))
        require(cut, "the tokenizer merges 'boxed' and '{': no answer can be cut out")

    def encode(self, text):
        """Text -> ids. A special token's name in the text is text, as it is in an answer. Where the
        tokenizer normalises (Qwen's composes accents), the normalised spelling is meant."""
        options = {"add_special_tokens": False, "split_special_tokens": True}
        return self.tokenizer.encode(text, **options)

    def join(self, ids):
        return b"".join(self.bytes[i] for i in ids)

    def beginning_with(self, prefix):
        """Ids of the tokens whose bytes begin with `prefix` (which ends in "}", so its last byte
        can be raised)."""
        low = bisect.bisect_left(self.sorted, prefix)
        high = bisect.bisect_left(self.sorted, prefix[:-1] + bytes([prefix[-1] + 1]))
        return self.order[low:high]

    def locate_answer(self, ids):
        r"""Sampled ids -> (cut, answer), or None. ids[:cut] is the solution: it ends just before
        the brace of the last closed \boxed{answer}. The ids are cut as sampled, never re-tokenised;
        if the brace lies inside a token, which is rare, there is no such cut and so no answer."""
        # latin-1 reads every byte as one character, so that offsets count bytes.
        found = split_answer(self.join(ids).decode("latin-1"))
        if found is None:
            return None
        brace, answer = found
        offset = 0
        for cut, i in enumerate(ids):
            if offset == brace and self.bytes[i]:
                return cut, answer.encode("latin-1").decode("utf-8", "replace")
            offset += len(self.bytes[i])
        return None


@functools.lru_cache(maxsize=8)
def vocabulary(tokenizer):
    return Vocabulary(tokenizer)


def token_bytes(tokenizer):
    """The bytes each token stands for, [len(tokenizer)]; b"" for special tokens and unused ids."""
    # As in Qwen, Llama 3 and most others, a token is written with one printable character a byte.
    byte_level = tokenizer.is_fast and "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)
    require(byte_level, "only byte-level tokenizers (with a tokenizer.json) are supported")
    byte = {character: b for b, character in bytes_to_unicode().items()}
    added, table = tokenizer.added_tokens_decoder, []
    for i, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
        if i in added:
            table.append(b"" if added[i].special else added[i].content.encode())
        else:
            table.append(bytes(byte[character] for character in token or ""))
    return table


# ------------------------------------------------------------------------------------------ batches


def pad(lists, side="right"):
    """Lists of numbers -> one tensor [len(lists), longest], filled with 0."""
    rows = [torch.tensor(numbers) for numbers in lists]
    return pad_sequence(rows, batch_first=True, padding_side=side)


def batches(lengths, budget):
    """Cut ascending lengths into runs whose padded size stays in the budget -> (start, end)."""
    start = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or (end + 1 - start) * lengths[end] > budget:
            yield start, end
            start = end
