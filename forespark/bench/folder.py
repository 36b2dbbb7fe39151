"""run.json of a benchmark folder: the settings its records share, and the runs that made them.

Records of one folder can be compared, so a run with other settings is refused as soon as
there are records.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from forespark.bench import answers, plan
from forespark.bench.records import RECORDS
from forespark.config import Config, drafter_places
from forespark.record import file_sha256, provenance, read_json, write_json

RUN = "run.json"
RATES = "rates.json"  # of the slo benchmark: what it probed
# Settings that make two points comparable. Arms, loads, rates and rounds may grow, and so may
# the limit of decode, whose plan keeps the prompts of a batch.
_DECODE = (
    "prompts", "output_tokens", "min_answer_tokens", "max_prompt_tokens", "temperature", "seed",
)  # fmt: skip
_STREAM = ("limit", "temperature", "seed", "stream.held_out", "stream.max_prompt_tokens",
           "stream.output_tokens")  # fmt: skip
_TALK = ("stream.conversations", "stream.max_conversations", "stream.turn_spacing",
         "stream.prefix_cache")  # fmt: skip
_WINDOW = ("stream.warmup_s", "stream.window_requests", "stream.window_per_client",
           "stream.window_s")  # fmt: skip
_FIXED = {
    "decode": _DECODE,
    "e2e": (*_STREAM, *_TALK, *_WINDOW),
    "mathcode": (*_STREAM, "stream.questions", *_WINDOW),
    "slo": (*_STREAM, *_TALK, "slo.arrivals", "slo.warmup_s", "slo.window_s"),
}
_DRAFTER = "drafter_sha256."


def check_folder(config: Config, out: Path, bench: str) -> None:
    """Refuse a folder whose records cannot be compared with what would be measured now.

    A folder without records is never refused: a run that failed early must not block others.

    Args:
        bench: name of the benchmark.

    Raises:
        ValueError: the folder was filled by another benchmark, or with other settings or
            drafters, names them; or its run.json is damaged.
    """
    path = out / RUN
    if not path.exists() or not _measured(out):
        return
    if differing := _differing(config, path, bench):
        raise ValueError(
            f"{out} holds records measured with other settings: {', '.join(differing.values())}; "
            "use another --out, or delete the folder"
        )


def read_run(path: Path) -> dict[str, Any]:
    """What ``start_run`` wrote.

    Raises:
        ValueError: something else is in the file.
    """
    found = read_json(path)
    for key, kind in (("fixed", dict), ("runs", list)):
        if not isinstance(found, dict) or not isinstance(found.get(key), kind):
            raise ValueError(
                f"{path}: want an object with {key!r}, the file is damaged: use another --out, "
                "or delete the folder"
            )
    return dict(found)


def _measured(out: Path) -> bool:
    """Whether the folder holds records."""
    path = out / RECORDS
    return path.exists() and path.stat().st_size > 0


def _differing(config: Config, path: Path, bench: str) -> dict[str, str]:
    """Fixed settings that are not those of run.json, each with both values in words."""
    run = read_run(path)
    there, now = {"bench": run.get("bench"), **run["fixed"]}, fixed_settings(config, bench)
    now = {"bench": bench, **now}
    return {
        name: f"{name} (there {there.get(name)!r}, now {now[name]!r})"
        for name in now
        if there.get(name) != now[name]
        # A drafter that did not exist then was not measured then.
        and not (name.startswith(_DRAFTER) and there.get(name) is None)
    }


def fixed_settings(config: Config, bench: str) -> dict[str, Any]:
    """What must not change within one folder of records of a benchmark."""
    fixed: dict[str, Any] = {}
    for name in _FIXED[bench]:
        section, _, key = name.rpartition(".")
        fixed[name] = getattr(getattr(config, section or "bench"), key)
    fixed |= {"target": config.target.name, "model": config.target.model}
    fixed["K"] = config.drafter.num_speculative_tokens
    for drafter in ("forespark", "dspark"):
        weights = drafter_weights(config, drafter)
        fixed[_DRAFTER + drafter] = file_sha256(weights) if weights else None
    return fixed


def drafter_weights(config: Config, drafter: str) -> Path | None:
    """The checkpoint that serve.py would load for a drafter, or None."""
    found = (folder / "model.safetensors" for folder in drafter_places(config, drafter))
    return next((path for path in found if path.is_file()), None)


def start_run(config: Config, out: Path, run_id: str, bench: str) -> None:
    """Add this run to run.json: its settings and where it ran."""
    path = out / RUN
    if path.exists() and not _measured(out):
        _forget_other_settings(config, out, bench)
    runs = read_run(path)["runs"] if path.exists() else []
    tables = {
        name: file_sha256(found) if (found := Path(config.run_dir) / name).is_file() else None
        for name in ("calibration.json", "latency.json")
    }
    runs.append(
        {
            "run_id": run_id,
            "provenance": provenance(),
            "tables_sha256": tables,
            "config": asdict(config),
        }
    )
    fixed = fixed_settings(config, bench)
    write_json(path, {"schema": 1, "bench": bench, "fixed": fixed, "runs": runs})


def _forget_other_settings(config: Config, out: Path, bench: str) -> None:
    """Drop what a run without records left behind, unless it had these settings."""
    try:
        differing = set(_differing(config, out / RUN, bench))
    except ValueError:  # damaged: settings unknown
        differing = set(_FIXED[bench])
    if differing:
        (out / RUN).unlink()
        (out / RATES).unlink(missing_ok=True)
    # AR answers and the prompts of a batch are the same for any drafter.
    if any(name != "K" and not name.startswith(_DRAFTER) for name in differing):
        for name in (plan.PLAN, answers.ANSWERS):
            (out / name).unlink(missing_ok=True)
