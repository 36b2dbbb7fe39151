"""Two ranks train as one process that averages the gradients of both rows would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forespark.config import load
from forespark.record import read_jsonl
from forespark.training.build import drafter_of, state_cache
from forespark.training.loop import Trainer
from forespark.training.ranks import Ranks
from forespark.training.run import corpus_sources, launch_command

CHILD = Path(__file__).with_name("rank_child.py")


def two_ranks(overrides, log, timeout=240):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
             "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, str(CHILD), str(log), *overrides]
    code = subprocess.run(command, env={**os.environ, **place}, timeout=timeout).returncode
    outputs = [Path(f"{log}{rank}").read_text() for rank in range(2)]
    assert code == 0, outputs
    return [out.rpartition("weights ")[2].split() for out in outputs]


@dataclass(frozen=True)
class Both:
    """Stands in for ``Ranks``: adds the other rank's gradient here."""

    trainer: list
    rank: int = 0
    size: int = 2
    first: bool = True

    def average_gradients(self, parameters):
        loss, _, _ = self.trainer[0].loss_of(1)
        loss.backward()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= 2

    def total(self, values):
        return values

    def agree(self, *values):
        return values

    def any(self, flag):
        return flag


def test_two_ranks_are_one_bigger_step(overrides, tmp_path):
    shared = [*overrides, "train.max_steps=3"]
    (first, _, step), (second, _, other) = two_ranks(shared, tmp_path / "rank")
    assert first == second and step == other == "3"

    alone = load([*shared, f"run_dir='{tmp_path / 'alone'}'"])
    trainer: list[Trainer] = []
    trainer.append(
        Trainer(
            alone,
            drafter_of(alone, "forespark"),
            state_cache(alone),
            name="forespark",
            sources=corpus_sources(alone),
            folder=tmp_path / "alone/train",
            out=tmp_path / "alone/out",
            ranks=Both(trainer),
        )
    )
    trainer[0].fit(lambda split, values, step: None)
    folders = (tmp_path / "alone/train", Path(load(shared).run_dir) / "train/forespark")
    ours, theirs = (load_file(f / "checkpoints/step-3/tensors.safetensors") for f in folders)
    assert ours.keys() == theirs.keys()
    for name in (n for n in ours if n.startswith("model/")):
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=1e-3)
    curves = [
        [row for row in read_jsonl(Path(folder) / "metrics.jsonl") if row["split"] == "train"]
        for folder in folders
    ]
    for one, two in zip(*curves, strict=True):
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
        assert two["anchors"] >= one["anchors"]


def test_one_process_exchanges_nothing():
    alone = Ranks()
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, 2.0])
    alone.average_gradients([parameter])
    assert parameter.grad.tolist() == [1.0, 2.0] and alone.first
    assert alone.total({"a": 1.0}) == {"a": 1.0} and alone.agree(3, "x") == (3, "x")
    assert alone.any(True) and not alone.any(False)


def test_more_processes_are_started_by_torchrun(config, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launch_command(config, ["train.py"]) is None
    config.train.processes = 6
    command = launch_command(config, ["train.py", "--target", "qwen14"])
    assert command[1:] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "6",
                           "train.py", "--target", "qwen14"]  # fmt: skip
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert launch_command(config, ["train.py"]) is None
