"""Time per output token, split by part and normalized to AR (paper, Figure 10).

    python plot/breakdown.py --target smollm2

The height of a bar is AR's throughput over the arm's at the same load; its parts are in
proportion to the step times of the engine's trace. Writes breakdown.pdf, .png, .csv.
"""

from __future__ import annotations

from typing import Any

import environment  # noqa: F401  (before pandas)
import pandas as pd
import results
import style

from forespark.record import write_text

BASE = "ar"
_BAR = 0.8  # of the distance between two bars
_GAP = 0.9  # bars between two loads
_UNSPLIT = "#b9b9b9"


def breakdown(points: pd.DataFrame) -> pd.DataFrame:
    """One row per (load, arm) with an AR value at that load.

    Columns: load, arm, normalized (time per output token, AR = 1), verify_ms, draft_ms,
    other_ms (shares of ``normalized``; NaN without step times).
    """
    rows = []
    if not len(points):
        return pd.DataFrame(columns=["load", "arm", "normalized", *style.PARTS])
    base = points[points["arm"] == BASE].set_index("load")["throughput"]
    for _, point in points.iterrows():
        if point["load"] not in base.index:
            continue
        normalized = base[point["load"]] / point["throughput"]
        parts = {part: point[part] for part in style.PARTS}
        if pd.isna(parts["draft_ms"]) and not pd.isna(parts["verify_ms"]):
            parts["draft_ms"] = 0.0  # an arm that never drafts
        total = sum(parts.values())  # NaN when a part is unknown: then nothing is split
        shares = {part: normalized * value / total for part, value in parts.items()}
        rows.append({"load": point["load"], "arm": point["arm"], "normalized": normalized,
                     **shares})  # fmt: skip
    return pd.DataFrame(rows, columns=["load", "arm", "normalized", *style.PARTS])


def draw(table: pd.DataFrame, measured: set[str], target: str) -> Any:
    """Groups of bars, one group per load; what cannot be drawn is named under them."""
    # As wide as its bars need, a page at most.
    fig, axes = style.figure(min(style.PAGE_IN, max(style.COLUMN_IN, 0.3 * len(table))), 2.6)
    if len(table):
        _bars(axes, table)
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        fig.legend(unique.values(), unique.keys(), loc="outside upper center",
                   ncols=len(unique), frameon=False)  # fmt: skip
    else:
        why = "no decode records" if BASE in measured or not measured else "no AR records"
        style.empty(axes, f"{why} of {target} yet")
    axes.set_ylabel("time per output token\n(AR = 1)")
    drawn = set(table["arm"])
    missing = [style.look(arm).label for arm in style.ARMS if arm not in drawn]
    style.note(fig, f"not measured: {', '.join(missing)}" if missing else "")
    return fig


def _bars(axes: Any, table: pd.DataFrame) -> None:
    ticks, names, x = [], [], 0.0
    for load, group in table.groupby("load", sort=True):
        start = x
        by_arm = group.set_index("arm")
        for arm in style.in_order(by_arm.index):
            _bar(axes, x, by_arm.loc[arm])
            ticks.append(x)
            names.append(style.look(arm).label)
            x += 1
        axes.text((start + x - 1) / 2, 1.01, f"load {load}", ha="center", va="bottom",
                  fontsize=7, transform=axes.get_xaxis_transform())  # fmt: skip
        x += _GAP
    axes.axhline(1.0, color="#111111", linewidth=0.6, linestyle=(0, (4, 2)), zorder=0)
    axes.set_xticks(ticks, names, rotation=45, ha="right", rotation_mode="anchor", fontsize=6)
    axes.tick_params(axis="x", length=0)


def _bar(axes: Any, x: float, row: pd.Series) -> None:
    frame = {"width": _BAR, "edgecolor": "#111111", "linewidth": 0.4}
    if row[list(style.PARTS)].isna().any():
        axes.bar(x, row["normalized"], color=_UNSPLIT, label="no step times", **frame)
        return
    bottom = 0.0
    for part, (label, color, hatch) in style.PARTS.items():
        axes.bar(x, row[part], bottom=bottom, color=color, hatch=hatch, label=label, **frame)
        bottom += row[part]


def main() -> None:
    folder, out, target = results.parse(__doc__)
    points = results.points(results.read(folder))
    table = breakdown(points)
    measured = set(points["arm"]) if len(points) else set()
    paths = style.save(draw(table, measured, target), out, "breakdown")
    write_text(out / "breakdown.csv", table.to_csv(index=False))
    print(*paths, out / "breakdown.csv", sep="\n")


if __name__ == "__main__":
    results.run(main)
