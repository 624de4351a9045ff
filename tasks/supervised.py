"""Supervised training on demonstrations, for models that do not box their answers yet."""

import itertools

import torch

from engine.tokens import pad
from runtime.cli import say


def finetune(model, demonstrations, steps, batch, lr, stop):
    """Train a Hugging Face model -> the last loss. demonstrations: an iterator of (prompt ids,
    completion ids). The model learns the completion, followed by the token `stop`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, betas=(0.9, 0.95))
    warm_up = 0.05 if steps > 20 else 0.0  # a share of the steps; torch fails if it is one step
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=steps, pct_start=warm_up, cycle_momentum=False
    )
    for step in range(1, steps + 1):
        ids, labels = [], []
        for prompt, completion in itertools.islice(demonstrations, batch):
            ids.append(prompt + completion + [stop])
            labels.append([-100] * len(prompt) + completion + [stop])  # -100: not learned
        inputs, targets = pad(ids).to(model.device), pad(labels, value=-100).to(model.device)
        loss = model(input_ids=inputs, labels=targets, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % max(1, steps // 10) == 0:
            say(f"supervised start {step}/{steps}  loss {loss.item():.3f}")
    return loss.item()
