"""Supervised training on demonstrations, for models that do not box their answers yet."""

import torch

from engine.cli import progress, say
from engine.tokens import pad


def supervise(model, demonstrate, steps, batch, lr, stop):
    """Train a Hugging Face model -> the last loss. demonstrate() returns (prompt ids, completion
    ids). The model learns the completion, followed by the token `stop`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=steps, pct_start=0.05, cycle_momentum=False
    )
    with progress(range(steps), desc="supervised start", unit="step") as bar:
        for step in bar:
            ids, labels = [], []
            for prompt, completion in (demonstrate() for _ in range(batch)):
                completion = [*completion, stop]
                ids.append(prompt + completion)
                labels.append([-100] * len(prompt) + completion)  # -100: not learned
            batch_ids = pad(ids).to(model.device)
            batch_labels = pad(labels, value=-100).to(model.device)
            loss = model(input_ids=batch_ids, labels=batch_labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if (step + 1) % max(1, steps // 10) == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}")
                if bar.disable:  # not on a terminal
                    say(f"supervised start {step + 1}/{steps}  loss {loss.item():.3f}")
    return loss.item()
