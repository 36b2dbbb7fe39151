"""eval.py looks at every arm's files before it starts a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_all_missing_files_are_named_before_a_server_starts(tmp_path, flags):
    (tmp_path / "model").mkdir()
    command = [
        sys.executable, str(ROOT / "eval.py"), "--arm", "ar,dspark,dflash2", *flags,
        "--out", str(tmp_path / "out"), f"run_dir={tmp_path}/run",
        f"drafter.dir={tmp_path}/none", f"target.model={tmp_path}/model", "bench.loads=[1]",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert "dspark: no dspark drafter" in line and "dflash2: no " in line
    assert not (tmp_path / "out").exists()
