"""Entry point of ``train.py``: configuration in, exported drafter out."""

from __future__ import annotations

import ctypes
import ctypes.util
from pathlib import Path

import torch

from forespark.config import Config
from forespark.training.loop import Trainer, drafter_of, log_writer, state_cache


def corpus_sources(config: Config) -> list[Path]:
    """Corpus folders and files to train on."""
    if config.train.data:
        return [Path(item) for item in config.train.data]
    return [Path(config.run_dir) / "corpus"]


def prepare_cpu() -> None:
    """Keep large buffers inside the process: fresh pages dominate small CPU steps."""
    if torch.cuda.is_available():
        return
    name = ctypes.util.find_library("c")
    if name is not None:
        libc = ctypes.CDLL(name)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-4, 0)  # M_MMAP_MAX: no mmap per buffer
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: do not hand pages back


def run(config: Config, name: str, out: Path | None = None, endpoint: str | None = None) -> Path:
    """Train drafter ``name`` and export it; resumes what an earlier call left.

    Raises:
        ValueError: bad corpus, target or checkpoint; the message names the remedy.
        OSError: the hidden-state server cannot be reached or died.
    """
    prepare_cpu()
    run_dir = Path(config.run_dir)
    out = Path(out) if out is not None else run_dir / "drafters" / name
    folder = run_dir / "train" / name if out == run_dir / "drafters" / name else Path(f"{out}.train")
    folder.mkdir(parents=True, exist_ok=True)
    states = state_cache(config, endpoint)
    model = drafter_of(config, name)
    trainer = Trainer(
        config, model, states, name=name, sources=corpus_sources(config), folder=folder, out=out
    )
    if trainer.resume():
        print(f"resuming {name} at step {trainer.step}", flush=True)
    return trainer.fit(log_writer(config, folder))
