"""Server processes: a free port, a start, a wait until it answers, and an end that is sure.

An engine is several processes, some in process groups of their own. A ``Child`` is stopped
with all of them: by ``stop``, at the latest when this process exits. When this process is
killed outright the kernel signals the child, which then ends its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

STOP_S = 20.0  # patience between asking a server to stop and killing it
ORPHAN_S = 5.0  # and with processes that it leaves behind
_POLL_S = 0.25
_LOG_LINES = 25
_PR_SET_PDEATHSIG = 1


class NotReady(Exception):
    """A server ended, or took too long, before it answered; reads on after "the server"."""


class Child(subprocess.Popen[bytes]):
    """A running server, in a session of its own, and every process that it starts."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        """Start ``command``.

        Args:
            env: The whole environment; None inherits ours.
            log: File for both output streams, emptied first; None inherits ours.

        Raises:
            OSError: the program or the log's folder cannot be used.
        """
        self._tree: set[psutil.Process] = set()
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.nullcontext() if log is None else log.open("wb") as out:
            super().__init__(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )
        # A second Ctrl-C may cut a caller's own clean-up short.
        atexit.register(self.stop)

    def alive(self) -> bool:
        return self.poll() is None

    def until_ready(self, url: str, timeout_s: float) -> Iterator[float]:
        """Yield the seconds waited so far, a few times a second, until the server answers.

        Raises:
            NotReady: it ended, or did not answer within ``timeout_s`` seconds.
        """
        start = time.monotonic()
        while True:
            code = self.poll()
            if code is not None:
                raise NotReady(f"ended with exit code {code} while starting")
            self._remember_tree()
            if healthy(url):
                return
            waited = time.monotonic() - start
            if waited > timeout_s:
                raise NotReady(f"was not ready after {timeout_s:.0f} s (serve.ready_timeout_s)")
            yield waited
            time.sleep(_POLL_S)

    def stop(self, ask: signal.Signals = signal.SIGTERM, patience_s: float | None = None) -> None:
        """End the server and all it started: ask, wait, then kill whatever is left.

        Args:
            ask: Signal to the server's process group. What has left the group is not asked:
                the server knows how to end it in order.
            patience_s: Seconds it may take; None means ``STOP_S``.
        """
        self._remember_tree()
        self._signal_group(ask)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(STOP_S if patience_s is None else patience_s)
        # A server that did not end in time will not end its children either.
        left = _outlasting(self._tree, 0.0 if self.alive() else ORPHAN_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._signal_group(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(ORPHAN_S)
        _outlasting(left, ORPHAN_S)
        self._tree = set()
        atexit.unregister(self.stop)

    def _remember_tree(self) -> None:
        """Add the present descendants to those to be ended.

        Once the server itself is gone they have another parent and could not be found.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.pid).children(recursive=True)
            # A new set: another thread may be going through the old one.
            self._tree = self._tree | set(found)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _end_with_parent() -> Callable[[], None] | None:
    """Linux: have the kernel end the server when this process dies without cleaning up."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)  # loaded before the fork: nothing may be imported after it
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) and None


def _outlasting(processes: set[psutil.Process], timeout_s: float) -> set[psutil.Process]:
    """Those of ``processes`` that still run after at most ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = {process for process in processes if _runs(process)}
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    # Some containers have nobody to collect orphans: they stay zombies for ever.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def healthy(url: str) -> bool:
    """True when ``url``/health answers 200."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def port_problem(host: str, port: int) -> str | None:
    """Why no server can listen on the port; None when one can.

    Raises:
        ValueError: there is no such port.
    """
    if not 1 <= port <= 65535:
        raise ValueError(f"port: got {port}, want 1..65535")
    with socket.socket() as probe:
        # As the server itself: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def log_tail(log: Path, lines: int = _LOG_LINES) -> str:
    """Last lines of a log, indented."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "  (no log)"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])


def on_cpu() -> bool:
    """True when no CUDA device will be used; decided without importing torch.

    Raises:
        ValueError: ``FORESPARK_DEVICE`` is neither cpu nor cuda.
    """
    forced = os.environ.get("FORESPARK_DEVICE")
    if forced is not None:
        if forced not in ("cpu", "cuda"):
            raise ValueError(f"FORESPARK_DEVICE: got {forced!r}, want cpu or cuda")
        return forced == "cpu"
    return not Path("/dev/nvidiactl").exists()


def cpu_environment(kv_cache_gib: int) -> dict[str, str]:
    """Variables that a vLLM engine on a CPU needs on top of ours."""
    cores = sorted(os.sched_getaffinity(0))
    env = {
        # The default leaves a core to the front end; on two cores that halves the engine.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
    }
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    loaded = os.environ.get("LD_PRELOAD", "").split(":")
    if openmp.is_file() and str(openmp) not in loaded:
        # Without it torch and vLLM's kernels run two OpenMP pools that fight for the cores.
        # A process that imported vLLM has GNU's there, and vLLM refuses both together.
        others = [library for library in loaded if library and "libgomp" not in library]
        env["LD_PRELOAD"] = ":".join([str(openmp), *others])
    return env
