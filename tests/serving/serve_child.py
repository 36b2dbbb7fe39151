"""Child process of the engine tests: one engine, its answers and steps as JSON.

    python serve_child.py JOB.json RESULT.json

The job holds ``overrides`` (hydra), ``requests`` (fields of ``inprocess.Request``; a
``chat`` text instead of ``prompt`` ids is rendered with the target's template), ``load``
and ``engine`` (further engine arguments).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def serve(folder: Path, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a process of its own; returns its ``answers`` and step records."""
    import nursery

    path, result = folder / f"{name}.job.json", folder / f"{name}.result.json"
    path.write_text(json.dumps(job))
    result.unlink(missing_ok=True)
    nursery.run(Path(__file__), [path, result], folder / f"{name}.log")
    return json.loads(result.read_text())


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    from forespark import config as configuration
    from forespark.serving.inprocess import Request, open_engine
    from forespark.serving.launch import enter_engine_environment

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
        Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
