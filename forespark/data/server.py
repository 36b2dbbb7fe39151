"""Start the target's OpenAI-compatible vLLM server and be sure to stop it.

vLLM is only ever a child process here: this room does not import it.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forespark.config import Config

_STOP_SECONDS = 20.0
_LOG_LINES = 15


class ServerDied(OSError):
    """The server ended by itself; the message carries the end of its log."""


@dataclass
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise ``ServerDied`` when the process is gone."""
        code = self.process.poll()
        if code is not None:
            raise ServerDied(
                f"the vLLM server ended with code {code}; the end of {self.log}:\n"
                f"{log_tail(self.log)}"
            )


def log_tail(log: Path, lines: int = _LOG_LINES) -> str:
    """Last lines of a log, indented."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "  (no log)"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])


def on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def serve_command(config: Config, extra_args: Sequence[str] = ()) -> list[str]:
    """Command line of ``vllm serve`` for the plain target."""
    target = config.target
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", target.model]
    command += ["--host", config.serve.host, "--port", str(config.serve.port)]
    command += ["--dtype", target.dtype, "--max-model-len", str(target.max_model_len)]
    command += ["--max-num-seqs", str(max(target.max_num_seqs, 1))]
    command += ["--max-num-batched-tokens", str(target.max_num_batched_tokens)]
    command += ["--kv-cache-dtype", target.kv_cache_dtype]
    if target.tensor_parallel_size > 1:
        command += ["--tensor-parallel-size", str(target.tensor_parallel_size)]
    if target.expert_parallel:
        command.append("--enable-expert-parallel")
    if on_cpu():
        command.append("--enforce-eager")
    return [*command, *target.serve_args, *extra_args]


def serve_env(config: Config) -> dict[str, str]:
    """Environment of the server: the plain target runs on the V1 runner on a CPU."""
    env = dict(os.environ)
    if Path(config.target.model).is_dir():
        env.setdefault("HF_HUB_OFFLINE", "1")
    if on_cpu():
        cores = sorted(os.sched_getaffinity(0))
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        env["VLLM_CPU_KVCACHE_SPACE"] = str(config.target.cpu_kv_cache_gib)
        env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return env


def refuse_used_port(host: str, port: int) -> None:
    """Raise ``ValueError`` when something listens on the port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another serve.port, "
                f"or use the server that is there with --endpoint http://{host}:{port}"
            ) from None


def _die_with_parent() -> None:
    # A parent killed outright runs no clean-up: let the kernel end the server then.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 = PR_SET_PDEATHSIG


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and everything it started."""
    for number, patience in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.poll()


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _wait(server: Server, timeout_s: float) -> None:
    started = time.monotonic()
    shown = 0.0
    while not ready(server.url):
        server.check()
        waited = time.monotonic() - started
        if waited > timeout_s:
            raise ServerDied(
                f"the vLLM server was not ready after {timeout_s:.0f} s (serve.ready_timeout_s); "
                f"the end of {server.log}:\n{log_tail(server.log)}"
            )
        if waited - shown >= 5:
            shown = waited
            print(
                f"waiting for the vLLM server: {waited:.0f} s (log: {server.log})", file=sys.stderr
            )
        time.sleep(0.5)
    print(
        f"vLLM server ready at {server.url} after {time.monotonic() - started:.0f} s",
        file=sys.stderr,
    )


def _watch(server: Server, done: threading.Event) -> None:
    while not done.wait(1.0):
        if server.process.poll() is not None:
            # Hundreds of requests would each retry against a dead server.
            os.kill(os.getpid(), signal.SIGINT)
            return


@contextmanager
def served(
    command: Sequence[str], env: dict[str, str], url: str, log: Path, timeout_s: float
) -> Iterator[Server]:
    """Run a server command until the block ends; nothing it started survives.

    Raises:
        ServerDied: it ended before or while it was needed, or was not ready in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(command),
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    atexit.register(stop, process)
    server, done = Server(url, process, log), threading.Event()
    try:
        _wait(server, timeout_s)
        threading.Thread(target=_watch, args=(server, done), daemon=True).start()
        yield server
    except (KeyboardInterrupt, SystemExit):
        server.check()  # the watcher's interrupt: say why instead
        raise
    finally:
        done.set()
        stop(process)
        atexit.unregister(stop)


@contextmanager
def served_target(
    config: Config, *, log: Path | None = None, extra_args: Sequence[str] = ()
) -> Iterator[Server]:
    """The plain target behind ``http://serve.host:serve.port`` while the block runs.

    Raises:
        ValueError: the port is in use.
        ServerDied: the server did not start or died; the message ends with its log.
    """
    refuse_used_port(config.serve.host, config.serve.port)
    url = f"http://{config.serve.host}:{config.serve.port}"
    log = log or Path(config.run_dir) / "logs" / "target-server.log"
    command = serve_command(config, extra_args)
    with served(command, serve_env(config), url, log, config.serve.ready_timeout_s) as server:
        yield server


def check_endpoint(url: str, model: str) -> str:
    """Base URL of an endpoint that serves ``model``.

    Accepts the URL with or without ``/v1`` or ``/v1/chat/completions``.

    Raises:
        ValueError: nothing answers there, or it serves another model.
    """
    base = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{base}/v1/models", timeout=20) as reply:
            served_models: list[Any] = [entry["id"] for entry in json.load(reply)["data"]]
    except (OSError, ValueError, KeyError, urllib.error.URLError) as error:
        raise ValueError(
            f"--endpoint {url}: no OpenAI-compatible server answers there ({error})"
        ) from None
    if model not in served_models:
        raise ValueError(
            f"--endpoint {url} serves {', '.join(map(str, served_models))}, the target is {model}: "
            f"start it with --served-model-name {model}, or set target.model"
        )
    return base
