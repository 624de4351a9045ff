"""What the sampler uses on a GPU, on a CPU: attention, which checks what torch's C++ checks, and a
CUDA graph, which records operations, leaves no trace, and repeats them on the same tensors."""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, enable_gqa, seqused_k):
    """torch's, for one query per row. Row b has seqused_k[b] keys from cu_k[b] on."""
    rows, heads, dim = q.shape
    assert dim % 8 == 0, "head_size should be a multiple of 8"
    for each, size in (cu_q, rows + 1), (cu_k, rows + 1), (seqused_k, rows):
        assert each.dtype == torch.int32 and each.is_contiguous() and each.shape == (size,)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and k.shape == v.shape
    assert enable_gqa and max_q == 1
    at = torch.arange(max_k)
    where, used = (cu_k[:-1, None] + at).clamp_max(len(k) - 1), at < seqused_k[:, None]
    keys, values = (x[where].transpose(1, 2).float() for x in (k, v))  # [rows, heads, max_k, dim]
    how = dict(attn_mask=used[:, None, None], scale=scale, enable_gqa=True)
    return F.scaled_dot_product_attention(q[:, :, None].float(), keys, values, **how)[:, :, 0].to(q)


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
