"""Start the target's OpenAI-compatible vLLM server and be sure to stop it.

vLLM is only ever a child process here: this room does not import it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forespark.config import Config, require_model
from forespark.process import Child, NotReady, cpu_environment, log_tail, on_cpu, port_problem

WATCH_SIGNAL = signal.SIGUSR1


class ServerDied(OSError):
    """The server ended by itself; the message carries the end of its log."""


@dataclass(frozen=True)
class Endpoint:
    """Where requests to the target go, and the name it is served under."""

    url: str  # without /v1
    model: str


@dataclass
class Server:
    """A running server."""

    url: str
    process: Child
    log: Path

    def check(self) -> None:
        """Raise ``ServerDied`` when the process is gone."""
        code = self.process.poll()
        if code is not None:
            raise self.failure(f"ended with code {code}")

    def failure(self, what: str) -> ServerDied:
        return ServerDied(f"the vLLM server {what}; the end of {self.log}:\n{log_tail(self.log)}")


# What torchrun tells its ranks; a server that one of them starts is no rank.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                   "MASTER_ADDR", "MASTER_PORT")  # fmt: skip


def serve_command(
    config: Config, extra_args: Sequence[str] = (), devices: str | None = None
) -> list[str]:
    """Command line of ``vllm serve`` for the plain target, over all of ``devices`` if given."""
    target = config.target
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", target.model]
    command += ["--host", config.serve.host, "--port", str(config.serve.port)]
    command += ["--dtype", target.dtype, "--max-model-len", str(target.max_model_len)]
    command += ["--max-num-seqs", str(max(target.max_num_seqs, 1))]
    command += ["--max-num-batched-tokens", str(target.max_num_batched_tokens)]
    command += ["--kv-cache-dtype", target.kv_cache_dtype]
    ranks = target.tensor_parallel_size if devices is None else len(devices.split(","))
    if ranks > 1:
        command += ["--tensor-parallel-size", str(ranks)]
    if target.expert_parallel:
        command.append("--enable-expert-parallel")
    if on_cpu():
        command.append("--enforce-eager")
    return [*command, *target.serve_args, *extra_args]


def serve_env(config: Config, devices: str | None = None) -> dict[str, str]:
    """Environment of the server: the plain target runs on the V1 runner on a CPU."""
    target = config.target
    env = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices
    if Path(target.model).is_dir():
        env.setdefault("HF_HUB_OFFLINE", "1")
    if on_cpu():
        shared = cpu_environment(target.cpu_kv_cache_gib)
        binding = "VLLM_CPU_OMP_THREADS_BIND"
        env.setdefault(binding, shared.pop(binding))  # the user's own binding wins
        env |= {**shared, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    return env


def refuse_used_port(host: str, port: int) -> None:
    """Raise ``ValueError`` when something listens on the port already."""
    problem = port_problem(host, port)
    if problem is not None:
        raise ValueError(
            f"cannot listen on {host}:{port} ({problem}); choose another serve.port, "
            f"or use the server that is there with --endpoint http://{host}:{port}"
        )


def _wait(server: Server, timeout_s: float) -> None:
    waited = shown = 0.0
    try:
        for waited in server.process.until_ready(server.url, timeout_s):
            if waited - shown >= 5:
                shown = waited
                print(
                    f"waiting for the vLLM server: {waited:.0f} s (log: {server.log})",
                    file=sys.stderr,
                )
    except NotReady as failure:
        raise server.failure(str(failure)) from None
    print(f"vLLM server ready at {server.url} after {waited:.0f} s", file=sys.stderr)


def _watch(server: Server, done: threading.Event) -> None:
    while not done.wait(1.0):
        if not server.process.alive():
            # Hundreds of requests would each retry against a dead server.
            os.kill(os.getpid(), WATCH_SIGNAL)
            return


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let the watcher interrupt the main thread.

    With a signal of its own: SIGINT is ignored in jobs that a shell started in the background.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(WATCH_SIGNAL, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(WATCH_SIGNAL, before)


@contextmanager
def served(
    command: Sequence[str], env: dict[str, str], url: str, log: Path, timeout_s: float
) -> Iterator[Server]:
    """Run a server command until the block ends; nothing it started survives.

    Raises:
        ServerDied: it ended before or while it was needed, or was not ready in time.
    """
    server, done = Server(url, Child(command, env=env, log=log), log), threading.Event()
    try:
        _wait(server, timeout_s)
        with _interruptible():
            threading.Thread(target=_watch, args=(server, done), daemon=True).start()
            yield server
    except (KeyboardInterrupt, SystemExit):
        server.check()  # the watcher's interrupt: say why instead
        raise
    finally:
        done.set()
        server.process.stop()


@contextmanager
def served_target(
    config: Config,
    *,
    log: Path | None = None,
    extra_args: Sequence[str] = (),
    devices: str | None = None,
) -> Iterator[Server]:
    """The plain target behind ``http://serve.host:serve.port`` while the block runs.

    Args:
        devices: GPUs that it runs on, as in CUDA_VISIBLE_DEVICES; None: as the configuration
            of the target has them.

    Raises:
        ValueError: the port is in use, or the target's folder is missing.
        ServerDied: the server did not start or died; the message ends with its log.
    """
    require_model(config.target.model)
    refuse_used_port(config.serve.host, config.serve.port)
    url = f"http://{config.serve.host}:{config.serve.port}"
    log = log or Path(config.run_dir) / "logs" / "target-server.log"
    command, env = serve_command(config, extra_args, devices), serve_env(config, devices)
    with served(command, env, url, log, config.serve.ready_timeout_s) as server:
        yield server


def check_endpoint(url: str, config: Config) -> Endpoint:
    """A running server of the target, under ``target.model`` or ``target.name`` (serve.py's).

    Accepts the URL with or without ``/v1`` or ``/v1/chat/completions``.

    Raises:
        ValueError: nothing answers there, or it serves another model.
    """
    base = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{base}/v1/models", timeout=20) as reply:
            served_models: list[Any] = [entry["id"] for entry in json.load(reply)["data"]]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        raise ValueError(
            f"--endpoint {url}: no OpenAI-compatible server answers there ({error})"
        ) from None
    model, name = config.target.model, config.target.name
    for known in (model, name):
        if known in served_models:
            return Endpoint(base, known)
    raise ValueError(
        f"--endpoint {url} serves {', '.join(map(str, served_models))}, the target is {model} "
        f"({name}): start it with --served-model-name {name}, or set target.model"
    )
