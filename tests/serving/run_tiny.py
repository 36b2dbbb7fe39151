"""Child process of the engine tests: one engine per process, results as JSON on stdout.

    python run_tiny.py FOLDER ARM TEMPERATURE COUNT TOKENS [override ...]

vLLM keeps process-wide state (thread binding, compiled twins, distributed groups), so
every engine of a test gets a process of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    folder, arm, temperature, count, tokens, *overrides = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parent))
    from tiny import configuration_for

    from forespark.serving.launch import enter_engine_environment

    config = configuration_for(Path(folder), arm, *overrides)
    enter_engine_environment(config)
    from forespark.serving.inprocess import Request, open_engine

    prompts = [[5, 7, 9, 3], *([3 + i % 9, 5, 3 + (7 * i) % 9] * (1 + i % 4) for i in range(31))]
    requests = [
        Request(
            prompts[i % len(prompts)] if float(temperature) == 0 else prompts[0],
            int(tokens),
            temperature=float(temperature),
            seed=i if float(temperature) > 0 else None,
            ignore_eos=True,
        )
        for i in range(int(count))
    ]
    with open_engine(config, skip_tokenizer_init=True) as engine:
        answers = engine.run(requests, 16)
        print("RESULT " + json.dumps({"answers": answers, "steps": engine.steps}))


if __name__ == "__main__":
    main()
