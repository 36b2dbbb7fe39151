"""Test environment: Triton's interpreter and a quiet, offline vLLM where no GPU is found.

Triton and vLLM read these variables when they are imported, so they are set here, before
any test module loads.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # A parallel worker and the engines it starts keep to one core: two OpenMP teams that
    # share cores wait for each other at every barrier.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    os.environ["OMP_NUM_THREADS"] = "1"

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    own = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", own)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root folder."""
    return ROOT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most engine tests first, so that no worker waits for another at the end."""
    engines = Counter(item.path for item in items if item.get_closest_marker("engine"))
    items.sort(key=lambda item: -engines[item.path])
