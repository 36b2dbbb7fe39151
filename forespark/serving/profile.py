"""Step timings of the served engine: the raw material of ``latency.json``.

Real decode-only steps at every (batch size, verified drafts per request): requests of a
common context length draft exactly v tokens and verify all of them. The same steps price
drafting at ``batch * (v + 1)`` packed tokens, as the time on top of a step that drafts
nothing, and the host's share between steps. Measured lines are appended as they come, so
a killed run resumes where it was.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from forespark import record
from forespark.config import Config
from forespark.serving.artifacts import latency_key
from forespark.serving.inprocess import Engine, Request, open_engine

WARM_STEPS = 3  # first steps of a point: caches and allocators settle


def profile_steps(config: Config, path: Path, limit: int | None = None) -> None:
    """Measure every point that ``path`` does not hold yet.

    Args:
        limit: at most this many batch sizes and draft lengths, spread over their range.

    Raises:
        ValueError: a point needs more requests or drafts than the engine holds.
    """
    K = config.drafter.num_speculative_tokens
    batches = _spread(config.curves.batch_sizes, limit)
    lengths = _spread(sorted({0, *config.curves.verified_per_request}), limit)
    points = [(batch, drafts) for batch in batches for drafts in lengths]
    wrong = [(b, v) for b, v in points if b > config.target.max_num_seqs or not 0 <= v <= K]
    if wrong:
        raise ValueError(
            f"curves: points {wrong} (batch, drafts) are outside max_num_seqs="
            f"{config.target.max_num_seqs} and K={K}; change curves.batch_sizes"
        )
    key = latency_key(config, name=config.arm.drafter)
    done = _done(path, key)
    todo = [point for point in points if point not in done]
    if not todo:
        return
    config.arm.draft, config.arm.verify = "planned", "full"
    config.serve.force_length = K
    with open_engine(config, tables=False, calibration=False) as engine:
        if not path.exists():
            record.append_jsonl(path, {"kind": "header", "key": key})
        idle: dict[int, float] = {}
        for batch, drafts in tqdm(todo, desc="latency points", unit="point"):
            if batch not in idle:
                idle[batch] = float(np.median(_steps(config, engine, batch, 0)["draft_ms"]))
            _measure(config, engine, batch, drafts, idle[batch], path)


def _spread(values: list[int], limit: int | None) -> list[int]:
    """At most ``limit`` (but never fewer than two) values, first and last included."""
    if limit is None or limit >= len(values):
        return values
    picks = np.linspace(0, len(values) - 1, max(limit, 2)).round().astype(int)
    return [values[i] for i in picks]


def _done(path: Path, key: dict[str, Any]) -> set[tuple[int, int]]:
    """Points whose closing line is in the file; a foreign file is started over."""
    if not path.exists():
        return set()
    rows = record.read_jsonl(path)
    if not rows or rows[0].get("key") != key:
        path.unlink()
        return set()
    return {tuple(row["point"]) for row in rows if "point" in row}  # type: ignore[misc]


def _steps(config: Config, engine: Engine, batch: int, drafts: int) -> dict[str, list[float]]:
    """Run one point; times of its decode-only steps with the whole batch, ms."""
    curves = config.curves
    engine.planner.force_length = drafts
    engine.clear()
    # Every step emits 1 to drafts + 1 tokens. Requests must outlive the wanted steps and
    # those in which the last ones are still prefilled beside their own decoding.
    free = max(config.target.max_num_batched_tokens - batch * (drafts + 1), 1)
    prefill = math.ceil(batch * curves.context_len / free) + 2
    tokens = (curves.steps_per_point + WARM_STEPS + prefill) * (drafts + 1)
    room = config.target.max_model_len - curves.context_len - 1
    vocabulary = len(engine.tokenizer)
    rng = np.random.default_rng(0)
    requests = [
        Request(
            rng.integers(100, vocabulary, curves.context_len).tolist(),
            min(tokens, room),
            ignore_eos=True,
        )
        for _ in range(batch)
    ]
    _stop_after(engine, requests, batch, curves.steps_per_point + WARM_STEPS)
    rows = [
        row
        for row in engine.steps
        if row["prefill"] == 0 and row["n"] == batch and row["B"] == batch * drafts
        and row["drafted"] == batch * drafts
    ][WARM_STEPS:]  # fmt: skip
    return {
        name: [row[name] for row in rows if row[name] is not None]
        for name in ("verify_ms", "draft_ms", "other_ms")
    }


def _stop_after(engine: Engine, requests: list[Request], batch: int, steps: int) -> None:
    """Run until ``steps`` decode steps of the whole batch are recorded, then abort."""
    engine.start(requests)
    while engine.busy:
        engine.advance()
        full = [row for row in engine.steps if row["prefill"] == 0 and row["n"] == batch]
        if len(full) > steps:
            engine.abort_all()


def _measure(
    config: Config, engine: Engine, batch: int, drafts: int, idle_ms: float, path: Path
) -> None:
    times = _steps(config, engine, batch, drafts)
    for ms in times["verify_ms"]:
        record.append_jsonl(
            path, {"kind": "verify", "batch": batch, "per_request": drafts, "ms": ms}
        )
    if drafts > 0:
        for ms in times["draft_ms"]:
            record.append_jsonl(
                path,
                {"kind": "draft", "tokens": batch * (drafts + 1), "ms": max(ms - idle_ms, 0.0)},
            )
    others = [ms + idle_ms for ms in times["other_ms"]] or [idle_ms]
    for index, ms in enumerate(others):
        # The last line closes the point: a resumed run skips it.
        closing = {"point": [batch, drafts]} if index == len(others) - 1 else {}
        record.append_jsonl(path, {"kind": "other", "batch": batch, "ms": ms, **closing})
