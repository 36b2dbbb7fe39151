"""Heads only: both estimators fitted on a trained drafter that stays as it is (``heads.py``).

The same loop, rows, anchors and losses as joint training; only the estimators have
gradients, so a step costs a drafter pass and no backward pass through it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from forespark.config import Config, drafter_places, require_model
from forespark.models.build import frozen_drafter
from forespark.models.drafter import FrozenDrafter
from forespark.models.estimators import META_FILE, save_heads
from forespark.record import file_sha256, provenance, read_json
from forespark.training import checkpoint
from forespark.training.build import loss_options, state_cache
from forespark.training.export import heads_meta
from forespark.training.loop import Trainer
from forespark.training.rows import read_rows
from forespark.training.run import corpus_sources, prepare_torch, state_source
from forespark.training.writers import log_writer

WEIGHTS = "model.safetensors"


class HeadsTrainer(Trainer):
    """Fits the estimators of the checkpoint in ``out``; its weights are only read."""

    def __init__(self, *args: Any, digest: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.digest = digest  # of the drafter's weights

    def _set_scale(self) -> None:
        """Nothing: the checkpoint's fusion has its scale folded in."""

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "drafter_sha256": self.digest}

    def resume(self) -> bool:
        found = checkpoint.latest(self.folder / "checkpoints")
        if found is not None:
            made_for = read_json(found / "state.json").get("drafter_sha256")
            if made_for != self.digest:
                raise ValueError(
                    f"{found}: fits the estimators of another drafter ({str(made_for)[:12]}, here "
                    f"{self.digest[:12]}); delete {self.folder} to start anew, or use another --out"
                )
        return super().resume()

    def _export(self, info: dict[str, Any]) -> None:
        made = {"provenance": provenance(), "heads_only": True, **info}
        meta = heads_meta(self.model, self.config.target.name, self.digest, made)
        assert self.model.heads is not None
        save_heads(self.out / "forespark", *self.model.heads, meta)


def checkpoint_folder(config: Config) -> Path:
    """The DFlash 2 checkpoint to fit on: ``drafter.dir``, or this target's own drafter."""
    places = drafter_places(config, "forespark")
    return next((place for place in places if (place / WEIGHTS).is_file()), places[0])


def load_frozen(config: Config, folder: Path) -> FrozenDrafter:
    """The checkpoint with fresh estimators.

    Raises:
        ValueError: missing, damaged, of another kind, target or K; the message names both.
    """
    heads = folder / "forespark" / META_FILE
    if heads.is_file() and (named := read_json(heads).get("target")) != config.target.name:
        raise ValueError(f"{folder} was trained for target {named!r}, not {config.target.name!r}; "
                         "correct --target or the folder")  # fmt: skip
    model = frozen_drafter(
        folder,
        target_model=config.target.model,
        estimator_rank=config.drafter.estimator_rank,
        options=loss_options(config.train),
        seed=config.train.seed,
    )
    got, K = config.drafter.num_speculative_tokens, model.num_speculative_tokens
    if got != K:
        raise ValueError(
            f"drafter.num_speculative_tokens: got {got}, but {folder} drafts {K} tokens; set "
            f"drafter.num_speculative_tokens={K}"
        )
    return model


def _prepare_out(folder: Path, out: Path | None) -> Path:
    """Where the heads go: beside the checkpoint, or a copy of it in ``out``.

    Raises:
        ValueError: heads that would be lost, or another checkpoint in ``out``.
    """
    if out is None or out.resolve() == folder.resolve():
        heads = folder / "forespark" / META_FILE
        if heads.is_file() and not read_json(heads).get("provenance", {}).get("heads_only"):
            raise ValueError(f"{folder} has estimators that were trained with it; use --out DIR "
                             "for a copy with new ones")  # fmt: skip
        return folder
    out.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS, "config.json"):
        source, copy = folder / name, out / name
        if copy.exists() and file_sha256(copy) != file_sha256(source):
            raise ValueError(f"{copy} is not a copy of {source}; use another --out")
        if not copy.exists():
            temporary = copy.with_name(f".{name}.{os.getpid()}.tmp")
            shutil.copyfile(source, temporary)
            temporary.replace(copy)
    return out


def _warn_of_calibration(config: Config, digest: str) -> None:
    """A calibration names the drafter's weights, so it would be taken for these heads' too."""
    path = Path(config.run_dir) / "calibration.json"
    if path.is_file() and read_json(path).get("key", {}).get("drafter_sha256") == digest:
        print(f"{path} was fitted on other estimators of these weights: calibrate again, or "
              "use a run_dir of its own", flush=True)  # fmt: skip


def run(config: Config, out: Path | None = None, endpoint: str | None = None) -> Path:
    """Fit both estimators and write ``forespark/heads.*``; resumes what an earlier call left.

    Raises:
        ValueError: bad checkpoint, corpus or target; the message names the remedy.
        OSError: the hidden-state server cannot be reached or died.
    """
    require_model(config.target.model)
    prepare_torch(config)
    folder = checkpoint_folder(config)
    model = load_frozen(config, folder)
    read_rows(corpus_sources(config))  # a bad corpus costs no server start
    # The states the checkpoint reads, whatever this target's own drafters capture.
    config.target.target_layer_ids = list(model.core.target_layer_ids)
    digest = file_sha256(folder / WEIGHTS)
    place = _prepare_out(folder, out)
    state = Path(config.run_dir) / "train" / f"heads-{digest[:12]}"
    state = state if out is None else Path(f"{out}.train")
    state.mkdir(parents=True, exist_ok=True)
    with state_source(config, endpoint) as url:
        trainer = HeadsTrainer(
            config, model, state_cache(config, url), name="heads",
            sources=corpus_sources(config), folder=state, out=place, digest=digest,
        )  # fmt: skip
        if trainer.resume():
            print(f"resuming the estimators of {folder} at step {trainer.step}", flush=True)
        trainer.fit(log_writer(config, state))
    _warn_of_calibration(config, digest)
    return place
