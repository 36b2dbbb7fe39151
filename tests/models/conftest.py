"""Tiny random drafters: 40 tokens, hidden size 32, two layers."""

from __future__ import annotations

import pytest
import torch

VOCAB, HIDDEN, LAYERS, BLOCK = 40, 32, 3, 5


def _shape():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    shape = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        rms_norm_eps=1e-6, use_sliding_window=False,
    )  # fmt: skip
    shape._attn_implementation = "sdpa"
    return shape


def _fill(core: torch.nn.Module) -> torch.nn.Module:
    """Random weights everywhere, convolutions included: identities would hide mistakes."""
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in core.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=rng))
            else:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=rng))
        core.verifier_lm_head.weight.copy_(core.lm_head.weight)
    for name in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"):
        getattr(core, name).weight.requires_grad_(False)
    return core


def make_core(kind: str):
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    common = {
        "transformer_layer_config": _shape(), "draft_vocab_size": VOCAB, "mask_token_id": 3,
        "aux_hidden_state_layer_ids": list(range(LAYERS)),
    }  # fmt: skip
    if kind == "dspark":
        core = DSparkDraftModel(
            DSparkSpeculatorConfig(block_size=BLOCK - 1, markov_rank=6, **common)
        )
    else:
        core = DFlash2DraftModel(
            DFlash2SpeculatorConfig(
                block_size=BLOCK, conv_group_size=8, selector_rank=6, selector_top_k=4, **common
            )
        )
    return _fill(core)


@pytest.fixture
def forespark_model():
    from forespark.models.drafter import ForeSparkDrafter

    torch.manual_seed(0)
    return ForeSparkDrafter(make_core("dflash2"), estimator_rank=5)


@pytest.fixture
def dspark_model():
    from forespark.models.dspark import DSparkDrafter

    return DSparkDrafter(make_core("dspark"))


def make_row(lengths=(14, 9), prompt=4, seed=0):
    from forespark.models.blocks import Row

    rng = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.cat([(torch.arange(n) >= prompt) for n in lengths]) if lengths else None
    return Row(
        input_ids=torch.randint(4, VOCAB, (total,), generator=rng),
        loss_mask=mask if mask is not None else torch.zeros(0, dtype=torch.bool),
        lengths=list(lengths),
        states=torch.randn(total, LAYERS * HIDDEN, generator=rng),
        last=3 * torch.randn(total, HIDDEN, generator=rng),
    )
