"""Sample completions of prompts with Hugging Face's generate(), or, where load.choose_sampler has
found a model fit for it, with engine/slots.py."""

import torch
from transformers import GenerationConfig, StaticCache

from engine.memory import bytes_that_fit, row_bytes
from engine.tokens import batches, pad, positions
from runtime.cli import progress


def sampling_config(temperature=1.0, top_p=1.0, top_k=0, **settings):
    """The defaults are the model's own distribution. temperature=0 is greedy, top_k=0 keeps all.
    generate() adds the model's stop tokens, unless settings have others."""
    if temperature > 1e-4:  # below, logits / temperature would overflow, and sampling is greedy
        settings |= dict(do_sample=True, temperature=temperature, top_p=top_p, top_k=top_k)
    return GenerationConfig(**settings)


def generate(model, prompts, max_new_tokens, name="sample", stops=None, **settings):
    """Sample a completion of each prompt (a list of ids) -> (lists of ids, each up to and including
    its first stop token; for each the mean entropy of the next token under the model, in nats).
    A completion ends early where the model has no more positions, and is empty where the prompt
    leaves none. name: of the progress bar. stops: in place of the model's stop tokens. settings:
    see sampling_config; and piece, see below.

    Rows grow by a piece of some hundred tokens, so that those that have ended make room for others.
    Who samples a piece is generate_pieces, or slots.sample_pieces if choose_sampler has set it.

    Another sampler would replace this function. It gets its weights where copy_weights sets the
    actor's, and its seed where seed_everything sets torch's. It may return no entropies ([]).
    """
    most = positions(model)
    rows = [Row(prompt, max(0, min(max_new_tokens, most - len(prompt)))) for prompt in prompts]
    stops = model.generation_config.eos_token_id if stops is None else stops
    bar = progress(name, unit=" tokens", unit_scale=True)
    sample_pieces = getattr(model, "sample_pieces", None) or generate_pieces
    for batch, sampled, entropies in sample_pieces(model, rows, stops, bar, **settings):
        for row, ids, of_tokens in zip(batch, sampled, entropies):
            row.take(ids, of_tokens, stops)
        finished = sum(row.room == 0 for row in rows)
        bar.set_description_str(f"{name}: {finished}/{len(rows)} samples finished", refresh=False)
    bar.close()
    completions = [row.ids[len(prompt) :] for row, prompt in zip(rows, prompts)]
    return completions, [row.entropy / max(1, len(ids)) for row, ids in zip(rows, completions)]


class Row:
    """A sample while it grows: ids, the prompt and what was sampled so far; room, how many more
    tokens it may get (0 if it is finished); entropy, the sum over the sampled tokens."""

    def __init__(self, prompt, room):
        self.ids, self.room, self.entropy = list(prompt), room, 0.0

    def take(self, ids, entropies, stops):
        """Append sampled tokens, up to the first stop token and as many as there is room for."""
        for token, entropy in zip(ids, entropies):
            if self.room > 0:
                self.ids.append(token)
                self.entropy += entropy
                self.room = 0 if token in stops else self.room - 1


def generate_pieces(model, rows, stops, bar, piece=512, **settings):
    """Sample with Hugging Face's generate() -> for each piece the rows that have grown, their new
    tokens and the entropies of these. The rows of a piece are the shortest unfinished ones, as many
    as fit in memory. They are read again. This costs one forward pass, but no KV cache is kept."""
    budget, settings = bytes_that_fit(model), settings | {"eos_token_id": stops}
    while unfinished := [row for row in rows if row.room > 0]:
        batch = next(batches(unfinished, lambda row: row_bytes(model, len(row.ids), piece), budget))
        more = min(piece, max(row.room for row in batch))
        yield batch, *extend(model, [row.ids for row in batch], more, bar, settings)


@torch.no_grad()
def extend(model, so_far, tokens, bar, settings):
    """Sample up to so many more tokens of each list of ids -> their ids, and for each token the
    entropy of the model's distribution. Whatever follows a stop token is padding."""
    ids = pad(so_far, side="left").to(model.device)  # on the left, so that all end in one column
    mask = pad([[1] * len(row) for row in so_far], side="left").to(model.device)
    entropies = []  # of each step [rows], in nats

    def each_step(_, logits):  # before a token is drawn
        # generate()'s own suppress_tokens takes a list, and sorts the vocabulary at every step.
        logits[:, model.tokenizer_size :] = -torch.inf  # these ids spell nothing
        entropies.append(torch.special.entr(logits.float().softmax(-1)).sum(-1))
        bar.update(len(logits))
        return logits

    # A static cache is written in place. The default one is copied whole at every token. Compiled,
    # transformers (5.23) would repeat the keys of grouped queries for all heads.
    cache = StaticCache(model.config, max_cache_len=ids.shape[1] + tokens)
    read_once(model, so_far, ids, mask, cache)
    settings = settings | {"max_new_tokens": tokens, "disable_compile": True}
    longer = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        generation_config=sampling_config(**settings),
        logits_processor=[each_step],
    )
    return longer[:, ids.shape[1] :].tolist(), torch.stack(entropies, 1).tolist()


def read_once(model, so_far, ids, mask, cache):
    """Fill the cache with all columns but the last, which generate() reads, where rows are equal,
    as the N prompts of a question are: each different row is read once, and then copied."""
    rows = [tuple(row) for row in so_far]
    different = list(dict.fromkeys(rows))
    if len(different) == len(rows):
        return  # generate() reads them
    first = [rows.index(row) for row in different]
    model.base_model(
        input_ids=ids[first, :-1],
        attention_mask=mask[first, :-1],
        position_ids=(mask[first, :-1].cumsum(1) - 1).clamp_min(0),
        past_key_values=cache,
        use_cache=True,
    )
    copies = [different.index(row) for row in rows]
    cache.reorder_cache(torch.tensor(copies, device=model.device))
