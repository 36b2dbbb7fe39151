"""Drafters through speculators' own constructors: fresh ones, and trained ones to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from forespark.models.base import LossOptions
from forespark.models.drafter import ForeSparkDrafter, FrozenDrafter
from forespark.models.dspark import DSparkDrafter
from forespark.models.warm_start import COPIED, warm_start


def build_drafter(
    name: str,  # forespark | dspark
    *,
    target_model: str,
    target_layer_ids: list[int],
    num_speculative_tokens: int,
    num_layers: int,
    selector_rank: int,
    selector_top_k: int,
    estimator_rank: int,
    mask_token_id: int | None,
    options: LossOptions,
    init: str = "random",
    directional: bool = False,
    seed: int = 0,
) -> ForeSparkDrafter | DSparkDrafter:
    """A fresh drafter for a target checkpoint, its embeddings and head frozen copies.

    Raises:
        ValueError: the name is unknown, or the target cannot be read.
    """
    from speculators.models.dflash2 import DFlash2DraftModel
    from speculators.models.dspark import DSparkDraftModel
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.utils import resolve_mask_token_id

    if name not in ("forespark", "dspark"):
        raise ValueError(f"drafter: got {name!r}, want forespark or dspark")
    try:
        shape = create_transformer_layer_config(
            target_model, num_layers, "qwen3", None, 2048, list(range(num_layers))
        )
    except OSError as error:
        raise ValueError(
            f"{target_model}: cannot read the target's config ({error}); run setup.sh"
        ) from error
    mask_id = resolve_mask_token_id(target_model, shape.vocab_size, mask_token_id)
    arguments: dict[str, Any] = {
        "verifier_name_or_path": target_model,
        "target_layer_ids": list(target_layer_ids),
        "draft_vocab_size": shape.vocab_size,
        "mask_token_id": mask_id,
        # Kept out of the checkpoint by speculators; any value but flex attention loads on a CPU.
        "draft_attn_impl": "sdpa",
    }
    torch.manual_seed(seed)
    if name == "dspark":
        if directional:
            # vLLM's own field for causal blocks; and with the anchor as a slot of its own a
            # block of d drafts is laid out as DFlash 2's.
            shape.is_causal = True
        core = DSparkDraftModel.from_training_args(
            shape, block_size=num_speculative_tokens + directional, markov_rank=selector_rank,
            sample_from_anchor=not directional, **arguments,
        )  # fmt: skip
        core = _started(core, init, target_model)
        return DSparkDrafter(core, options, estimator_rank if directional else None)
    core = DFlash2DraftModel.from_training_args(
        shape, block_size=num_speculative_tokens + 1, selector_rank=selector_rank,
        # vLLM makes the attention of every draft layer causal by this field's opposite.
        selector_top_k=selector_top_k, sliding_window_non_causal=not directional, **arguments,
    )  # fmt: skip
    core = _started(core, init, target_model)
    return ForeSparkDrafter(core, estimator_rank, options, directional)


def _started(core: nn.Module, init: str, target_model: str) -> nn.Module:
    """The core as speculators made it, or warmed up from the target's last layers."""
    if init == "random":
        return core
    from speculators.models.utils import get_verifier_config
    from speculators.utils.loading import load_model_layers

    layers = get_verifier_config(target_model).num_hidden_layers
    first = layers - len(core.layers)
    names = [f"model.layers.{i}.{n}.weight" for i in range(first, layers) for n in COPIED]
    warm_start(core, load_model_layers(names, target_model), layers)
    return core


def frozen_drafter(
    folder: Path,  # holds config.json and model.safetensors
    *,
    target_model: str,
    estimator_rank: int,
    options: LossOptions,
    seed: int = 0,
) -> FrozenDrafter:
    """Fresh estimators on a trained DFlash 2 checkpoint of speculators' format.

    Raises:
        ValueError: no such checkpoint, one of another kind, a damaged one, or one trained for
            a target of another shape; says what was found and what is wanted.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from speculators.models.dflash2 import DFlash2DraftModel

    folder = Path(folder)
    config = _checkpoint_config(folder, target_model)
    config.transformer_layer_config._attn_implementation = "sdpa"
    # Embeddings, head and final norm are the target's own, wherever it lies now.
    config.speculators_config.verifier.name_or_path = target_model
    torch.manual_seed(seed)
    core = DFlash2DraftModel(config)
    try:
        weights = load_file(folder / "model.safetensors")
        missing, unexpected = core.load_state_dict(weights, strict=False)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{folder / 'model.safetensors'}: not the weights its config.json "
                         f"describes ({error}); copy the checkpoint again") from None  # fmt: skip
    lost = [n for n in missing if not n.startswith(("embed_tokens", "lm_head", "verifier_"))]
    if lost or unexpected:
        raise ValueError(f"{folder}: weights and config.json disagree, for example about "
                         f"{[*lost, *unexpected][0]}; copy the checkpoint again")  # fmt: skip
    core.load_vocab_mappings(None, None)
    core.load_verifier_weights()
    directional = not config.sliding_window_non_causal
    return FrozenDrafter(core, estimator_rank, options, directional)


def _checkpoint_config(folder: Path, target_model: str) -> Any:
    """A DFlash 2 checkpoint's configuration, its target's shape checked."""
    import json

    from speculators.models.dflash2 import DFlash2SpeculatorConfig
    from transformers import AutoConfig

    missing = [n for n in ("config.json", "model.safetensors") if not (folder / n).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: no {' and no '.join(missing)} there; name a DFlash 2 checkpoint with "
            "--drafter-dir, or train one with `python train.py`"
        )
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = raw.get("speculators_model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{folder / 'config.json'}: damaged ({error}); copy it again") from None
    if kind != "dflash2":
        raise ValueError(f"{folder}: got a checkpoint of kind {kind!r}, want one that speculators "
                         "saved as 'dflash2'")  # fmt: skip
    config = DFlash2SpeculatorConfig.from_pretrained(str(folder))
    target = AutoConfig.from_pretrained(target_model).get_text_config()
    shape = config.transformer_layer_config
    for name in ("hidden_size", "vocab_size"):
        if getattr(shape, name) != getattr(target, name):
            raise ValueError(
                f"{folder} was trained for another target: its {name} is {getattr(shape, name)}, "
                f"that of {target_model} is {getattr(target, name)}; correct --target or the folder"
            )
    return config
