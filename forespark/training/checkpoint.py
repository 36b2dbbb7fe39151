"""Resumable training state: safetensors for tensors, JSON for the rest, no pickles.

A checkpoint is a folder ``step-<n>`` made beside its final name and renamed when whole;
the two newest are kept. Frozen copies of the target's weights are left out.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forespark.record import read_json, write_json

SCHEMA = 1
KEEP = 2


def _flat(
    model: nn.Module, optimizers: dict[str, torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    names = {p: n for n, p in model.named_parameters() if p.requires_grad}
    tensors = {f"model/{name}": p.detach().contiguous() for p, name in names.items()}
    for name, buffer in model.named_buffers():
        if name.endswith("input_scale"):
            tensors[f"scale/{name}"] = buffer.detach().contiguous()
    for label, optimizer in optimizers.items():
        for param, state in optimizer.state.items():
            for key, value in state.items():
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                tensors[f"optim/{label}/{names[param]}/{key}"] = tensor.detach().contiguous()
    return tensors


def latest(folder: Path) -> Path | None:
    """Newest whole checkpoint of ``folder``, or None."""
    found = sorted(Path(folder).glob("step-*"), key=lambda p: int(p.name.partition("-")[2]))
    whole = [p for p in found if (p / "state.json").exists()]
    return whole[-1] if whole else None


def save(
    folder: Path,
    model: nn.Module,
    optimizers: dict[str, torch.optim.Optimizer],
    state: dict[str, Any],  # must hold "step"
) -> Path:
    """Write one checkpoint and drop all but the ``KEEP`` newest."""
    from safetensors.torch import save_file

    folder = Path(folder)
    final = folder / f"step-{state['step']}"
    temporary = folder / f".step-{state['step']}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(_flat(model, optimizers), temporary / "tensors.safetensors")
    write_json(temporary / "state.json", {"schema": SCHEMA, **state})
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    found = sorted(folder.glob("step-*"), key=lambda p: int(p.name.partition("-")[2]))
    for old in found[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load(
    path: Path, model: nn.Module, optimizers: dict[str, torch.optim.Optimizer]
) -> dict[str, Any]:
    """Restore model and optimizers in place; returns the JSON state.

    Raises:
        ValueError: the checkpoint is corrupt or of another drafter shape or optimizer.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    remedy = f"delete {path.parent} to train from scratch, or restore the settings it was made with"
    state = read_json(path / "state.json")
    try:
        tensors = load_file(path / "tensors.safetensors")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: corrupt or truncated checkpoint ({error}); {remedy}") from None
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    saved = {k.partition("/")[2]: v for k, v in tensors.items() if k.startswith("model/")}
    wrong = sorted(
        n for n in params.keys() | saved.keys()
        if n not in params or n not in saved or params[n].shape != saved[n].shape
    )  # fmt: skip
    if wrong:
        raise ValueError(f"{path}: not a checkpoint of this drafter ({wrong[0]} differs); {remedy}")
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(saved[name])
        for name, buffer in model.named_buffers():
            if f"scale/{name}" in tensors:
                buffer.copy_(tensors[f"scale/{name}"])
    members = {
        (label, id(p)): optimizer
        for label, optimizer in optimizers.items()
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for key, tensor in tensors.items():
        if not key.startswith("optim/"):
            continue
        _, label, name, field = key.split("/")
        optimizer = members.get((label, id(params[name])))
        if optimizer is None:
            raise ValueError(f"{path}: {name} was trained by {label}, not so here; {remedy}")
        # AdamW counts its steps on the host.
        kept = tensor if tensor.ndim == 0 else tensor.to(params[name].device)
        optimizer.state[params[name]][field] = kept
    return state
