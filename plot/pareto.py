"""Total throughput against user interactivity (paper, Figures 1, 8 and 14).

    python plot/pareto.py --target smollm2 [--bench e2e]
    python plot/pareto.py --records results/cpu/bench/decode --out results/cpu/figures

One line per arm, one marker per load; the arrow marks the largest gain of ForeSpark over
the strongest baseline at equal interactivity. Writes pareto.pdf, pareto.png, pareto.csv;
for other benchmarks than decode pareto_BENCH.*.
"""

from __future__ import annotations

from typing import Any

import environment  # noqa: F401  (before pandas)
import pandas as pd
import results
import style
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from forespark.record import write_text


def draw(points: pd.DataFrame, best: dict[str, Any] | None, target: str, bench: str) -> Any:
    """The figure; arms without a record are named under it."""
    fig, axes = style.figure()
    measured = style.in_order(points["arm"]) if len(points) else []
    for arm in measured:
        rows = points[points["arm"] == arm].sort_values("load")
        look = style.look(arm)
        spread = [rows["throughput"] - rows["throughput_min"],
                  rows["throughput_max"] - rows["throughput"]]  # fmt: skip
        axes.errorbar(
            rows["interactivity"], rows["throughput"], yerr=spread, label=look.label,
            color=look.color, marker=look.marker, linestyle=look.line, elinewidth=0.6,
            markersize=7 if look.marker == "*" else None, zorder=3 if arm == "forespark" else 2,
        )  # fmt: skip
    if measured:
        _axes(axes)
        if best is not None:
            _arrow(axes, best)
        fig.legend(loc="outside upper center", ncols=3, frameon=False, columnspacing=1.0,
                   handlelength=2.4)  # fmt: skip
    else:
        style.empty(axes, f"no {bench} records of {target} yet")
    axes.set_xlabel("user interactivity (tokens/s per user)")
    axes.set_ylabel("total throughput (tokens/s)")
    missing = [style.look(arm).label for arm in style.ARMS if arm not in measured]
    style.note(fig, f"not measured: {', '.join(missing)}" if missing else "")
    return fig


def _axes(axes: Any) -> None:
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    # Less than a decade wide has too few powers of ten to read values from.
    steps = (1, 2, 5) if high / low > 8 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    axes.xaxis.set_major_locator(LogLocator(subs=steps))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    axes.grid(True, linewidth=0.3, color="#dddddd")


def _arrow(axes: Any, best: dict[str, Any]) -> None:
    """From the strongest baseline up to ForeSpark, at the matched interactivity."""
    if best["ratio"] <= 1:
        return
    x = best["interactivity_tokens_per_s"]
    low, high = best["base_throughput_tokens_per_s"], best["throughput_tokens_per_s"]
    axes.annotate("", (x, high), (x, low), zorder=4,
                  arrowprops={"arrowstyle": "->", "lw": 0.9, "color": "#111111",
                              "shrinkA": 0, "shrinkB": 1})  # fmt: skip
    axes.annotate(f"{best['ratio']:.2f}×", (x, high), (4, 5), textcoords="offset points",
                  fontsize=7, zorder=4)  # fmt: skip


def main() -> None:
    folder, out, target = results.parse(__doc__, benches=results.LOADED)
    frame = results.read(folder)
    points, found = results.points(frame), results.summary(folder)
    stem, bench = results.named("pareto", folder, frame)
    fig = draw(points, found["best_over_strongest"] if found else None, target, bench)
    paths = style.save(fig, out, stem)
    write_text(out / f"{stem}.csv", points.to_csv(index=False))
    print(*paths, out / f"{stem}.csv", sep="\n")


if __name__ == "__main__":
    results.run(main)
