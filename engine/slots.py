"""Another sampler, for GPUs: rows of all lengths are decoded together, and rows that end make room
for others. Attention reads no padding, and a decode step is one CUDA graph. load.choose_sampler
decides whether a model is sampled here or with Hugging Face's generate().
"""

import torch
import torch.nn.functional as F
import transformers as hf

from engine.memory import READ_AT_ONCE, ROWS_AT_ONCE, tokens_that_fit
from engine.tokens import batches, pad
from runtime.cli import as_input_error, require


@torch.no_grad()
def sample_pieces(model, rows, stops, bar, piece=128, **settings):
    """As engine.sampling.generate_pieces.

    All rows go on for a piece of tokens. Then those that have ended leave, and the longest of the
    others go on, as many as fit into memory. The shortest rows wait, and their prefill is repeated
    later. The longest row never waits, because in the end all others would wait for it.
    """
    sample_token = token_sampler(**settings)
    sizes = [len(row.ids) + row.room for row in rows]
    smallest = min((len(row.ids) + min(row.room, piece) for row in rows), default=1)
    fit = tokens_that_fit(model, len(rows), smallest)
    slots = Slots(model, max(min(sum(sizes), fit), *sizes, 0))
    hf.AttentionInterface.register("slots", attend)
    model.set_attn_implementation("slots")
    try:
        while unfinished := [row for row in rows if row.room > 0]:
            batch = slots.seat(unfinished, piece)
            more = min(piece, max(row.room for row in batch))
            yield batch, *decode(slots, batch, more, stops, sample_token, bar)
    finally:
        model.set_attn_implementation("sdpa")
    del slots  # and with it the keys and values
    torch.cuda.empty_cache()  # otherwise the memory of the last graph stays reserved


def token_sampler(temperature=1.0, top_p=1.0, top_k=0):
    """-> a function that samples a token from each row of logits: see sampling.sampling_config."""
    if temperature <= 1e-4:
        return lambda logits: logits.argmax(-1)
    change = [hf.TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    change += [hf.TopKLogitsWarper(top_k)] if top_k else []
    change += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []

    def sample_token(logits):
        p = hf.LogitsProcessorList(change)(None, logits).softmax(-1)
        return (p / torch.empty_like(p).exponential_()).argmax(-1)  # as torch.multinomial does

    return sample_token


# -------------------------------------------------------------------------------- a piece of tokens


def decode(slots, batch, steps, stops, sample_token, bar):
    """Sample so many more tokens of each row -> these, and their entropies. A step reads the last
    token of each. A row that has ended is carried along, without its keys, until the piece ends."""
    model, device = slots.model, slots.model.device
    last = [(row.ids[-1], len(row.ids) - 1, len(row.ids) - 1 + row.room) for row in batch]
    token, length, limit = torch.tensor(last, device=device).T.contiguous()
    stop = torch.tensor(list(stops), device=device)
    now = torch.zeros_like(token[:1])
    tokens = token.new_zeros(steps, len(batch))
    entropies = torch.zeros(steps, len(batch), device=device)
    ended = torch.zeros_like(token, dtype=torch.bool)

    def step():
        slots.next(length, ~ended)
        logits = slots.read(model, token[:, None], length[:, None], logits_to_keep=1).logits
        logits = logits[:, -1].float()
        logits[:, model.tokenizer_size :].fill_(-torch.inf)  # these ids spell nothing
        entropies.index_copy_(0, now, torch.special.entr(logits.softmax(-1)).sum(-1)[None])
        token.copy_(sample_token(logits))
        tokens.index_copy_(0, now, token[None])
        length.add_(1)
        ended.logical_or_((token[:, None] == stop).any(1) | (length >= limit))
        now.add_(1)

    for done in range(steps):
        if done % 16 == 0 and ended.all():  # more often would only wait for the GPU
            break
        step()
        bar.update(len(batch))
        if done == 0 and steps > 8:
            with as_input_error("engine/slots.py fails with this model: use --sampler generate"):
                step = as_graph(step)
    require(entropies.isfinite().all(), "the model's logits are not finite")
    return tokens.T.tolist(), entropies.T.tolist()


def as_graph(step):
    """Record the kernels that step() launches -> a function that launches them all at once. Python
    and 1,200 launches take longer than the kernels. An error in here leaves torch unusable."""
    graph = torch.cuda.CUDAGraph()
    # Another thread, such as NCCL's, may go on using the GPU.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()  # computes nothing now
    return graph.replay


# ------------------------------------------------------------------------------- keys and attention


class Slots:
    """A cache of keys and values without padding. Each layer has one long tensor of keys and one of
    values (`lines`), in which each row owns a stretch. Finished rows write to token 0.

    The order of calls: `seat` once for each piece of tokens, then for each token `next` and a pass
    of the model, in which every layer calls `update` and `attend`. While `seat` reads prompts,
    `used` is None: then a row attends to what is in the same pass. Otherwise a row attends to the
    first `used` tokens of its stretch."""

    def __init__(self, model, tokens):
        self.model, self.tokens, self.lines, self.starts = model, 1 + tokens, [], {}

    def seat(self, rows, piece):
        """Give the longest rows, as many as fit, a stretch with room for another piece. Read what
        is not there yet, all but the last token, and equal rows once -> the rows, shortest first.
        """
        before, self.starts, end = self.starts, {}, 1  # row -> where its stretch begins
        kept, new, copies = [], {}, []
        for row in sorted(rows, key=lambda row: len(row.ids))[::-1]:
            size, start = len(row.ids) + min(piece, row.room), end
            if end + size <= self.tokens and len(self.starts) < ROWS_AT_ONCE:
                self.starts[row], end = start, end + size
                if row in before:
                    kept.append((before[row], start, len(row.ids) - 1))
                elif (first := new.setdefault(tuple(row.ids), row)) is not row:
                    copies.append((self.starts[first], start, len(row.ids) - 1))
        self.copy([stretch for stretch in kept if stretch[0] != stretch[1]])
        unread = [row for row in new.values() if len(row.ids) > 1]
        for part in batches(unread, lambda row: len(row.ids), READ_AT_ONCE):
            ids = pad([row.ids[:-1] for row in part])  # causal attention does not see the padding
            at = pad([range(self.starts[row], self.starts[row] + len(row.ids) - 1) for row in part])
            self.at, self.used = self.here(at.flatten()), None
            where = self.here(torch.arange(ids.shape[1])[None])
            self.read(self.model.base_model, self.here(ids), where)
        self.copy(copies)
        batch = [*self.starts][::-1]
        self.start = self.here(torch.tensor([self.starts[row] for row in batch]).int())
        self.rows = self.here(torch.arange(len(batch) + 1).int())
        self.longest = len(batch[-1].ids) + piece
        return batch

    def here(self, tensor):
        return tensor.to(self.model.device)

    def copy(self, stretches):
        """Copy stretches, each (from, to, tokens), of all lines."""
        places = [torch.tensor([[old], [new]]) + torch.arange(n) for old, new, n in stretches]
        if places:
            old, new = self.here(torch.cat(places, 1))
            for line in sum(self.lines, []):
                line[new] = line[old]

    def next(self, length, alive):
        """Each row reads one token, after `length` others. A row that has ended reads token 0."""
        start, length = self.start * alive, length * alive
        self.at, self.used, self.begin = start + length, length.int() + 1, F.pad(start, (0, 1))

    def read(self, model, ids, at, **options):
        """What a model says of ids [rows, n] at these positions."""
        inputs = dict(input_ids=ids, position_ids=at, past_key_values=self, slots=self)
        return model(**inputs, **options)

    def update(self, keys, values, layer, *_):
        """Every layer calls this with new keys and values [rows, heads, n, dim] -> what it attends
        to: the same, where rows are read from their beginning, else its lines."""
        new = [each.transpose(1, 2).flatten(0, 1) for each in (keys, values)]
        if layer == len(self.lines):
            self.lines.append([each.new_zeros(self.tokens, *each.shape[1:]) for each in new])
        for line, each in zip(self.lines[layer], new):
            line[self.at] = each
        return (keys, values) if self.used is None else self.lines[layer]


def attend(module, query, keys, values, mask, *, slots, scaling=None, **rest):
    """The model's attention while it samples. query [rows, heads, n, dim] -> [rows, n, heads, dim].
    Grouped queries share their keys, which are not repeated."""
    if rest.get("softcap") or rest.get("s_aux") is not None:
        raise ValueError("its attention has soft caps or sinks")
    if slots.used is None:
        options = dict(is_causal=True, scale=scaling, enable_gqa=True)
        return F.scaled_dot_product_attention(query, keys, values, **options).transpose(1, 2), None
    # One query for each row, against the stretch of keys that begins at slots.begin and of which
    # slots.used are there. This op is torch's own FlashAttention, from 2.10 on. From 2.13 on the
    # public torch.nn.attention.varlen.varlen_attn can do the same. The arguments after the lengths
    # are dropout, is_causal and return_debug_mask, and the first of five results is the attention.
    attention, *_ = torch.ops.aten._flash_attention_forward(
        *(query[:, :, 0], keys, values, slots.rows, slots.begin, 1, slots.longest),
        *(0.0, False, False),
        scale=scaling,
        seqused_k=slots.used,
    )
    return attention[:, None], None
