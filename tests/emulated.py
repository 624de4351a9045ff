"""What the sampler uses on a GPU, on a CPU: the flash op, which checks what torch's C++ checks, and
a CUDA graph, which records operations, leaves no trace, and repeats them on the same tensors."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def flash(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None, seqused_k=None, **_
):
    """mha_varlen_fwd of flash_api.cpp for one query per row. Row b has seqused_k[b] keys from
    cu_k[b] on."""
    rows, heads, dim = q.shape
    assert dim % 8 == 0, "head_size should be a multiple of 8"
    for each, size in (cu_q, rows + 1), (cu_k, rows + 1), (seqused_k, rows):
        assert each.dtype == torch.int32 and each.is_contiguous() and each.shape == (size,)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and k.shape == v.shape
    assert max_q == 1 and 1 <= int(seqused_k.min()) and int(seqused_k.max()) <= max_k
    out, groups = torch.empty_like(q), heads // k.shape[1]
    for b, (start, used) in enumerate(zip(cu_k.tolist(), seqused_k.tolist())):
        keys, values = (x[start : start + used].float() for x in (k, v))
        grouped = q[b].float().view(-1, groups, dim)
        p = (torch.einsum("hgd,nhd->hgn", grouped, keys) * (scale or dim**-0.5)).softmax(-1)
        out[b] = torch.einsum("hgn,nhd->hgd", p, values).reshape(heads, dim)
    nothing = q.new_empty(0)
    return out, nothing, nothing, nothing, nothing


class Record(TorchDispatchMode):
    WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal"}  # for the GPU

    def __init__(self):
        super().__init__()
        self.done, self.before, self.made = [], {}, set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name.removeprefix("aten::")
        if name in self.WAITS:
            raise RuntimeError(f"{name}: not permitted when stream is capturing")
        for argument, tensor in zip(op._schema.arguments, args):
            if argument.alias_info and argument.alias_info.is_write:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.made:
                    self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = op(*args, **(kwargs or {}))
        given, new = (tensors(x) for x in ((args, kwargs), out))
        self.made |= {t.untyped_storage().data_ptr() for t in new} - {
            t.untyped_storage().data_ptr() for t in given
        }
        self.done.append((op, args, kwargs or {}, out))
        return out


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def as_graph(step):
    record, seed = Record(), torch.get_rng_state()
    with record:
        step()
    torch.set_rng_state(seed)
    for storage, before in record.before.values():
        storage.copy_(before)

    def replay():
        for op, args, kwargs, out in record.done:
            for old, new in zip(tensors(out), tensors(op(*args, **kwargs))):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    return replay
