"""Runs of the served drafter at forced lengths: the raw material of calibration.

For every d in 1..K all requests draft exactly d tokens and every drafted position is
verified, so each position has a label (paper, Appendix B). One trace file per length;
a file appears only when its run is complete, so a killed collection resumes by length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from forespark import record
from forespark.config import ArmConfig, Config
from forespark.serving.artifacts import HEADS, calibration_key, drafter_dir, resolve
from forespark.serving.dspark import verify_everything
from forespark.serving.inprocess import Engine, Request, open_engine
from forespark.serving.trace import to_line


def collect_traces(
    config: Config,
    prompts: Sequence[Sequence[dict[str, str]]],
    folder: Path,
    lengths: Sequence[int] | None = None,
) -> list[Path]:
    """Run the arm's drafter on ``prompts`` (chat messages); return the trace files.

    Length K uses ``calibrate.post_prompts`` prompts at ``post_load``, the shorter ones
    ``pre_prompts`` at each of ``pre_loads``. A drafter whose estimates do not depend on the
    length (directional), or without a pre-draft estimator (DSpark), needs length K only;
    ``lengths`` names others.

    Raises:
        ValueError: no usable prompt, or the drafter or its heads are missing.
    """
    K, drafter = config.drafter.num_speculative_tokens, config.arm.drafter
    form = _form(config)
    ours = drafter == "forespark" or form is not None  # of this or that length, as planned
    key = calibration_key(config, drafter)
    if lengths is None:
        # Without heads our engine refuses to start, and says how to make them.
        lengths = range(1, K + 1) if form == "triangle" else [K]
    paths = {d: folder / f"{drafter}-d{d}.jsonl" for d in lengths}
    missing = [d for d in lengths if not _is_done(paths[d], key)]
    if missing:
        _prepare(config, ours)
        with open_engine(config, tables=False, calibration=False) as engine:
            form = engine.runner.speculator.estimators.pre.form if ours else None
            if not ours:
                verify_everything(engine.runner.adaptive_verification)
            requests = chat_requests(config, engine, prompts)
            for d in tqdm(missing, desc="calibration runs (draft length)", unit="length"):
                _run_length(config, engine, requests, d, {**key, "schema": 1, "form": form}, paths)
    return list(paths.values())


def full_blocks(
    config: Config, out: Path, load_prompts: Callable[..., Sequence[Any]]
) -> tuple[dict[str, Path], dict[str, Any], Path]:
    """Length-K traces by their prompts, their drafter's key, and its calibration file.

    ``calibration`` are those that ``calibrate.py`` left for this drafter, if it did here;
    ``bench`` those of ``bench.prompts``, run now unless ``out/traces`` holds them.

    Raises:
        ValueError: the drafter, its heads or its calibration are missing.
    """
    config = copy.deepcopy(config)
    config.arm = ArmConfig("forespark", "forespark", "planned", "adaptive")
    files = resolve(config, tables=False)
    assert files.calibration is not None
    key, K = calibration_key(config, "forespark"), config.drafter.num_speculative_tokens
    prompts = load_prompts(config.bench.prompts, seed=config.bench.seed, limit=config.bench.limit)
    digest = key["drafter_sha256"][:12]
    chats = [prompt.chat() for prompt in prompts]
    (own,) = collect_traces(config, chats, out / "traces" / digest, [K])
    earlier = Path(config.run_dir) / "traces" / digest / own.name
    paths = {"calibration": earlier} if _is_done(earlier, key) else {}
    return {**paths, "bench": own}, key, files.calibration


def _form(config: Config) -> str | None:
    """Form of the pre-draft estimator, before an engine has read it; None without one."""
    meta = drafter_dir(config, config.arm.drafter) / HEADS / "heads.json"
    return str(record.read_json(meta)["form"]) if meta.is_file() else None


def _prepare(config: Config, ours: bool) -> None:
    """Turn the arm into one that drafts forced lengths and verifies every position."""
    config.serve.trace_detail = True
    if ours:
        config.arm.draft, config.arm.verify = "planned", "full"
        config.serve.force_length = config.drafter.num_speculative_tokens
    else:
        # The confidence head runs only beside adaptive verification.
        config.arm.draft, config.arm.verify = "full", "adaptive"


def _is_done(path: Path, key: dict[str, Any]) -> bool:
    if not path.is_file():
        return False
    header = record.read_jsonl(path)[0].get("header", {})
    return all(header.get(name) == value for name, value in key.items())


def chat_requests(
    config: Config, engine: Engine, prompts: Sequence[Sequence[dict[str, str]]]
) -> list[Request]:
    room = config.target.max_model_len - config.calibrate.max_tokens - 1
    ids = [engine.chat_ids(messages) for messages in prompts]
    kept = [Request(one, config.calibrate.max_tokens) for one in ids if 0 < len(one) <= room]
    if not kept:
        raise ValueError(
            f"calibration: none of {len(ids)} prompts fits {room} tokens; give other prompts "
            "(calibrate.sources) or shorten calibrate.max_tokens"
        )
    return kept


def _run_length(
    config: Config,
    engine: Engine,
    requests: list[Request],
    d: int,
    header: dict[str, Any],
    paths: dict[int, Path],
) -> None:
    settings = config.calibrate
    full = d == config.drafter.num_speculative_tokens
    count = settings.post_prompts if full else settings.pre_prompts
    engine.clear()
    if config.serve.force_length is not None:
        engine.planner.force_length = d
    for load in [settings.post_load] if full else settings.pre_loads:
        engine.run(requests[:count], min(load, config.target.max_num_seqs))
    head = {"header": {**header, "arm": config.arm.name, "force_length": d}}
    lines = [to_line(row) for row in [head, *engine.steps]]
    record.write_text(paths[d], "\n".join(lines) + "\n")
