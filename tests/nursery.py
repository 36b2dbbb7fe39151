"""A process that has imported torch and vLLM and forks one child per program.

vLLM keeps process-wide state (thread binding, compiled twins, distributed groups), so every
engine of a test gets a process of its own. Half of such a process's life would go into
imports. So one process per test run does them once, after loading the plugin, which is what
an engine does first of all, and each program runs in a fork of it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 900.0
IMPORTS = (
    "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker", "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama", "vllm.model_executor.models.qwen3_dflash2",
    "vllm.model_executor.models.qwen3_dspark", "forespark.serving.inprocess",
)  # fmt: skip


def run(program: Path, arguments: Sequence[str | Path], log: Path) -> None:
    """Run a Python program to its end, its output in ``log``; a failure shows the log's end."""
    job = {"program": str(program), "arguments": [str(a) for a in arguments], "log": str(log)}
    code = _nursery().run(job)
    # nanobind lists what it leaks at exit, hundreds of lines after the traceback.
    said = [line for line in log.read_text().splitlines() if "leaked" not in line]
    assert code == 0, "\n".join([f"exit code {code}", *said[-60:]])


@cache
def _nursery() -> _Nursery:
    return _Nursery()


class _Nursery:
    """Takes jobs, one JSON line each, and answers exit codes."""

    def __init__(self) -> None:
        from forespark.process import cpu_environment, on_cpu

        # The tests' own interpreter mode must not reach an engine.
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= cpu_environment(1) if on_cpu() else {}
        environment |= {"FORESPARK_ENGINE_ENV": "1", "VLLM_USE_V2_MODEL_RUNNER": "1",
                        "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, __file__], env=environment, cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, start_new_session=True,
        )  # fmt: skip
        atexit.register(self.end)

    def run(self, job: dict[str, Any]) -> int:
        Path(job["log"]).write_text("")
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:  # it hangs, or is gone: the next program gets a new one
            self.end()
            _nursery.cache_clear()
            return -1
        return int(line)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _child(job: dict[str, Any]) -> None:
    """Be the program; does not return."""
    code = 1
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = [job["program"], *job["arguments"]]
        runpy.run_path(job["program"], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no reply
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for name in IMPORTS:
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _child(json.loads(line))
        status = os.waitpid(pid, 0)[1]
        print(os.waitstatus_to_exitcode(status), file=replies, flush=True)


if __name__ == "__main__":
    main()
