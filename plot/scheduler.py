"""Decision time of the scheduler against the batch, and its loss against exhaustive search.

    python plot/scheduler.py --target smollm2

Reads the records of ``eval.py --bench scheduler``. Writes scheduler.pdf, .png (time against
requests, both logarithmic), .csv (medians over rounds) and .md (table, loss, properties).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import environment  # noqa: F401  (before pandas)
import pandas as pd
import results
import style

from forespark.record import read_jsonl, write_text

# decider -> (name, colour, marker, line); the order of columns and legend
DECIDERS = {
    "plan": ("joint schedule", "#b3122a", "*", "-"),
    "step": ("ForeSpark, whole step", "#d9727f", "o", "-"),
    "step_host_split": ("ForeSpark, whole step with host split", "#e7a33c", "s", (0, (1, 1.2))),
    "stock": ("vLLM adaptive verification", "#3f8fc4", "^", (0, (5, 1.5, 1, 1.5))),
    "search": ("exhaustive search", "#555555", "D", (0, (3, 1))),
}
NEEDED = {
    "time": ("decider", "n", "K", "round", "median_us"),
    "loss": ("source", "n", "batch", "rate", "best_rate"),
    "schedules": ("schedules", "broken"),
}
PAPER_US, PAPER_AT = 88, 192
PAPER_LOSS = 1e-4


def read(folder: Path) -> dict[str, pd.DataFrame]:
    """One table per kind of row; empty ones when nothing is measured.

    Raises:
        ValueError: another schema, an unknown kind, or a missing field; names file and line.
    """
    path = folder / results.RECORDS
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in NEEDED}
    for number, row in enumerate(read_jsonl(path) if path.exists() else [], start=1):
        where = f"{path}, line {number}"
        results.require(isinstance(row, dict), where, row, "one object a line")
        schema, kind = row.get("schema"), str(row.get("kind"))
        results.require(schema == results.SCHEMA, f"{where}: schema", schema, str(results.SCHEMA))
        results.require(kind in NEEDED, f"{where}: kind", kind, f"one of {', '.join(NEEDED)}")
        if missing := [name for name in NEEDED[kind] if name not in row]:
            raise ValueError(f"{where}: missing fields {missing}")
        rows[kind].append(row)
    frames = {
        kind: pd.DataFrame(found, columns=None if found else list(NEEDED[kind]))
        for kind, found in rows.items()
    }
    known = set(frames["time"]["decider"])
    results.require(known <= set(DECIDERS), f"{path}: deciders", sorted(known), str(list(DECIDERS)))
    return frames


def medians(times: pd.DataFrame) -> pd.DataFrame:
    """Median over rounds of every (n, decider) in microseconds: one row per n."""
    if not len(times):
        return pd.DataFrame()
    wide = times.groupby(["n", "decider"])["median_us"].median().unstack()
    return wide[[name for name in DECIDERS if name in wide]]


def growth(values: pd.Series) -> float:
    """Exponent e of time ~ (n log2 2n)^e over the upper half of the measured sizes."""
    values = values.dropna()
    values = values[len(values) // 2 :]
    if len(values) < 2:
        return math.nan
    first, last = values.index[0], values.index[-1]
    size = (last * math.log2(2 * last)) / (first * math.log2(2 * first))
    return math.log(values.iloc[-1] / values.iloc[0]) / math.log(size)


def draw(wide: pd.DataFrame, target: str) -> Any:
    fig, axes = style.figure(height=2.8)
    if not len(wide):
        style.empty(axes, f"no scheduler records of {target} yet")
        return fig
    for name, (label, color, marker, line) in DECIDERS.items():
        if name in wide:
            points = wide[name].dropna()
            axes.plot(points.index, points, label=label, color=color, marker=marker, linestyle=line)
    axes.plot(PAPER_AT, PAPER_US, "+", color="#111111", markersize=7, label="paper, 88 µs at 192")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("requests")
    axes.set_ylabel("decision (µs)")
    axes.grid(True, linewidth=0.3, color="#dddddd")
    axes.legend(frameon=False, fontsize=6)
    return fig


def render(frames: dict[str, pd.DataFrame], wide: pd.DataFrame, target: str) -> str:
    """Markdown text; what is not measured is "n/a"."""
    if not len(wide):
        return f"No scheduler records of {target} yet.\n"
    heads = [f"{DECIDERS[str(name)][0]} (µs)" for name in wide]
    lines = [_row(["requests", *heads]), _row(["---:"] * (len(heads) + 1))]
    for n, times in wide.iterrows():
        cells = ["n/a" if pd.isna(time) else f"{time:.1f}" for time in times]
        lines.append(_row([str(n), *cells]))
    exponents = [growth(wide[name]) for name in wide]
    shown = ["n/a" if math.isnan(e) else f"{e:.2f}" for e in exponents]
    lines.append(_row(["exponent of n log n", *shown]))
    K = int(frames["time"]["K"].iloc[0])
    text = [*lines, "", f"K = {K}; medians over calls, then over rounds.", *_losses(frames["loss"])]
    for _, row in frames["schedules"].iterrows():
        broken = sum(row["broken"].values())
        text.append(f"- {row['schedules']:,} random schedules: {broken} broken properties.")
    return "\n".join(text) + "\n"


def _losses(loss: pd.DataFrame) -> list[str]:
    """Loss in rate against exhaustive search, per size and in all."""
    if not len(loss):
        return []
    share = 1 - loss["rate"] / loss["best_rate"]
    by_size = ", ".join(
        f"{group.mean() * 100:.4f} % at {n}" for n, group in share.groupby(loss["n"])
    )
    source = loss["source"].iloc[0]
    return [
        "",
        f"- Loss against exhaustive search on {len(loss)} batches of {source} drafts: mean "
        f"{share.mean() * 100:.4f} % (paper: at most {PAPER_LOSS * 100:.2f} %), largest "
        f"{share.max() * 100:.3f} %. By requests: {by_size}.",
    ]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    folder, out, target = results.parse(__doc__, "bench/scheduler")
    frames = read(folder)
    wide = medians(frames["time"])
    text = render(frames, wide, target)
    paths = style.save(draw(wide, target), out, "scheduler")
    write_text(out / "scheduler.csv", wide.to_csv())
    write_text(out / "scheduler.md", text)
    print(text)
    print(*paths, out / "scheduler.csv", out / "scheduler.md", sep="\n")


if __name__ == "__main__":
    results.run(main)
