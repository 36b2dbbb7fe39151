"""A trained drafter on disk: a checkpoint stock vLLM loads, and ForeSpark's heads beside it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from forespark.models.drafter import ForeSparkDrafter
from forespark.models.dspark import DSparkDrafter
from forespark.models.estimators import META_FILE, HeadsMeta, load_heads, save_heads
from forespark.record import file_sha256, provenance, read_json, write_json


def _tidy_config(folder: Path) -> None:
    """Name the stored dtype and drop the library's copy of its own source file."""
    config = read_json(folder / "config.json")
    config["dtype"] = "bfloat16"
    config.pop("auto_map", None)
    (folder / "config.py").unlink(missing_ok=True)
    write_json(folder / "config.json", config)


def read_weights(model: ForeSparkDrafter | DSparkDrafter, folder: Path) -> bool:
    """Take over the weights in ``folder``; the estimators too if it has them.

    The fusion of a checkpoint reads unscaled states, so ``input_scale`` must still be one.

    Returns:
        Whether estimators lay there (never those of a DSpark without a pre-draft one, whose
        confidence head is in the checkpoint).

    Raises:
        ValueError: no such checkpoint, a damaged one, or one of another kind or shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights = Path(folder) / "model.safetensors"
    if not weights.exists():
        raise ValueError(f"{weights}: no such drafter; train it with `python train.py`")
    assert bool((model.core.fc.input_scale == 1).all()), "states are scaled already"
    try:
        missing, unexpected = model.core.load_state_dict(load_file(weights), strict=False)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{weights}: damaged, or of another shape ({error})") from None
    lost = [n for n in missing if not n.startswith(("embed_tokens", "lm_head", "verifier_"))]
    if lost or unexpected:
        raise ValueError(f"{weights}: not such a drafter ({[*lost, *unexpected][:3]} differ)")
    heads = Path(folder) / "forespark"
    if model.pre is None or not (heads / META_FILE).exists():
        return False
    pre, post, meta = load_heads(heads, drafter=weights)
    own = heads_meta(model, meta.target, meta.drafter_sha256, {})
    if own.shapes() != meta.shapes():
        raise ValueError(f"{heads}: estimators of shapes {meta.shapes()}, want {own.shapes()}")
    with torch.no_grad():
        pre.w_e.weight.div_(model.pre.embed_scale)  # folded in by the export
    model.pre.load_state_dict(pre.state_dict())
    if isinstance(model, ForeSparkDrafter):  # DSpark's came with the checkpoint
        model.post.load_state_dict(post.state_dict())
    return True


def heads_meta(
    model: ForeSparkDrafter | DSparkDrafter,
    target: str,
    drafter_sha256: str,
    made: dict[str, Any],
) -> HeadsMeta:
    """What ``heads.json`` says of a drafter's estimators."""
    config = model.core.config
    assert model.heads is not None
    pre, post = model.heads
    hidden = config.transformer_layer_config.hidden_size
    return HeadsMeta(
        target=target,
        num_speculative_tokens=model.num_speculative_tokens,
        hidden_size=hidden,
        embed_size=model.core.embed_tokens.weight.shape[1],
        rank=pre.w_c.out_features,
        selector_rank=post.w.numel() - hidden,
        form=pre.form,
        drafter_sha256=drafter_sha256,
        provenance=made,
    )


def export_drafter(
    model: ForeSparkDrafter | DSparkDrafter,
    out: Path,
    *,
    target: str,
    info: dict[str, Any] | None = None,
) -> Path:
    """Write ``config.json``, ``model.safetensors`` (bfloat16) and the heads to ``out``.

    The target's embedding and head stay out: vLLM shares its own. The folder is replaced
    as a whole, so a reader never sees weights and heads of different steps.
    """
    out = Path(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    core = model.core
    kept = {
        name: tensor.detach().to(torch.bfloat16)
        for name, tensor in core.state_dict().items()
        if not any(name.startswith(skip) for skip in ("embed_tokens", "lm_head", "verifier_"))
    }
    folded = core.fc.weight.detach() * core.fc.input_scale
    kept["fc.weight"] = folded.to(torch.bfloat16)
    core.save_pretrained(temporary, state_dict=kept)
    _tidy_config(temporary)
    made = {"provenance": provenance(), **(info or {})}
    if model.heads is not None:
        meta = heads_meta(model, target, file_sha256(temporary / "model.safetensors"), made)
        save_heads(temporary / "forespark", *model.heads, meta)
    write_json(temporary / "training.json", made)
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        # What later stages put beside the weights (calibration, tables) belongs to the old
        # drafter; their keys would refuse the new one.
        out.rename(old)
    temporary.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    return out
