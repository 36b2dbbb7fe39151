"""Optimizers and learning-rate schedules.

Muon orthogonalizes the momentum of each weight matrix by a Newton-Schulz iteration (Keller
Jordan, 2024), with the update scaled to AdamW's size as speculators does
(``match_rms_adamw``). torch.optim.Muon iterates in bfloat16, which brings nothing on
processors without fast bfloat16 products; here it is float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

# Quintic coefficients of the iteration, steep at zero.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# Matrices that are tables over the vocabulary, or heads: AdamW, as speculators has it.
_ADAMW_NAMES = ("codebook", "markov_w1", "markov_w2", "pre.", "post.", "confidence_head")


def orthogonalize(
    update: torch.Tensor,  # [m, n]
    steps: int = 5,
) -> torch.Tensor:
    """Nearest semi-orthogonal matrix, roughly: singular values end in about 0.7..1.2."""
    a, b, c = _NEWTON_SCHULZ
    x = update.T if update.shape[0] > update.shape[1] else update
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x.T if update.shape[0] > update.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized; decoupled weight decay."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalize(param.grad.lerp(state["momentum"], group["momentum"]))
                scale = 0.2 * math.sqrt(max(param.shape))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-group["lr"] * scale)


def build_optimizers(
    model: nn.Module,
    *,
    name: str,  # adamw | muon
    lr: float,
    muon_lr: float,
    weight_decay: float,
) -> dict[str, torch.optim.Optimizer]:
    """Optimizers by name over the trainable parameters; ``adamw`` always exists."""
    matrices, others = [], []
    for parameter_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1
        if name == "muon" and is_matrix and not any(n in parameter_name for n in _ADAMW_NAMES):
            matrices.append(parameter)
        else:
            others.append(parameter)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "adamw": torch.optim.AdamW(
            others, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95), foreach=True
        )
    }
    if matrices:
        optimizers["muon"] = Muon(matrices, muon_lr, weight_decay=weight_decay)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def lr_factor(
    schedule: str,  # cosine | wsd
    step: int,
    warmup: int,  # steps
    progress: float,  # share of the run that is done, 0..1
    decay_fraction: float,
) -> float:
    """Learning rate over its base at ``step``.

    ``wsd`` stays constant and falls linearly over the last ``decay_fraction``, so that the
    length of a run can be decided while it runs.
    """
    progress = min(max(progress, 0.0), 1.0)
    warm = min(1.0, (step + 1) / max(warmup, 1))
    if schedule == "cosine":
        return warm * 0.5 * (1.0 + math.cos(math.pi * progress))
    return warm * min(1.0, (1.0 - progress) / decay_fraction)


def set_lr(optimizers: dict[str, torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
