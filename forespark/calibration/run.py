"""The calibration stage: traces in, ``calibration.json`` and a report out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forespark.calibration.fit import fit_post, fit_pre
from forespark.calibration.store import report, write_calibration
from forespark.calibration.traces import read_traces
from forespark.fore_d.calibrated import Calibration


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
    K = int(key["K"])
    full = traces.drafts.get(K)
    if full is None or full.l is None:
        raise ValueError(f"calibration: no fully verified draft of length K={K} in the traces")
    post = fit_post(full.l, full.accepted, bins, grid_points, min_samples)
    pre = None
    if traces.form is not None:
        pre = fit_pre(traces.drafts, K, traces.form, bins, min_samples)
    calibration = Calibration(dict(key), post, pre)
    write_calibration(out, calibration)
    return report(calibration)
