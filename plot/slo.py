"""SLO attainment against arrival rate, and against the scale of the limits (paper, Figure 9).

    python plot/slo.py --target smollm2
    python plot/slo.py --records results/cpu/bench/slo --out results/cpu/figures

Reads summary.json of ``eval.py --bench slo``, which belongs to the records beside it. Writes
slo.pdf, slo.png, slo.csv and slo.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import environment  # noqa: F401  (before pandas)
import pandas as pd
import results
import style

from forespark.record import file_sha256, read_json, write_text

_NUMBERS = ("ttft_s", "tpot_s", "level")


def read(folder: Path) -> dict[str, Any] | None:
    """The summary of exactly the records in ``folder``; None when not measured.

    Raises:
        ValueError: the file is not such a summary; names file and field.
    """
    path, records = folder / results.SUMMARY, folder / results.RECORDS
    if not records.exists():
        return None
    hint = "run the same eval.py command again"
    if not path.exists():
        print(f"{path}: no such file; {hint}", file=sys.stderr)
        return None
    found = read_json(path)
    results.require(isinstance(found, dict), str(path), found, "an object")
    if found.get("records_sha256") != file_sha256(records):
        print(f"{path}: made from other records, so not used; {hint}", file=sys.stderr)
        return None
    for name in _NUMBERS:
        value = found.get(name)
        results.require(results.is_number(value), f"{path}: {name}", value, "a number")
    for name in ("attainment", "capacities", "ratios", "scaled"):
        value = found.get(name)
        results.require(isinstance(value, dict), f"{path}: {name}", value, "an object")
    return dict(found)


def draw(summary: dict[str, Any] | None, target: str) -> Any:
    """Attainment by rate on the left, by scale of both limits on the right."""
    fig, axes = style.figure(width=style.PAGE_IN, height=2.5, columns=2)
    if not summary or not summary["attainment"]:
        for place in axes:
            style.empty(place, f"no slo records of {target} yet")
        return fig
    left, right = axes
    arms = style.in_order(summary["attainment"])
    for arm in arms:
        rates, shares, _ = zip(*summary["attainment"][arm], strict=True)
        _line(left, arm, rates, shares)
    left.axhline(100 * summary["level"], color="#777777", linewidth=0.6, linestyle=(0, (4, 3)))
    left.set_xlabel("arrival rate (requests/s)")
    left.set_ylabel("SLO attainment (%)")
    if summary["scaled"]:
        for arm in style.in_order(summary["scaled"]):
            _line(right, arm, summary["scales"], summary["scaled"][arm])
        right.set_xlabel(f"scale of both limits, at {summary['scale_rate']:g} requests/s")
        right.set_xscale("log")
        right.set_xticks([0.1, 0.2, 0.5, 1, 2, 4], ["0.1", "0.2", "0.5", "1", "2", "4"])
        right.minorticks_off()
    else:
        style.empty(right, "no rate above DSpark's capacity was measured")
    for place in axes:
        place.set_ylim(-3, 103)
    fig.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=len(arms),
               frameon=False)  # fmt: skip
    limits = f"TTFT within {summary['ttft_s']:g} s, TPOT within {1000 * summary['tpot_s']:g} ms"
    missing = [style.look(arm).label for arm in style.ARMS if arm not in arms]
    style.note(fig, "; ".join([limits, *(["not measured: " + ", ".join(missing)] * bool(missing))]))
    return fig


def _line(axes: Any, arm: str, x: Any, shares: Any) -> None:
    look = style.look(arm)
    axes.plot(x, [100 * share for share in shares], label=look.label, color=look.color,
              marker=look.marker, linestyle=look.line,
              markersize=7 if look.marker == "*" else None)  # fmt: skip


def frame(summary: dict[str, Any] | None) -> pd.DataFrame:
    """Every point of both panels: panel, arm, x, attainment."""
    rows = []
    if summary:
        for arm, points in summary["attainment"].items():
            rows += [("rate", arm, rate, share) for rate, share, _ in points]
        for arm, shares in summary["scaled"].items():
            pairs = zip(summary["scales"], shares, strict=True)
            rows += [("scale", arm, scale, share) for scale, share in pairs]
    return pd.DataFrame(rows, columns=["panel", "arm", "x", "attainment"])


def render(summary: dict[str, Any] | None) -> str:
    """Markdown: capacity of each arm, and ForeSpark's over it."""
    if not summary or not summary["attainment"]:
        return "No slo records yet.\n"
    level = f"{100 * summary['level']:g} %"
    lines = [f"| arm | requests/s at {level} attainment | ForeSpark's over it |", "|---|---:|---:|"]
    for arm in style.in_order(summary["capacities"]):
        cell = summary["capacities"][arm]
        ratio = summary["ratios"].get(arm)
        over = "" if arm == "forespark" else ratio_text(ratio)
        lines.append(f"| {style.look(arm).label} | {capacity_text(cell)} | {over} |")
    ask = (f"A request attains with TTFT within {summary['ttft_s']:g} s and TPOT within "
           f"{1000 * summary['tpot_s']:g} ms.")  # fmt: skip
    return "\n".join([*lines, "", ask]) + "\n"


def capacity_text(cell: dict[str, Any]) -> str:
    if cell["rate"] == "above":
        return "above all measured"
    return "not reached" if cell["rate"] is None else f"{cell['rate']:.3g}{_spread(cell)}"


def ratio_text(ratio: dict[str, Any] | None) -> str:
    if not ratio or ratio["ratio"] is None:
        return "n/a"
    return f"{ratio['ratio']:.2f}×{_spread(ratio)}"


def _spread(cell: dict[str, Any]) -> str:
    found = cell.get("interval")
    return f" [{found[0]:.2f}, {found[1]:.2f}]" if found else ""


def main() -> None:
    folder, out, target = results.parse(__doc__, "bench/slo")
    summary = read(folder)
    paths = style.save(draw(summary, target), out, "slo")
    write_text(out / "slo.csv", frame(summary).to_csv(index=False))
    write_text(out / "slo.md", render(summary))
    print(*paths, out / "slo.csv", out / "slo.md", sep="\n")


if __name__ == "__main__":
    results.run(main)
