"""Start a drafter's backbone from the target's last decoder layers.

Where draft and target layers have the same shapes, a draft layer can begin as a copy of a
target layer, its context features as the target's own input to that layer, and its output
norm as the target's. A random start has to find all this first; on two CPU cores that is
most of the training time. The paper does not say how its drafters start, speculators starts
at random; ``drafter.init`` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

COPIED = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


def _head_scale(
    weight: torch.Tensor,  # [heads * D, H]
    gain: torch.Tensor,  # [H] gain of the norm before it
    dim: int,  # D
) -> torch.Tensor:
    """Expected size of each head dimension for normed, unit-variance inputs, [D].

    The target has no query/key norm and the drafter does: with these gains the drafter's
    normed queries and keys are about as large as the target's.
    """
    rows = (weight * gain).norm(dim=1).view(-1, dim)
    return rows.square().mean(dim=0).sqrt()


@torch.no_grad()
def warm_start(
    core: nn.Module,  # speculators DFlash-family model
    weights: Mapping[str, torch.Tensor],  # the target's tensors, Hugging Face names
    target_layers: int,
) -> None:
    """Copy the target's last layers into the drafter, in place.

    Raises:
        ValueError: the layers' shapes differ; the message names the first that does.
    """
    count = len(core.layers)
    first = target_layers - count
    for index, layer in enumerate(core.layers):
        modules = dict(layer.named_modules())
        for name in COPIED:
            source = weights[f"model.layers.{first + index}.{name}.weight"].float()
            own = modules[name].weight
            if own.shape != source.shape:
                raise ValueError(
                    f"drafter.init=target: {name} is {tuple(own.shape)} in the drafter and "
                    f"{tuple(source.shape)} in the target; use drafter.init=random"
                )
            own.copy_(source)
        attention, gain = layer.self_attn, layer.input_layernorm.weight
        attention.q_norm.weight.copy_(
            _head_scale(attention.q_proj.weight, gain, attention.head_dim)
        )
        attention.k_norm.weight.copy_(
            _head_scale(attention.k_proj.weight, gain, attention.head_dim)
        )
    # The newest captured layer is closest to what the first copied layer reads.
    hidden = core.fc.weight.shape[0]
    core.fc.weight.mul_(0.05)
    core.fc.weight[:, -hidden:] += torch.eye(hidden)
    core.hidden_norm.weight.copy_(core.layers[0].input_layernorm.weight)
    core.norm.weight.copy_(core.verifier_norm.weight)
