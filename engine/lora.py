"""LoRA: one copy of the model, in which a small change of each layer is trained.

Every linear layer in the actor's layers holds W = W0 + s B A, in the actor's type. W0 [out, in] is
what was loaded, and lies in CPU memory. A [rank, in] and B [out, rank] are trained, in fp32. All
else is frozen. So the actor stays a plain model, which samples, scores, is evaluated and saved like
any other. It is also the policy: the W with which a sample was drawn is the W of its gradient.

Only the backward pass knows of A and B. Let G [tokens, out] be the gradient of the loss by the
layer's output y = x W^T. The gradient by W would be G^T x. It is never made, because by the chain
rule

    dA = s B^T (G^T x) = (G s B)^T x        dB = s (G^T x) A^T = G^T (x s A^T)
"""

import functools
import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch.distributed.fsdp import fully_shard

from engine.memory import linear_layers
from engine.policy import completion_logprobs, spread
from runtime.cli import is_rank_0

ALPHA = 32  # s = ALPHA / rank; with it all ranks want about the same learning rate


class LoraPolicy(torch.nn.Module):
    """The actor as the policy: see engine.policy.Policy. The parameters of this module are all A
    and B, sharded by FSDP2, which sums their gradients over the ranks. The actor is whole on each
    rank. It is held in a tuple, since torch takes each module that is an attribute for a part of
    this one."""

    sync_every_batch = True

    def __init__(self, actor, rank, rounding, seed):
        super().__init__()
        self.held = (actor.requires_grad_(False),)
        self.device, self.layers = actor.device, linear_layers(actor, rank)
        self.dither = rounding == "dither" and actor.dtype == torch.bfloat16
        self.W0 = [layer.weight.to("cpu", copy=True) for layer in self.layers.values()]
        self.A, self.B = torch.nn.ParameterList(), torch.nn.ParameterList()
        generator = torch.Generator().manual_seed(seed % 2**63)  # the same A on all ranks
        for k, layer in enumerate(self.layers.values()):
            A = 2 * torch.rand(rank, layer.in_features, generator=generator) - 1
            self.A.append(A.to(self.device) / layer.in_features**0.5)
            self.B.append(torch.zeros(layer.out_features, rank, device=self.device))
            layer.register_forward_hook(functools.partial(self.attach, k))
        if self.device.type == "cuda":
            actor.activation_checkpointing_enable()
        fully_shard(self, mesh=dist.init_device_mesh(self.device.type, (dist.get_world_size(),)))

    def forward(self, ids, at):
        [actor] = self.held
        actor.train()  # in eval mode the library would not recompute activations
        logprobs = completion_logprobs(actor, ids, at)
        actor.eval()
        return logprobs

    def attach(self, k, layer, inputs, y):
        """Layer k has computed y. Give y a backward pass that knows of A and B, unless no gradient
        is wanted, as in sampling and scoring."""
        if torch.is_grad_enabled():
            return LowRank.apply(y, *inputs, self.A[k], self.B[k])

    @torch.no_grad()
    def copy_weights(self, actor):
        """Set all W anew from W0. To change W by the difference between two steps would add up the
        roundings of all steps."""
        for k, layer in enumerate(self.layers.values()):
            A, B = self.A[k].full_tensor(), self.B[k].full_tensor()
            W = self.W0[k].to(A.device) + ALPHA / len(A) * B @ A
            layer.weight.copy_(spread(W) if self.dither else W)

    @torch.no_grad()
    def save_adapter(self, directory):
        """Save A and B as peft does, for whoever has W0. All ranks call this, and rank 0 writes."""
        [actor] = self.held
        inside = f"base_model.model.{actor.base_model_prefix}.layers"
        tensors = {}
        for name, A, B in zip(self.layers, self.A, self.B):
            tensors[f"{inside}.{name}.lora_A.weight"] = A.full_tensor()
            tensors[f"{inside}.{name}.lora_B.weight"] = B.full_tensor()
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": len(A), "lora_alpha": ALPHA}
        config["target_modules"] = sorted({name.split(".")[-1] for name in self.layers})
        base = Path(actor.name_or_path)  # an id on the hub, or a directory
        config["base_model_name_or_path"] = str(base.resolve() if base.is_dir() else base)
        if is_rank_0():
            directory.mkdir(parents=True, exist_ok=True)
            # save_file would keep others from reading it.
            (directory / "adapter_model.safetensors").write_bytes(save(tensors))
            (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


class LowRank(torch.autograd.Function):
    """y as it is, with gradients for A and B. That of x is torch's own, by the frozen W."""

    @staticmethod
    def forward(ctx, y, *inputs):
        ctx.save_for_backward(*inputs)  # x, A, B
        return y

    @staticmethod
    def backward(ctx, G):
        x, A, B = (each.flatten(0, -2).to(G.dtype) for each in ctx.saved_tensors)
        flat, s = G.flatten(0, -2), ALPHA / len(A)
        return G, None, (flat @ (s * B)).T @ x, flat.T @ (x @ (s * A).T)
