"""Step time of vLLM's V2 model runner with CPU twins, relative to the V1 runner's.

    python scripts/bench/v2_step_time.py [--loads 1,8,32] [--bursts 12] [--out FILE]

Both engines are started once, each in its own process, and hold the same requests; they
take turns of a few decode steps, so that other work on the machine slows both alike. One
step time is the mean of a turn, the figure is the median over turns, the ratio the median
of the ratios of neighbouring turns. Writes a JSON record; needs about 8 GB of memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from forespark import record  # noqa: E402

PROMPT_TOKENS = 48
STEPS = 6  # decode steps in one turn


def serve(pipe: Connection, v2: bool, model: str) -> None:
    """Engine process: answers ``(command, argument)`` until told to quit."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.update(
        VLLM_USE_V2_MODEL_RUNNER=str(int(v2)),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",
    )
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=32
    ).llm_engine
    pipe.send("ready")
    names: list[str] = []
    while True:
        command, argument = pipe.recv()
        if command == "load":
            params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
            names = [f"{time.monotonic_ns()}-{i}" for i in range(argument)]
            for i, name in enumerate(names):
                tokens = [100 + (37 * i + 11 * j) % 40000 for j in range(PROMPT_TOKENS)]
                engine.add_request(name, {"prompt_token_ids": tokens}, params)
            waiting = set(names)
            while waiting:
                waiting -= {output.request_id for output in engine.step()}
            pipe.send(None)
        elif command == "steps":
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(argument):
                engine.step()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            pipe.send((wall / argument * 1e3, cpu / argument * 1e3))
        elif command == "clear":
            engine.abort_request(names)
            while engine.has_unfinished_requests():
                engine.step()
            pipe.send(None)
        else:
            return


class Engine:
    """Handle of one engine process."""

    def __init__(self, v2: bool, model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, v2, model), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.recv()

    def ask(self, command: str, argument: int = 0) -> Any:
        self.pipe.send((command, argument))
        return self.pipe.recv()

    def quit(self) -> None:
        self.pipe.send(("quit", 0))
        self.process.join(timeout=30)


def measure(v1: Engine, v2: Engine, load: int, bursts: int) -> dict[str, float]:
    """Median step times in milliseconds at ``load`` requests, and their ratio.

    ``cpu_ratio`` compares processor time of all threads: it moves little when other work
    shares the cores, where wall time is mostly noise.
    """
    for engine in (v1, v2):
        engine.ask("load", load)
        engine.ask("steps", STEPS)  # first steps compile and allocate
    pairs = [(v1.ask("steps", STEPS), v2.ask("steps", STEPS)) for _ in range(bursts)]
    for engine in (v1, v2):
        engine.ask("clear")
    ratios = [b[0] / a[0] for a, b in pairs]
    return {
        "load": load,
        "v1_ms": statistics.median(a[0] for a, _ in pairs),
        "v2_ms": statistics.median(b[0] for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "cpu_ratio": statistics.median(b[1] / a[1] for a, b in pairs),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "models/smollm2"))
    parser.add_argument("--loads", default="1,8,32")
    parser.add_argument("--bursts", type=int, default=12, help="turns per engine and load")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/smollm2/v2_step_time.json")
    given = parser.parse_args()
    v1, v2 = Engine(False, given.model), Engine(True, given.model)
    rows = []
    for load in (int(part) for part in given.loads.split(",")):
        rows.append(measure(v1, v2, load, given.bursts))
        print(
            "load {load:3d}: V1 {v1_ms:.1f} ms, V2 {v2_ms:.1f} ms, ratio {ratio:.3f}, "
            "processor time {cpu_ratio:.3f}".format_map(rows[-1]),
            flush=True,
        )
    v1.quit()
    v2.quit()
    record.write_json(
        given.out,
        {
            "schema": record.SCHEMA,
            "steps_per_turn": STEPS,
            "turns": given.bursts,
            "rows": rows,
            "load_average": os.getloadavg()[0],
            "provenance": record.provenance(),
        },
    )
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
