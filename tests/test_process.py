"""Server processes: all of their processes end, and they get what an engine needs."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from forespark import process
from forespark.process import Child

SLEEP = "import time; time.sleep(600)"
# Starts a process that leaves the group, as an engine does, and says which.
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "{SLEEP}"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def said(log: Path) -> int:
    deadline = time.monotonic() + 20
    while not log.exists() or not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(log.read_text())


def gone(pid: int, patience_s: float = 0.0) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)


@pytest.mark.parametrize("ask", [signal.SIGTERM, signal.SIGINT])
def test_descendants_in_groups_of_their_own_end(tmp_path, monkeypatch, ask):
    monkeypatch.setattr(process, "ORPHAN_S", 0.2)  # the orphan is not asked, so it is waited for
    child = Child([sys.executable, "-c", PARENT], log=tmp_path / "new" / "log")
    orphan = said(tmp_path / "new" / "log")
    assert child.alive() and not gone(orphan)
    child.stop(ask)
    assert not child.alive() and gone(orphan)
    child.stop()  # once more does nothing


def test_zombies_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "ORPHAN_S", 60.0)
    same_group = PARENT.replace(", start_new_session=True", "")
    child = Child([sys.executable, "-c", same_group], log=tmp_path / "log")
    orphan = said(tmp_path / "log")
    start = time.monotonic()
    child.stop()
    assert time.monotonic() - start < 30 and gone(orphan)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_a_server_ends_with_the_program_that_started_it(tmp_path, end):
    program = (
        "import sys, time; from pathlib import Path; from forespark.process import Child\n"
        f"print(Child([sys.executable, '-c', '{SLEEP}']).pid, flush=True)\n"
        f"time.sleep({600 if end == 'kill' else 0})"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if end == "kill":
            parent.kill()
        parent.wait(30)
    assert gone(pid, 10)


def test_port_problem():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        assert "in use" in (process.port_problem("127.0.0.1", port) or "")
    assert process.port_problem("127.0.0.1", port) is None
    for port in (-1, 0, 99999):
        with pytest.raises(ValueError, match="65535"):
            process.port_problem("127.0.0.1", port)


def test_log_tail(tmp_path):
    assert process.log_tail(tmp_path / "absent") == "  (no log)"
    (tmp_path / "log").write_text("a\nb\nc\n")
    assert process.log_tail(tmp_path / "log", 2) == "  b\n  c"


def test_cpu_environment_adds_intel_openmp_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert "LD_PRELOAD" not in process.cpu_environment(2)  # not installed
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    assert process.cpu_environment(2)["LD_PRELOAD"] == str(library)
    monkeypatch.setenv("LD_PRELOAD", "other.so")
    assert process.cpu_environment(2)["LD_PRELOAD"] == f"{library}:other.so"
    monkeypatch.setenv("LD_PRELOAD", f"{library}:other.so")
    assert "LD_PRELOAD" not in process.cpu_environment(2)


def test_device_can_be_forced(monkeypatch):
    monkeypatch.setenv("FORESPARK_DEVICE", "cuda")
    assert not process.on_cpu()
    monkeypatch.setenv("FORESPARK_DEVICE", "tpu")
    with pytest.raises(ValueError, match="tpu"):
        process.on_cpu()
