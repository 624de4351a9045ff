"""The trained model, and its copy. A run holds two copies of the model:

- The *policy* is trained. Its fp32 weights are sharded over the ranks by FSDP2, and it computes in
  the actor's type. At a learning rate of 1e-6 Adam would hardly ever change bf16 weights, since
  its steps are smaller than their rounding.
- The *actor* samples, scores, evaluates and is saved. It is a plain model on every rank, so
  that no rank waits for another to sample or score. It is copied from the policy once per step.

On a GPU both compute in bf16, on a CPU in fp32, unless --dtype says otherwise. In bf16 the actor's
weights, and those with which the policy computes, are the trained ones rounded to the nearest. So
that small changes arrive there, the trained ones begin where `spread` puts them. With --lora the
two copies are one: engine/lora.py.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from engine.tokens import LOGITS_AT_ONCE


def make_adam(policy):
    # Fused, since the others allocate a temporary as large as one moment, 4 bytes per parameter.
    fused = policy.device.type == "cuda"
    return torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=fused)


class Policy(torch.nn.Module):
    """The trained model, sharded over all ranks (even over one) by FSDP2, with fp32 shards and
    gradient sums. It computes in dtype. On GPUs it recomputes activations in the backward pass.

    model: a Hugging Face model on the CPU, in any precision. It becomes fp32 layer by layer, so
    that the host never holds all of it in fp32. cpu_offload keeps shards, gradients and Adam in
    CPU memory. Gradients are then moved there once per step, not after every micro-batch.
    rounding: "dither" spreads the weights if dtype is bf16, "nearest" leaves them as they are.
    """

    def __init__(self, model, cpu_offload=False, dtype=torch.float32, rounding="dither"):
        super().__init__()
        self.model = model.train()
        self.sync_every_batch = not cpu_offload
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else model.device
        # Without a mesh fully_shard would take the machine's accelerator, whatever the device is.
        options = {"mesh": dist.init_device_mesh(self.device.type, (dist.get_world_size(),))}
        if dtype != torch.float32:
            options["mp_policy"] = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
        if on_gpu:
            model.activation_checkpointing_enable()
        if cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
        for module in [*model.base_model.layers, self]:
            # Those of the layers are sharded already when it is the whole model's turn.
            for parameter in (p for p in module.parameters() if not isinstance(p, DTensor)):
                if parameter.dtype.itemsize < 4:
                    parameter.data = parameter.data.float()
                if rounding == "dither" and dtype == torch.bfloat16:
                    # Other numbers, as a run in fp32 saves them, lie between those of bf16 already.
                    is_bf16 = parameter.data == parameter.data.bfloat16()
                    parameter.data = torch.where(is_bf16, spread(parameter.data), parameter.data)
            fully_shard(module, **options)

    def forward(self, ids, at):
        """ids [b, L], padded on the right; at [b, L], bool, False in the first column
        -> log pi(ids[at] | all ids before it) [number of Trues], fp32.

        Causal attention sees nothing to the right, so right-padded rows need no mask.
        """
        return completion_logprobs(self.model, ids, at)

    @torch.no_grad()
    def copy_weights(self, actor):
        """Copy all weights to the actor. To gather them in its type, if that is bf16, halves the
        bytes."""
        for copy, trained in zip(actor.parameters(), self.parameters(), strict=True):
            copy.copy_(trained.to(copy.dtype).full_tensor())

    def save_adapter(self, directory):
        """With --lora a checkpoint holds an adapter as well. Here nothing is to be saved."""


def spread(W):
    """Move each weight within the interval of numbers that round to the same bf16 number, to a
    place that is fixed for the weight -> fp32, of the same shape. Places are evenly spread. So a
    change of all weights by a tenth of the interval moves every tenth to the next bf16 number, and
    the rounded weights change as much as the exact ones, in the mean.

    Without this a step is rounded away. The weights of a released model are bf16 numbers, each in
    the middle of its interval. A step of Adam moves a weight by about the learning rate, 1e-6, and
    a weight of .02 has 6e-5 to the end of its interval.

    bf16 is the upper half of fp32, and rounding looks at the lower half. Of the numbers that round
    to x, the lower halves go from -2^15 to 2^15, if they are counted from the bits of x.
    """
    # Multiples of the golden ratio, modulo 1, are evenly spread, and neighbours are far apart.
    index = torch.arange(W.numel(), dtype=torch.int32, device=W.device).view_as(W)
    place = (index * -1640531527 >> 16) & 0xFFFF  # 2^32 / 1.618, as a number of 32 bits
    moved = (W.contiguous().view(torch.int32) + place.clamp_min(1) - 2**15).view(torch.float32)
    return torch.where(W.abs() < 1e-37, W, moved)  # the bits of 0 have nothing below them


def completion_logprobs(model, ids, at):
    """What Policy.forward computes, for a Hugging Face model."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    # The state at position t - 1 predicts the token at t.
    return token_logprobs(hidden[:, :-1][at[:, 1:]], model.lm_head, ids[at])


def token_logprobs(hidden, lm_head, targets, chunk=LOGITS_AT_ONCE):
    """log softmax(lm_head(hidden))[targets], hidden [n, D], targets [n] -> [n], fp32.

    Only the logits of one chunk of tokens are held at a time. They are recomputed in the backward
    pass. The logits of one row of 4,096 tokens over a vocabulary of 151,936 would take 2.3 GiB in
    fp32, and their gradient as much again.
    """

    def of_chunk(h, y):
        logits = lm_head(h)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # fp64 stays fp64
        return -F.cross_entropy(logits, y, reduction="none")

    chunks = zip(hidden.split(chunk), targets.split(chunk))
    return torch.cat([checkpoint(of_chunk, h, y, use_reentrant=False) for h, y in chunks])


@contextlib.contextmanager
def moments_on_host(adam, wanted=True):
    """Hold Adam's moments, 8 bytes per parameter, in CPU memory, to make room on a GPU for the keys
    and values of samples. The tensors that Adam holds stay the same objects. Only their memory is
    given back and taken again."""
    states = adam.state.values() if wanted else []
    moments = [state[name].to_local() for state in states for name in ("exp_avg", "exp_avg_sq")]
    sizes = [moment.numel() for moment in moments]
    if moments and not hasattr(adam, "on_host"):
        # Pinned memory is slow to make, so it is kept. It comes in powers of two, so it is one.
        adam.on_host = torch.empty(sum(sizes), pin_memory=moments[0].is_cuda)
    copies = adam.on_host.split(sizes) if moments else []
    for moment, copy in zip(moments, copies):
        copy.copy_(moment.flatten())
        moment.untyped_storage().resize_(0)
    yield
    for moment, copy in zip(moments, copies):
        moment.untyped_storage().resize_(copy.nbytes)
        moment.copy_(copy.view_as(moment))
