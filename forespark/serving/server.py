"""Run one arm as a server in the foreground: check, start, report readiness, clean up."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from tqdm import tqdm

from forespark.config import Config
from forespark.serving.artifacts import resolve
from forespark.serving.launch import engine_environment, serve_command

_STOP_S = 20.0  # patience between asking the server to stop and killing it


def run_server(config: Config, extra: list[str], *, dry_run: bool = False) -> int:
    """Serve the arm of ``config`` until it ends or is interrupted; returns its exit code.

    Args:
        extra: flags handed to ``vllm serve``; they win over ours.
        dry_run: print environment and command, check files, start nothing.

    Raises:
        ValueError: a file the arm needs is missing, corrupt or foreign.
        OSError: the port is taken.
    """
    arm = config.arm
    adaptive = arm.verify == "adaptive"
    tables = adaptive and arm.drafter == "forespark"
    artifacts = resolve(config, tables=tables, calibration=adaptive)
    command = serve_command(config, artifacts, extra)
    environment = engine_environment(config)
    if dry_run:
        print("environment: " + " ".join(f"{k}={v}" for k, v in environment.items()))
        print("command:     " + " ".join(command))
        return 0
    _require_free_port(config.serve.host, config.serve.port)
    with tempfile.TemporaryDirectory(prefix="forespark-metrics-") as metrics:
        # Engine and API server are two processes; their metrics meet in these files.
        environment["PROMETHEUS_MULTIPROC_DIR"] = metrics
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, start_new_session=True
        )
        ready = threading.Thread(target=_report_ready, args=(config, process), daemon=True)
        ready.start()
        try:
            return process.wait()
        finally:
            _stop(process)


def _require_free_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            raise OSError(
                f"port {port} on {host} is in use: stop what listens there or give --port"
            ) from None


def _report_ready(config: Config, process: subprocess.Popen[bytes]) -> None:
    """Show elapsed time until ``/health`` answers, then say where the server is."""
    url = f"http://{config.serve.host}:{config.serve.port}"
    began = time.monotonic()
    with tqdm(desc=f"starting {config.arm.name}", unit="s", file=sys.stderr) as bar:
        while process.poll() is None:
            if _answers(f"{url}/health"):
                break
            if time.monotonic() - began > config.serve.ready_timeout_s:
                bar.write(f"not ready after {config.serve.ready_timeout_s:.0f} s", file=sys.stderr)
                _stop(process)
                return
            time.sleep(1.0)
            bar.update(1)
    if process.poll() is None:
        print(f"ready: arm {config.arm.name} at {url}/v1, metrics at {url}/metrics", flush=True)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server's whole process group; an engine is several processes."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
            if sign == signal.SIGKILL:
                return
