"""Table of replayed policies: what a schedule with perfect knowledge would have been worth.

    python plot/oracle.py --target smollm2

Reads the records of ``eval.py --bench oracle``. Writes oracle.md and oracle.csv: expected
tokens per second at every load, as a share of the oracle's.
"""

from __future__ import annotations

from pathlib import Path

import environment  # noqa: F401  (before pandas)
import pandas as pd
import results
import style

from forespark.record import read_jsonl, write_text

NEEDED = ("load", "policy", "steps", "tokens", "ms", "drafted", "verified", "accepted", "source")


def read(folder: Path) -> pd.DataFrame:
    """One row per (load, policy), with ``rate`` in tokens per second.

    Raises:
        ValueError: another schema or a missing field; names file and line.
    """
    path = folder / results.RECORDS
    rows = read_jsonl(path) if path.exists() else []
    for number, row in enumerate(rows, start=1):
        where = f"{path}, line {number}"
        results.require(isinstance(row, dict), where, row, "one object a line")
        schema = row.get("schema")
        results.require(schema == results.SCHEMA, f"{where}: schema", schema, str(results.SCHEMA))
        if missing := [name for name in NEEDED if name not in row]:
            raise ValueError(f"{where}: missing fields {missing}")
    frame = pd.DataFrame(rows, columns=None if rows else list(NEEDED))
    frame["rate"] = 1e3 * frame["tokens"] / frame["ms"]
    return frame


def render(frame: pd.DataFrame, target: str) -> str:
    if not len(frame):
        return f"No oracle records of {target} yet.\n"
    lines = [
        "| load | policy | tokens/s by the tables | share of the oracle's | drafted / verified / "
        "accepted per request |",
        "|---:|---|---:|---:|---:|",
    ]
    for load, group in frame.groupby("load", sort=True):
        rates = group.set_index("policy")["rate"]
        for _, row in group.iterrows():
            name = row["policy"]
            share = f"{row['rate'] / rates['oracle']:.3f}" if "oracle" in rates else "n/a"
            requests = row["steps"] * load
            counts = " / ".join(
                f"{row[part] / requests:.2f}" for part in ("drafted", "verified", "accepted")
            )
            label = {"oracle": "oracle", "exhaustive": "ForeSpark, exhaustive"}.get(name)
            shown = label or style.look(name).label
            lines.append(f"| {load} | {shown} | {row['rate']:.1f} | {share} | {counts} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    folder, out, target = results.parse(__doc__, "bench/oracle")
    frame = read(folder)
    text = render(frame, target)
    write_text(out / "oracle.csv", frame.to_csv(index=False))
    write_text(out / "oracle.md", text)
    print(text, end="")


if __name__ == "__main__":
    results.run(main)
