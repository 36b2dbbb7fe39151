"""The calibration stage and the predictor benchmark: traces in, files and a report out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forespark.calibration.fit import fit_all
from forespark.calibration.predictor import compare, read_full_blocks
from forespark.calibration.store import read_calibration, report, write_calibration
from forespark.calibration.traces import read_traces
from forespark.record import SCHEMA, file_sha256, provenance, write_json, write_text


def calibrate(
    paths: Sequence[Path],
    key: Mapping[str, Any],
    out: Path,
    *,
    bins: int,
    grid_points: int,
    min_samples: int,
) -> str:
    """Fit both estimators on traces of every draft length and write the result.

    Args:
        paths: trace files, one or more per draft length.
        key: CALIBRATION_KEY fields of the drafter that was traced.
        out: ``calibration.json``.

    Returns:
        Before and after ECE per position, as text.

    Raises:
        ValueError: no trace of the full length K, or traces of something else.
    """
    traces = read_traces(paths, key)
    calibration = fit_all(traces, key, bins, grid_points, min_samples)
    write_calibration(out, calibration)
    return report(calibration)


def predictor_quality(
    paths: Mapping[str, Path],
    key: Mapping[str, Any],
    calibration: Path,
    out: Path,
    *,
    bins: int,
    min_samples: int,
) -> str:
    """Compare the pre-draft estimate with the previous step's acceptance; write the records.

    Args:
        paths: full-length detailed traces by the name of their prompts.
        key: CALIBRATION_KEY fields of the drafter that was traced.
        calibration: the ``calibration.json`` it is served with.
        out: folder of ``records.jsonl`` (one line a trace) and ``run.json``.

    Returns:
        The comparison as a text table.

    Raises:
        ValueError: a trace or the calibration is missing, damaged or of another drafter.
    """
    fitted = read_calibration(calibration, key)
    if fitted.pre is None:
        raise ValueError(f"{calibration}: calibrates no pre-draft estimate, so there is nothing "
                         "to compare; name the forespark drafter")  # fmt: skip
    records = []
    for prompts, path in paths.items():
        found = compare(read_full_blocks(path, key), fitted, min_samples, bins)
        records.append({"schema": SCHEMA, "bench": "predictor", "prompts": prompts, **key, **found})
    files = {name: file_sha256(path) for name, path in paths.items()}
    write_json(
        out / "run.json",
        {
            "schema": SCHEMA,
            "bench": "predictor",
            "traces_sha256": files,
            "calibration_sha256": file_sha256(calibration),
            "provenance": provenance(),
        },
    )
    lines = [json.dumps(record, allow_nan=False) + "\n" for record in records]
    write_text(out / "records.jsonl", "".join(lines))
    return _predictor_report(records)


def _predictor_report(records: Sequence[Mapping[str, Any]]) -> str:
    lines = ["prompts      predictor  within 1   mean |error|  of previous"]
    for record in records:
        for name, judged in record["predictors"].items():
            ratio = record["mae_ratio"].get(name, {}).get("ratio")
            shown = "" if ratio is None else f"{ratio:11.3f}"
            lines.append(f"{record['prompts']:12s} {name:9s} {100 * judged['within_one']:8.1f}% "
                         f"{judged['mae']:12.3f} {shown}".rstrip())  # fmt: skip
    return "\n".join(lines)
