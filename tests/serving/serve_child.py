"""Child processes of the engine tests: one engine per process, results as JSON.

vLLM keeps process-wide state (thread binding, compiled twins, distributed groups), so every
engine of a test gets a process of its own. Half of such a process's time would go into
importing torch and vLLM; so one process per test run imports them, loads the plugin as an
engine does first of all, and forks a child for each job.

A job holds ``overrides`` (hydra), ``requests`` (fields of ``inprocess.Request``; a ``chat``
text instead of ``prompt`` ids is rendered with the target's template), ``load`` and
``engine`` (further engine arguments).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900.0
IMPORTS = (
    "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker", "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama", "vllm.model_executor.models.qwen3_dflash2",
    "vllm.model_executor.models.qwen3_dspark", "forespark.serving.inprocess",
)  # fmt: skip


def serve(folder: Path, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a process of its own; returns its ``answers`` and step records."""
    path = folder / f"{name}.job.json"
    path.write_text(json.dumps(job))
    result = path.with_suffix(".result")
    result.unlink(missing_ok=True)
    code = _nursery().run(path)
    assert code == 0 and result.exists(), path.with_suffix(".log").read_text()[-6000:]
    return json.loads(result.read_text())


@cache
def _nursery() -> _Nursery:
    return _Nursery()


class _Nursery:
    """The process that has imported everything; it takes paths of jobs, answers exit codes."""

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

    def run(self, path: Path) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(path, file=self.process.stdin, flush=True)
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.end()
            _nursery.cache_clear()
            return 1
        return int(line)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _run_job(path: Path) -> None:
    from forespark import config as configuration
    from forespark.serving.inprocess import Request, open_engine
    from forespark.serving.launch import enter_engine_environment

    job = json.loads(path.read_text())
    config = configuration.load(job["overrides"])
    enter_engine_environment(config)
    with open_engine(config, **job.get("engine", {})) as engine:
        requests = []
        for fields in job["requests"]:
            if "chat" in fields:
                text = fields.pop("chat")
                fields["prompt"] = engine.chat_ids([{"role": "user", "content": text}])
            requests.append(Request(**fields))
        answers = engine.run(requests, job["load"])
        prompts = [request.prompt for request in requests]
        result = {"answers": answers, "prompts": prompts, "steps": engine.steps}
        path.with_suffix(".result").write_text(json.dumps(result))


def _child(path: Path) -> None:
    """Run a job with its output in a log; does not return."""
    code = 1
    try:
        log = os.open(path.with_suffix(".log"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _run_job(path)
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
            _child(Path(line.strip()))
        status = os.waitpid(pid, 0)[1]
        print(os.waitstatus_to_exitcode(status), file=replies, flush=True)


if __name__ == "__main__":
    main()
