"""Child process of the engine tests: one engine per process, results as JSON on stdout.

    python serve_child.py JOB.json

The job holds ``overrides`` (hydra), ``requests`` (fields of ``inprocess.Request``; a
``chat`` text instead of ``prompt`` ids is rendered with the target's template), ``load``
and ``engine`` (further engine arguments). vLLM keeps process-wide state (thread binding,
compiled twins, distributed groups), so every engine of a test gets a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def serve(folder: Path, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a child process; returns its ``answers`` and step records."""
    import os

    path = folder / f"{name}.job.json"
    path.write_text(json.dumps(job))
    # The tests' own interpreter mode must not reach an engine.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, str(path)],
        capture_output=True, text=True, timeout=900, env=environment, cwd=ROOT,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, str(ROOT))
    from forespark import config as configuration
    from forespark.serving.launch import enter_engine_environment

    config = configuration.load(job["overrides"])
    enter_engine_environment(config)
    from forespark.serving.inprocess import Request, open_engine

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
        print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
