"""The patch applier on a small tree, and that our patches do what their headers say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def apply():
    path = Path(__file__).resolve().parents[3] / "patches" / "apply.py"
    spec = importlib.util.spec_from_file_location("patches_apply", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path) -> tuple[Path, Path]:
    root, patches = tmp_path / "site", tmp_path / "patches"
    root.mkdir()
    patches.mkdir()
    for name in ("one", "two"):
        (root / f"{name}.py").write_text(f"a = 1\n{name} = 2\nb = 3\n")
        (patches / f"000-{name}.patch").write_text(
            f"Why: a test\n\n--- a/{name}.py\n+++ b/{name}.py\n"
            f"@@ -1,3 +1,3 @@\n a = 1\n-{name} = 2\n+{name} = 5\n b = 3\n"
        )
    return root, patches


def test_applies_once(apply, tree):
    root, patches = tree
    assert apply.apply_all(root, patches, check_only=True) == ["000-one.patch", "000-two.patch"]
    assert "one = 2" in (root / "one.py").read_text()
    assert apply.apply_all(root, patches) == ["000-one.patch", "000-two.patch"]
    assert (root / "two.py").read_text() == "a = 1\ntwo = 5\nb = 3\n"
    assert apply.apply_all(root, patches) == []


def test_finishes_what_was_interrupted(apply, tree):
    root, patches = tree
    (root / "one.py").write_text("a = 1\none = 5\nb = 3\n")
    assert apply.apply_all(root, patches) == ["000-two.patch"]


def test_a_changed_file_stops_everything(apply, tree):
    root, patches = tree
    (root / "two.py").write_text("something else\n")
    with pytest.raises(ValueError, match=r"000-two\.patch does not fit.*setup\.sh"):
        apply.apply_all(root, patches)
    assert "one = 2" in (root / "one.py").read_text()


def test_another_version_is_refused(apply, monkeypatch):
    monkeypatch.setattr(apply.importlib.metadata, "version", lambda name: "0.31.0")
    with pytest.raises(ValueError, match=r"0\.31\.0 is installed.*0\.30\.0"):
        apply.site_packages()


def test_headers_and_one_file_one_patch(apply):
    touched: list[str] = []
    for patch in sorted(apply.PATCHES.glob("*.patch")):
        text = patch.read_text()
        for field in ("Why:", "How:", "Upstream:", "Drop when:", "Test:"):
            assert f"\n{field}" in f"\n{text}", (patch.name, field)
        touched += [line for line in text.splitlines() if line.startswith("+++ ")]
    assert len(touched) == len(set(touched))


def test_ours_are_in_place(apply):
    assert apply.apply_all(apply.site_packages(), check_only=True) == []


def test_interpreter_counts_as_triton():
    from vllm.triton_utils import HAS_TRITON

    assert os.environ.get("TRITON_INTERPRET") == "1"
    assert HAS_TRITON


def test_cpu_events_tell_time():
    """In a child: the CPU worker's module changes torch for the whole process."""
    code = (
        "import time, torch, vllm.v1.worker.cpu.shm\n"
        "a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(blocking=True)\n"
        "a.record(); time.sleep(0.02); b.record(torch.cuda.current_stream())\n"
        "assert a.query() and 15 < a.elapsed_time(b) < 2000, a.elapsed_time(b)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
