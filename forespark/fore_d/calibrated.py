"""The fitted calibration as the scheduler reads it: content and checks, no file access.

``forespark/calibration/store.py`` reads and writes the file; the serving room, which
may not import the calibration room, builds a ``Calibration`` from the parsed JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from forespark.fore_d.costs import check_key
from forespark.fore_d.survival import FORMS

CALIBRATION_KEY = ("target", "drafter", "drafter_sha256", "K")
COMMAND = "python calibrate.py"

Curve = list[float | None]  # one value a position; None: no samples there


@dataclass(frozen=True)
class PostCalibration:
    """Temperatures of the post-draft estimator (Eq. 6)."""

    theta: list[float]  # [K], > 0
    ece_before: Curve  # [K], at theta 1
    ece_after: Curve  # [K]
    samples: list[int]  # [K] drafts

    def record(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class PreCalibration:
    """Scale and bias of every pre-draft entry (Appendix B).

    Rows: d = 1..K with d entries each (triangle), or one row of K entries (row).
    """

    form: str
    scale: list[list[float]]
    bias: list[list[float]]
    samples: list[list[int]]  # drafts that reached the entry
    kept: list[list[bool]]  # True: scale stayed 1 and the bias is shrunken
    ece_before: Curve  # [K] survival at position j, all lengths pooled; scale 1, bias 0
    ece_after: Curve  # [K]

    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """(scale [T], bias [T]) float32 in the layout of the estimator's logits."""
        return (
            np.concatenate([np.asarray(row, np.float32) for row in self.scale]),
            np.concatenate([np.asarray(row, np.float32) for row in self.bias]),
        )

    def record(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class Calibration:
    """Everything in ``calibration.json`` but its provenance.

    Raises:
        ValueError: a part has the wrong shape, a non-finite number or a temperature
            that is not positive.
    """

    key: dict[str, Any]  # CALIBRATION_KEY fields
    post: PostCalibration
    pre: PreCalibration | None  # None: a drafter without a pre-draft estimator (DSpark)

    def __post_init__(self) -> None:
        K = self.key.get("K")
        if not isinstance(K, int) or K < 1:
            raise ValueError(f"calibration key: K is {K!r}, want an integer >= 1; run `{COMMAND}`")
        _check_row(self.post.theta, K, "post.theta")
        if min(self.post.theta) <= 0:
            raise ValueError(f"post.theta: got {self.post.theta}, want > 0; run `{COMMAND}`")
        if self.pre is None:
            return
        if self.pre.form not in FORMS:
            raise ValueError(f"pre.form: got {self.pre.form!r}, want one of {FORMS}")
        widths = list(range(1, K + 1)) if self.pre.form == "triangle" else [K]
        for name in ("scale", "bias"):
            rows = getattr(self.pre, name)
            if not isinstance(rows, list) or len(rows) != len(widths):
                raise ValueError(
                    f"pre.{name}: want {len(widths)} rows for form {self.pre.form!r} and K={K}; "
                    f"run `{COMMAND}`"
                )
            for d, (row, width) in enumerate(zip(rows, widths, strict=True), start=1):
                _check_row(row, width, f"pre.{name} row {d}")

    def record(self) -> dict[str, Any]:
        """JSON content, without provenance."""
        return {
            "schema": 1,
            "key": self.key,
            "post": self.post.record(),
            "pre": self.pre.record() if self.pre else None,
        }

    @classmethod
    def from_record(
        cls,
        record: Mapping[str, Any],
        wanted: Mapping[str, Any] | None = None,
        source: str = "calibration.json",
    ) -> Calibration:
        """Build from parsed JSON; ``wanted`` is the key of what is served (None: any).

        Raises:
            ValueError: another key (names field and command) or schema, or a bad part.
        """
        if not isinstance(record, Mapping) or record.get("schema") != 1:
            raise ValueError(f"{source}: not a calibration of schema 1; run `{COMMAND}`")
        try:
            key = dict(record["key"])
            if wanted is not None:
                check_key(key, wanted, what=f"{source}: the calibration", command=COMMAND)
            pre = record["pre"]
            return cls(
                key, PostCalibration(**record["post"]), PreCalibration(**pre) if pre else None
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{source}: missing or unknown part ({error}); run `{COMMAND}`"
            ) from None


def _check_row(row: Any, width: int, name: str) -> None:
    numbers = isinstance(row, list) and all(isinstance(x, int | float) for x in row)
    if not numbers or len(row) != width or not all(math.isfinite(x) for x in row):
        raise ValueError(f"{name}: got {row!r}, want {width} finite numbers; run `{COMMAND}`")
