"""Shared by the engine tests: one tiny trained model for the whole session."""

from __future__ import annotations

import fcntl
import os

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Folder with the tiny target, its drafters and their files (see ``tiny.build``).

    One for all test processes: the first that needs it builds it.
    """
    import tiny

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    path = shared / "tiny"
    with (shared / "tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path / "complete").exists():
            path.mkdir(exist_ok=True)
            tiny.build(path)
            (path / "complete").touch()
    return path
