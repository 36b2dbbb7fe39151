"""run.json of a benchmark folder: the settings its records share, and the runs that made them.

Records of one folder can be compared, so a run with other settings is refused as soon as
there are records.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from forespark.bench import answers, plan
from forespark.bench.records import RECORDS, read_records
from forespark.config import Config, drafter_places
from forespark.record import file_sha256, provenance, read_json, write_json

RUN = "run.json"
# Settings that make two batches comparable. Arms, loads, rounds and limits may grow.
_FIXED = (
    "prompts", "output_tokens", "min_answer_tokens", "max_prompt_tokens", "temperature", "seed",
)  # fmt: skip
_DRAFTER = "drafter_sha256."


def check_folder(config: Config, out: Path) -> None:
    """Refuse a folder whose records cannot be compared with what would be measured now.

    A folder without records is never refused: a run that failed early must not block others.

    Raises:
        ValueError: the folder was filled with other settings or drafters, names them; or its
            run.json is damaged.
    """
    path = out / RUN
    if not path.exists() or not read_records(out / RECORDS):
        return
    if differing := _differing(config, path):
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


def _differing(config: Config, path: Path) -> dict[str, str]:
    """Fixed settings that are not those of run.json, each with both values in words."""
    there, now = read_run(path)["fixed"], fixed_settings(config)
    return {
        name: f"{name} (there {there.get(name)!r}, now {now[name]!r})"
        for name in now
        if there.get(name) != now[name]
        # A drafter that did not exist then was not measured then.
        and not (name.startswith(_DRAFTER) and there.get(name) is None)
    }


def fixed_settings(config: Config) -> dict[str, Any]:
    """What must not change within one folder of records."""
    fixed: dict[str, Any] = {name: getattr(config.bench, name) for name in _FIXED}
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


def start_run(config: Config, out: Path, run_id: str) -> None:
    """Add this run to run.json: its settings and where it ran."""
    path = out / RUN
    if path.exists() and not read_records(out / RECORDS):
        _forget_other_settings(config, out)
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
    fixed = fixed_settings(config)
    write_json(path, {"schema": 1, "bench": "decode", "fixed": fixed, "runs": runs})


def _forget_other_settings(config: Config, out: Path) -> None:
    """Drop what a run without records left behind, unless it had these settings."""
    try:
        differing = set(_differing(config, out / RUN))
    except ValueError:  # damaged: settings unknown
        differing = set(_FIXED)
    if differing:
        (out / RUN).unlink()
    # AR answers and the prompts of a batch are the same for any drafter.
    if any(name != "K" and not name.startswith(_DRAFTER) for name in differing):
        for name in (plan.PLAN, answers.ANSWERS):
            (out / name).unlink(missing_ok=True)
