"""The server is started, watched and always stopped; vLLM itself is not needed for that."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forespark.data.server import ServerDied, serve_command, serve_env, served, served_target

HEALTHY = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive(pid: int) -> bool:
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
    ).stdout
    return bool(state.strip()) and not state.startswith("Z")


def test_everything_it_started_ends(tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "server.log"
    command = [sys.executable, "-c", HEALTHY, str(port)]
    with served(command, dict(os.environ), f"http://127.0.0.1:{port}", log, 30) as server:
        child = int(log.read_text().split()[1])
        assert alive(server.process.pid)
        assert alive(child)
    assert not alive(server.process.pid)
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_failing_start_shows_the_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('out of memory, sorry'); raise SystemExit(3)"]
    with (
        pytest.raises(ServerDied, match=r"code 3(.|\n)*out of memory, sorry"),
        served(command, dict(os.environ), "http://127.0.0.1:9", tmp_path / "log", 30),
    ):
        raise AssertionError("never ready")


def test_death_in_use_is_noticed(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", HEALTHY, str(port)]

    def lose_it() -> None:
        url = f"http://127.0.0.1:{port}"
        with served(command, dict(os.environ), url, tmp_path / "log", 30) as server:
            server.process.kill()
            time.sleep(20)  # the watcher interrupts this

    with pytest.raises(ServerDied, match="ended with code"):
        lose_it()


def test_never_ready_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        pytest.raises(ServerDied, match="not ready after"),
        served(command, dict(os.environ), "http://127.0.0.1:9", tmp_path / "log", 0.1),
    ):
        raise AssertionError("never ready")


def test_used_port_is_refused(configure: Any) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with (
            pytest.raises(ValueError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--endpoint"),
            served_target(configure(f"serve.port={port}")),
        ):
            raise AssertionError("must not start")


def test_command_carries_the_target(configure: Any) -> None:
    command = serve_command(
        configure("target.serve_args=[--seed,'3']", "target.max_num_seqs=5"), ["--x"]
    )
    assert command[-3:] == ["--seed", "3", "--x"]
    assert command[command.index("--max-num-seqs") + 1] == "5"


def test_target_server_keeps_the_users_thread_binding(
    configure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORESPARK_DEVICE", "cpu")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "99")
    env = serve_env(configure("target.cpu_kv_cache_gib=3"))
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0" and env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
