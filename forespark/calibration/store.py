"""``calibration.json``: written by calibrate.py, read by everything that schedules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forespark.fore_d.calibrated import COMMAND, Calibration
from forespark.record import provenance, read_json, write_json


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write atomically, with provenance."""
    write_json(path, {**calibration.record(), "provenance": provenance()})


def read_calibration(path: Path, wanted: Mapping[str, Any] | None = None) -> Calibration:
    """Read and check; ``wanted`` is the key of what is served (None: any).

    Raises:
        ValueError: missing or damaged file, or one made for another target or drafter;
            names the field and the command to run.
    """
    path = Path(path)
    if not path.exists():
        target = f" --target {wanted['target']}" if wanted and "target" in wanted else ""
        raise ValueError(f"{path}: no calibration; run `{COMMAND}{target}`")
    return Calibration.from_record(read_json(path), wanted, source=str(path))


def report(calibration: Calibration) -> str:
    """Before/after ECE per position as text lines."""

    def cell(value: float | None) -> str:
        return "      -" if value is None else f"{100 * value:6.2f}%"

    lines = ["position  post ECE before   after  theta   pre ECE before   after"]
    pre = calibration.pre
    for j, theta in enumerate(calibration.post.theta):
        post = calibration.post
        left = f"{j + 1:8d}  {cell(post.ece_before[j]):>15}  {cell(post.ece_after[j])}"
        right = f"  {cell(pre.ece_before[j]):>15}  {cell(pre.ece_after[j])}" if pre else ""
        lines.append(f"{left}  {theta:5.2f}{right}")
    if pre:
        kept = sum(map(sum, pre.kept))
        cells = sum(map(len, pre.kept))
        lines.append(
            f"{kept} of {cells} pre-draft entries kept scale 1 (few drafts, one outcome, "
            "or a scale that was not positive)"
        )
    return "\n".join(lines)
