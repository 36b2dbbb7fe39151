"""Start ``serve.py`` for one arm, wait until it answers, and stop all of its processes.

An engine is several processes, so the server runs in a process group of its own and the
group is what gets stopped: on leaving the ``with`` block, on an exception, and when this
process is killed outright (the kernel then signals the server).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from forespark.config import Config, load

ROOT = Path(__file__).resolve().parent.parent.parent
BARRIER = "forespark.serving.barrier.BarrierScheduler"
# Sections that decide what is served; the others are other stages' business.
_SECTIONS = ("target", "drafter", "schedule", "serve", "run_dir")
_PER_SERVER = {"serve.port", "serve.trace", "serve.barrier", "target.name"}
_STOP_S = 20.0  # patience between asking a server to stop and killing it
_LOG_LINES = 25
_PR_SET_PDEATHSIG = 1


def serve_command(
    config: Config, arm: str, *, trace: Path | None = None, script: Path | None = None
) -> list[str]:
    """Command line that serves ``arm`` with the settings of ``config``.

    Everything that differs from the target's defaults is passed as an override, so a
    benchmark started with ``drafter.dir=...`` measures that drafter.
    """
    command = [sys.executable, str(script or ROOT / "serve.py")]
    command += ["--target", config.target.name, "--arm", arm, "--port", str(config.serve.port)]
    if trace is not None:
        command.append(f"serve.trace={quote(str(trace))}")
    command += overrides(config)
    # Every batch must prefill from an empty cache (Appendix C).
    return [*command, "--scheduler-cls", BARRIER, "--no-enable-prefix-caching"]


def overrides(config: Config) -> list[str]:
    """Hydra overrides that turn the target's defaults into ``config``."""
    default = asdict(load([f"target={config.target.name}"]))
    found = []
    for path, value in _leaves(asdict(config)).items():
        if path.split(".")[0] not in _SECTIONS or path in _PER_SERVER:
            continue
        if value != _leaves(default)[path]:
            found.append(f"{path}={quote(value)}")
    return found


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _leaves(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def quote(value: Any) -> str:
    """A value in hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(quote(item) for item in value)}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return str(value)


class Server:
    """A served arm. ``with Server(command, ...) as server`` is ready on entry.

    Raises (on entry):
        OSError: the port is taken.
        ValueError: the server ended or was not ready in time; its last lines go to stderr.
    """

    def __init__(
        self,
        command: list[str],
        *,
        host: str,
        port: int,
        log: Path,
        ready_timeout_s: float,
        label: str = "server",
    ) -> None:
        self.command = command
        self.host, self.port = host, port
        self.log = Path(log)
        self.ready_timeout_s = ready_timeout_s
        self.label = label
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> Server:
        require_free_port(self.host, self.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    self.command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    cwd=ROOT,
                    start_new_session=True,
                    preexec_fn=_end_with_parent(),
                )
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log_tail(self) -> str:
        """Last lines of the server's output."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_LOG_LINES:])

    def stop(self) -> None:
        """Stop the whole group: ask, wait, then kill whatever is left."""
        if self.process is None:
            return
        group = self.process.pid  # a session leader's group has its own id
        _signal_group(group, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while _group_alive(group) and time.monotonic() < deadline:
            self.process.poll()  # reaps the leader, which would count as alive otherwise
            time.sleep(0.05)
        _signal_group(group, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def _wait_until_ready(self) -> None:
        assert self.process is not None
        start = time.monotonic()
        bar_format = "{desc}: starting, {elapsed} (at most {postfix})"
        with tqdm(desc=self.label, bar_format=bar_format, leave=False) as progress:
            progress.set_postfix_str(f"{self.ready_timeout_s:.0f} s")
            while time.monotonic() - start < self.ready_timeout_s:
                code = self.process.poll()
                if code is not None:
                    raise ValueError(self.failure(f"ended with exit code {code} while starting"))
                if _answers(f"{self.endpoint}/health"):
                    return
                progress.refresh()
                time.sleep(0.25)
        raise ValueError(
            self.failure(
                f"was not ready after {self.ready_timeout_s:.0f} s (serve.ready_timeout_s)"
            )
        )

    def failure(self, what: str) -> str:
        """Show the end of the log on stderr and return a one-line message."""
        tqdm.write(f"--- end of {self.log}\n{self.log_tail()}\n---", file=sys.stderr)
        return f"{self.label}: the server {what}; see {self.log}"


def require_free_port(host: str, port: int) -> None:
    """Refuse a port on which something already listens.

    Raises:
        OSError: the port cannot be bound.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(
                f"port {port} on {host} cannot be used ({error.strerror}): stop what listens "
                "there or pass serve.port=N"
            ) from None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _end_with_parent() -> Callable[[], None] | None:
    """Linux: have the kernel end the server when this process dies without cleaning up."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)  # loaded before the fork: nothing may be imported after it
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) and None
