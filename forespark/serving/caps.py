"""Batch-wise caps as an engine reads them: one draft length per range of loads.

``caps.json`` lies beside ``calibration.json``. It is a file of its own because its key is
that of the latency tables: which cap is fastest depends on the machine.

    {"schema": 1, "key": {LATENCY_KEY},
     "bw":       {"loads": [L], "caps": [L], "throughput": [[K + 1 numbers], ...]},
     "bw_stock": {...}}

``throughput[i][k]`` is tokens per second at ``loads[i]`` requests under cap k. A section
holds the caps of the arm of that name; ``forespark/calibration/caps.py`` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from forespark.fore_d.costs import check_key

COMMAND = "python calibrate.py calibrate.caps=[{arm}]"
PARTS = ("loads", "caps", "throughput")

Range = list[int]  # [first load, last load, cap]


def cap_ranges(
    record: Any,
    arm: str,
    wanted: Mapping[str, Any],
    source: str = "caps.json",
) -> list[Range]:
    """Load ranges of one arm, in order and without gaps from 1 up.

    Measured loads share what lies between them at their geometric mean; the last range
    ends at its load, and whoever reads it carries its cap on.

    Args:
        record: content of a ``caps.json``.
        wanted: LATENCY_KEY fields of the engine.

    Raises:
        ValueError: no section of this arm, another key or schema, or caps that are not
            the fastest of their own table; names the command to run.
    """
    command = COMMAND.format(arm=arm)
    run = f"run `{command} --target {wanted.get('target')}`"
    if not isinstance(record, Mapping) or record.get("schema") != 1:
        raise ValueError(f"{source}: no caps of schema 1, the file is damaged; {run}")
    key, section = record.get("key"), record.get(arm)
    if not isinstance(key, Mapping):
        raise ValueError(f"{source}: says not what it was made for; {run}")
    check_key(key, wanted, what=f"{source}: the caps", command=command)
    if section is None:
        raise ValueError(f"{source}: no caps of arm {arm}; {run}")
    loads, caps, throughput = _parts(section, f"{source}, {arm}", run)
    width = int(wanted["K"]) + 1
    for load, cap, row in zip(loads, caps, throughput, strict=True):
        _check_row(cap, row, width, f"{source}, {arm}, load {load}", run)
    ends = [math.isqrt(here * above) for here, above in zip(loads, loads[1:], strict=False)]
    starts = [1, *(end + 1 for end in ends)]
    return [list(one) for one in zip(starts, [*ends, loads[-1]], caps, strict=True)]


def dense(ranges: Sequence[Sequence[int]], max_num_reqs: int) -> list[int]:
    """Cap of every batch size 0..max_num_reqs; the last range's cap past its end."""
    caps = [0]
    for _, last, cap in ranges:
        caps += [cap] * (last + 1 - len(caps))
    caps += [ranges[-1][2]] * (max_num_reqs + 1 - len(caps))
    return caps[: max_num_reqs + 1]


def _parts(section: Any, where: str, run: str) -> tuple[list[int], list[int], list[Any]]:
    if not isinstance(section, Mapping) or any(
        not isinstance(section.get(part), list) for part in PARTS
    ):
        raise ValueError(f"{where}: want lists named {', '.join(PARTS)}; {run}")
    loads, caps, throughput = (section[part] for part in PARTS)
    whole = all(isinstance(load, int) and load >= 1 for load in loads)
    if not loads or not whole or any(b <= a for a, b in zip(loads, loads[1:], strict=False)):
        raise ValueError(f"{where}: got loads {loads}, want increasing numbers >= 1; {run}")
    if not len(loads) == len(caps) == len(throughput):
        raise ValueError(f"{where}: loads, caps and throughput differ in length; {run}")
    return loads, caps, throughput


def _check_row(cap: Any, row: Any, width: int, where: str, run: str) -> None:
    numbers = isinstance(row, list) and all(isinstance(x, int | float) for x in row)
    if not numbers or len(row) != width or not all(0 < x < math.inf for x in row):
        raise ValueError(f"{where}: got {row!r}, want {width} throughputs above 0; {run}")
    if not isinstance(cap, int) or cap != row.index(max(row)):
        raise ValueError(
            f"{where}: got cap {cap!r}, but the table's fastest is {row.index(max(row))}; {run}"
        )
