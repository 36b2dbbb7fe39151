"""Entry point of ``train.py``: configuration in, exported drafter out."""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from forespark.config import Config, require_model
from forespark.training.build import drafter_of, state_cache
from forespark.training.loop import Trainer
from forespark.training.ranks import Ranks, joined
from forespark.training.rows import read_rows
from forespark.training.writers import log_writer


def corpus_sources(config: Config) -> list[Path]:
    """Corpus folders and files to train on."""
    if config.train.data:
        return [Path(item) for item in config.train.data]
    return [Path(config.run_dir) / "corpus"]


def prepare_torch(config: Config) -> None:
    """Precision of matrix products; on a CPU, keep large buffers inside the process.

    Fresh pages dominate small CPU steps.
    """
    torch.set_float32_matmul_precision(config.train.matmul_precision)
    if torch.cuda.is_available():
        return
    name = ctypes.util.find_library("c")
    if name is not None:
        libc = ctypes.CDLL(name)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-4, 0)  # M_MMAP_MAX: no mmap per buffer
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: do not hand pages back


def extraction_args(config: Config, folder: Path) -> list[str]:
    """``vllm serve`` arguments that make the target write hidden states to ``folder``."""
    from transformers import AutoConfig

    layers = AutoConfig.from_pretrained(config.target.model).get_text_config().num_hidden_layers
    ids = [*config.target.target_layer_ids, layers]
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder.resolve())},
    }
    return [
        "--speculative-config", json.dumps(speculative),
        "--kv-transfer-config", json.dumps(transfer),
        # A cached or chunked prefill would leave rows out of the file.
        "--no-enable-prefix-caching", "--no-enable-chunked-prefill",
    ]  # fmt: skip


@contextmanager
def state_source(config: Config, endpoint: str | None) -> Iterator[str | None]:
    """Endpoint of the hidden-state server while the block runs; None means in process."""
    if endpoint is not None or config.train.hidden_states == "local":
        yield endpoint
        return
    from forespark.data.server import served_target

    folder = Path(config.run_dir) / "hidden" / "stream"
    folder.mkdir(parents=True, exist_ok=True)
    log = Path(config.run_dir) / "logs" / "hidden-state-server.log"
    extra, devices = extraction_args(config, folder), config.train.server_devices
    with served_target(config, log=log, extra_args=extra, devices=devices) as server:
        yield server.url


@contextmanager
def shared_source(config: Config, endpoint: str | None, ranks: Ranks) -> Iterator[str | None]:
    """``state_source`` of rank 0, for all ranks of one machine or shared file system."""
    with state_source(config, endpoint) if ranks.first else nullcontext() as url:
        (shared,) = ranks.agree(url)
        assert shared is None or isinstance(shared, str)
        yield shared


def launch_command(config: Config, argv: list[str]) -> list[str] | None:
    """torchrun over ``train.processes`` ranks; None when this process shall train itself."""
    if config.train.processes == 1 or "WORLD_SIZE" in os.environ:
        return None
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(config.train.processes), *argv]


def run(config: Config, name: str, out: Path | None = None, endpoint: str | None = None) -> Path:
    """Train drafter ``name`` and export it; resumes what an earlier call left.

    Raises:
        ValueError: bad corpus, target or checkpoint; the message names the remedy.
        OSError: the hidden-state server cannot be reached or died.
    """
    require_model(config.target.model)
    prepare_torch(config)
    run_dir = Path(config.run_dir)
    read_rows(corpus_sources(config))  # a bad corpus costs no server start
    out = Path(out) if out is not None else run_dir / "drafters" / name
    folder = (
        run_dir / "train" / name if out == run_dir / "drafters" / name else Path(f"{out}.train")
    )
    folder.mkdir(parents=True, exist_ok=True)
    with joined() as ranks, shared_source(config, endpoint, ranks) as url:
        model = drafter_of(config, name)
        trainer = Trainer(
            config, model, state_cache(config, url), name=name,
            sources=corpus_sources(config), folder=folder, out=out, ranks=ranks,
        )  # fmt: skip
        if trainer.resume() and ranks.first:
            print(f"resuming {name} at step {trainer.step}", flush=True)
        return trainer.fit(log_writer(config, folder) if ranks.first else None)
