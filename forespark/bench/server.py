"""Start ``serve.py`` for one arm, wait until it answers, and stop all of its processes.

An engine is several processes, some in process groups of their own, so the whole tree is
stopped: on leaving the ``with`` block, on an exception, and when this process is killed
outright (the kernel then signals the server, which stops its engine).
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

import psutil
from tqdm import tqdm

from forespark.config import Config, load

ROOT = Path(__file__).resolve().parent.parent.parent
BARRIER = "forespark.serving.barrier.BarrierScheduler"
# Sections that decide what is served; the others are other stages' business.
_SECTIONS = ("target", "drafter", "schedule", "serve", "run_dir")
_PER_SERVER = {"serve.port", "serve.trace", "serve.barrier", "target.name"}
_STOP_S = 45.0  # patience with a server that stops its engine, which takes its own time
_ORPHAN_S = 5.0  # and with processes that it leaves behind
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
        self._tree: list[psutil.Process] = []

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
        """Stop the whole tree: ask the server, wait, then kill whatever is left."""
        if self.process is None:
            return
        self._remember_tree()
        with contextlib.suppress(ProcessLookupError):
            # Only the server: it knows how to end its engine in order.
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_S)
        left_s = _ORPHAN_S if self.process.returncode is not None else 0.0
        _, left = psutil.wait_procs(self._tree, timeout=left_s)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(left, timeout=_ORPHAN_S)
        self.process, self._tree = None, []

    def _remember_tree(self) -> None:
        """Add the server's present descendants to those to be stopped.

        Once the server itself is gone they have another parent and could not be found.
        """
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.process.pid).children(recursive=True)
            self._tree = list({*self._tree, *found})

    def _wait_until_ready(self) -> None:
        assert self.process is not None
        start = time.monotonic()
        bar_format = "{desc}: starting, {elapsed}{postfix}"
        with tqdm(desc=self.label, bar_format=bar_format, leave=False) as progress:
            progress.set_postfix_str(f"at most {self.ready_timeout_s:.0f} s")
            while time.monotonic() - start < self.ready_timeout_s:
                code = self.process.poll()
                if code is not None:
                    raise ValueError(self.failure(f"ended with exit code {code} while starting"))
                self._remember_tree()
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


def _end_with_parent() -> Callable[[], None] | None:
    """Linux: have the kernel end the server when this process dies without cleaning up."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)  # loaded before the fork: nothing may be imported after it
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) and None
