"""Start ``serve.py`` for one arm, wait until it answers, and stop all of its processes.

The server stops on leaving the ``with`` block, on an exception, and when this process is
killed outright.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from forespark.config import Config, load
from forespark.process import Child, NotReady, log_tail, port_problem

ROOT = Path(__file__).resolve().parent.parent.parent
BARRIER = "forespark.serving.barrier.BarrierScheduler"
# Sections that decide what is served; the others are other stages' business.
_SECTIONS = ("target", "drafter", "schedule", "serve", "run_dir")
_PER_SERVER = {"serve.port", "serve.trace", "serve.barrier", "target.name"}
_STOP_S = 45.0  # patience with a server that stops its engine, which takes its own time


def serve_command(
    config: Config,
    arm: str,
    *,
    trace: Path | None = None,
    script: Path | None = None,
    port: int | None = None,
    prefix_cache: bool = False,
) -> list[str]:
    """Command line that serves ``arm`` with the settings of ``config``.

    Everything that differs from the target's defaults is passed as an override, so a
    benchmark started with ``drafter.dir=...`` measures that drafter.
    """
    command = [sys.executable, str(script or ROOT / "serve.py")]
    command += [
        "--target",
        config.target.name,
        "--arm",
        arm,
        "--port",
        str(port or config.serve.port),
    ]
    if trace is not None:
        command.append(f"serve.trace={quote(str(trace))}")
    command += overrides(config)
    # Every batch must prefill from an empty cache (Appendix C).
    cache = [] if prefix_cache else ["--no-enable-prefix-caching"]
    return [*command, "--scheduler-cls", BARRIER, *cache]


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
        environment: dict[str, str] | None = None,  # beside this process's own
    ) -> None:
        self.command = command
        self.host, self.port = host, port
        self.log = Path(log)
        self.ready_timeout_s = ready_timeout_s
        self.label = label
        self.environment = {**os.environ, **(environment or {})}
        self.process: Child | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> Server:
        require_free_port(self.host, self.port)
        self.process = Child(self.command, env=self.environment, log=self.log)
        try:
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
        return self.process is not None and self.process.alive()

    def stop(self) -> None:
        """Stop the server and everything it started."""
        if self.process is not None:
            self.process.stop(patience_s=_STOP_S)
            self.process = None

    def _wait_until_ready(self) -> None:
        assert self.process is not None
        bar_format = "{desc}: starting, {elapsed}{postfix}"
        with tqdm(desc=self.label, bar_format=bar_format, leave=False) as progress:
            progress.set_postfix_str(f"at most {self.ready_timeout_s:.0f} s")
            try:
                for _ in self.process.until_ready(self.endpoint, self.ready_timeout_s):
                    progress.refresh()
            except NotReady as failure:
                raise ValueError(self.failure(str(failure))) from None

    def failure(self, what: str) -> str:
        """Show the end of the log on stderr and return a one-line message."""
        tqdm.write(f"--- end of {self.log}\n{log_tail(self.log)}\n---", file=sys.stderr)
        return f"{self.label}: the server {what}; see {self.log}"


def require_free_port(host: str, port: int) -> None:
    """Refuse a port on which something already listens.

    Raises:
        OSError: the port cannot be bound.
    """
    problem = port_problem(host, port)
    if problem is not None:
        raise OSError(
            f"port {port} on {host} cannot be used ({problem}): stop what listens "
            "there or pass serve.port=N"
        )
