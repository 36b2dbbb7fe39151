"""Run one arm as a server in the foreground: check, start, report readiness, clean up."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import threading

from tqdm import tqdm

from forespark.config import Config
from forespark.memory import needs
from forespark.process import Child, NotReady, port_problem
from forespark.serving.artifacts import resolve
from forespark.serving.launch import engine_environment, serve_command


def run_server(config: Config, extra: list[str], *, dry_run: bool = False) -> int:
    """Serve the arm of ``config`` until it ends or is interrupted; returns its exit code.

    Args:
        extra: flags handed to ``vllm serve``; they win over ours.
        dry_run: print environment and command, check files, start nothing.

    Raises:
        ValueError: a file the arm needs is missing, corrupt or foreign.
        OSError: the port is taken.
    """
    artifacts = resolve(config)
    command = serve_command(config, artifacts, extra)
    environment = engine_environment(config)
    if dry_run:
        print("environment: " + " ".join(f"{k}={v}" for k, v in environment.items()))
        print("command:     " + shlex.join(command))
        print(*needs(config), sep="\n")
        return 0
    _require_free_port(config.serve.host, config.serve.port)
    with tempfile.TemporaryDirectory(prefix="forespark-metrics-") as metrics:
        # Engine and API server are two processes; their metrics meet in these files.
        environment["PROMETHEUS_MULTIPROC_DIR"] = metrics
        server = Child(command, env={**os.environ, **environment})
        try:
            threading.Thread(target=_report_ready, args=(config, server), daemon=True).start()
            return server.wait()
        finally:
            server.stop(signal.SIGINT)


def _require_free_port(host: str, port: int) -> None:
    problem = port_problem(host, port)
    if problem is not None:
        raise OSError(
            f"port {port} on {host} cannot be used ({problem}): stop what listens there or "
            "give --port"
        )


def _report_ready(config: Config, server: Child) -> None:
    """Show elapsed time until ``/health`` answers, then say where the server is."""
    url = f"http://{config.serve.host}:{config.serve.port}"
    look = {"bar_format": "{desc}: {elapsed}", "mininterval": 1.0, "file": sys.stderr}
    with tqdm(desc=f"starting {config.arm.name}", **look) as bar:
        try:
            for _ in server.until_ready(url, config.serve.ready_timeout_s):
                bar.update()  # shown once a second: it may go into a log
        except NotReady as failure:
            if server.alive():  # the main thread reports an end
                bar.write(f"the server {failure}", file=sys.stderr)
                server.stop(signal.SIGINT)
            return
    print(f"ready: arm {config.arm.name} at {url}/v1, metrics at {url}/metrics", flush=True)
