"""Runs of the batch-wise arms at every load and cap: the raw material of ``caps.json``.

A closed loop of ``load`` requests under one cap; what counts are the steps that hold
exactly ``load`` requests, so neither ramp-up nor the last answers blur a point. ``bw`` is
the arm's own path at a forced length. ``bw_stock`` runs vLLM's own scheduler with the cap
put into its table, so its drafter always drafts K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from forespark import record
from forespark.config import Config
from forespark.serving.artifacts import latency_key
from forespark.serving.collect import chat_requests
from forespark.serving.inprocess import Engine, Request, open_engine

WARM_TOKENS = 16  # of an untimed first batch
Point = tuple[int, int, int]  # round, load, cap


def cap_loads(config: Config) -> list[int]:
    """Loads of the sweep."""
    return sorted(set(config.calibrate.cap_loads or config.calibrate.pre_loads))


def sweep_caps(
    config: Config, prompts: Sequence[Sequence[dict[str, str]]], path: Path
) -> dict[str, Any]:
    """Measure every point of ``calibrate.caps`` that ``path`` does not hold yet.

    Args:
        prompts: chat messages.
        path: JSON lines, see ``forespark/calibration/caps.py``. Runs of another engine or
            of other settings are started over.

    Returns:
        The key of what was measured.

    Raises:
        ValueError: no usable prompt, or the drafter or its heads are missing.
    """
    settings, K = config.calibrate, config.drafter.num_speculative_tokens
    key = latency_key(config)
    names = ("sources", "limit", "max_tokens", "cap_prompts")
    header = {"schema": 1, "key": key, **{name: getattr(settings, name) for name in names}}
    done = _done(path, header)
    points = [
        (turn, load, cap)
        for turn in range(settings.cap_rounds)
        for load in cap_loads(config)
        for cap in range(K + 1)
    ]
    for arm in settings.caps:
        todo = [point for point in points if (arm, *point) not in done]
        if todo:
            _sweep_arm(config, arm, prompts, todo, path)
    return key


def _done(path: Path, header: dict[str, Any]) -> set[tuple[str, int, int, int]]:
    """(arm, round, load, cap) measured already; begins the file when it is of another kind."""
    rows = record.read_jsonl(path) if path.is_file() else []
    if not rows or rows[0].get("header") != header:
        record.write_text(path, "")
        record.append_jsonl(path, {"header": header})
        return set()
    return {(row["arm"], row["round"], row["load"], row["cap"]) for row in rows[1:]}


def _sweep_arm(
    config: Config,
    arm: str,
    prompts: Sequence[Sequence[dict[str, str]]],
    points: list[Point],
    path: Path,
) -> None:
    K, ours = config.drafter.num_speculative_tokens, arm == "bw"
    policy = replace(config.arm, name=arm, drafter="forespark", draft="full", verify="capped")
    if ours:
        policy = replace(policy, verify="full")
    serve = replace(config.serve, force_length=K if ours else None)
    measured = replace(config, arm=policy, serve=serve)
    # The same prompts come at every point: cached ones would make the first cap look slow.
    options = {"tables": False, "calibration": False, "enable_prefix_caching": False}
    with open_engine(measured, **options) as engine:
        set_cap = _cap_setter(engine, ours)
        requests = chat_requests(config, engine, prompts)
        set_cap(K)
        most = max(cap_loads(config))
        engine.run([replace(one, max_tokens=WARM_TOKENS) for one in requests[:most]], most)
        for turn, load, cap in tqdm(points, desc=f"caps of {arm} (load, cap)", unit="run"):
            set_cap(cap)
            tokens, ms = _run(config, engine, requests, load)
            row = {"arm": arm, "load": load, "cap": cap, "round": turn, "tokens": tokens, "ms": ms}
            record.append_jsonl(path, row)


def _cap_setter(engine: Engine, ours: bool) -> Callable[[int], None]:
    def force(cap: int) -> None:
        engine.planner.force_length = cap

    def fill(cap: int) -> None:
        lookup = engine.scheduler.dynamic_sd_lookup
        lookup[:] = [cap] * len(lookup)

    return force if ours else fill


def _run(
    config: Config, engine: Engine, requests: Sequence[Request], load: int
) -> tuple[int, float]:
    """Tokens and milliseconds of the steps that held ``load`` requests."""
    # Twice the load at least, so that full batches also see new requests come in.
    count = max(min(config.calibrate.cap_prompts, len(requests)), 2 * load)
    engine.clear()
    engine.run([requests[i % len(requests)] for i in range(count)], load)
    tokens, ms = 0, 0.0
    for row, after in zip(engine.steps, engine.steps[1:], strict=False):
        if row["batch"] == load:
            tokens += row["n"] + row["accepted"]
            ms += 1e3 * (after["t"] - row["t"])
    return tokens, ms
