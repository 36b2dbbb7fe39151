"""The calibration stage: traces in, ``calibration.json`` and a report out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forespark.calibration.fit import fit_all
from forespark.calibration.store import report, write_calibration
from forespark.calibration.traces import read_traces


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
