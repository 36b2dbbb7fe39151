"""One look for all figures: an arm has the same colour, marker and name everywhere.

Colours differ in lightness and arms in marker and line style, so figures stay legible in
greyscale and for colour-blind readers. Fonts fit a single column.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLUMN_IN = 3.4  # one column of a two-column page
PAGE_IN = 7.0
PNG_DPI = 220


@dataclass(frozen=True, slots=True)
class Look:
    """How one arm is drawn."""

    label: str
    color: str
    marker: str
    line: Any


LOOKS = {
    "ar": Look("AR", "#111111", "o", (0, (4, 2))),
    "dflash2": Look("DFlash 2", "#e7a33c", "s", (0, (1, 1.2))),
    "dspark": Look("DSpark", "#3f8fc4", "^", (0, (5, 1.5, 1, 1.5))),
    "forespark_nojs": Look("ForeSpark w/o JS", "#8b7fb8", "D", (0, (3, 1))),
    "forespark": Look("ForeSpark", "#b3122a", "*", "-"),
    "bw": Look("BW", "#5a9e6f", "v", (0, (2, 1))),
    "bw_stock": Look("BW (vLLM's)", "#9cc7a8", "<", (0, (2, 1))),
    "forespark_sc": Look("ForeSpark, one curve", "#d9808e", "P", "-"),
    "exhaustive": Look("exhaustive search", "#555555", "X", "-"),
    "dspark_wcs": Look("DSpark + WCS", "#1d4e79", "h", "-"),
}  # in the order of legends, bars and table rows
# Of the main comparison: a figure without one of these says so.
ARMS = ("ar", "dflash2", "dspark", "forespark_nojs", "forespark")
_SPARE = ("v", "P", "X", "<", ">", "h")

# Parts of a step: dark, mid and light grey-blue, with a hatch on drafting.
PARTS = {
    "verify_ms": ("verification", "#2b4c6f", ""),
    "draft_ms": ("drafting", "#8fb3d1", "////"),
    "other_ms": ("other", "#e3e6ea", ""),
}


def look(arm: str) -> Look:
    """Look of an arm; one that is not listed gets grey and a marker of its own."""
    if arm in LOOKS:
        return LOOKS[arm]
    return Look(arm, "#777777", _SPARE[sum(map(ord, arm)) % len(_SPARE)], "-")


def in_order(arms: Any) -> list[str]:
    """Known arms in their fixed order, then the others by name."""
    found = set(arms)
    return [arm for arm in LOOKS if arm in found] + sorted(found - set(LOOKS))


def figure(width: float = COLUMN_IN, height: float = 2.6, columns: int = 1) -> tuple[Any, Any]:
    """Figure and axes (an array of them, for several columns) with this project's look."""
    plt.rcParams.update(
        {
            "font.size": 8,
            "axes.labelsize": 8,
            "legend.fontsize": 7,
            "xtick.labelsize": 7,
            "ytick.labelsize": 7,
            "axes.linewidth": 0.6,
            "lines.linewidth": 1.2,
            "lines.markersize": 4.5,
            "hatch.linewidth": 0.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "pdf.fonttype": 42,  # editable text instead of outlines
        }
    )
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained")


def note(fig: Any, text: str) -> None:
    """A remark under the figure, for instance what is missing from it."""
    if text:
        fig.supxlabel(text, fontsize=6, color="#555555", x=0.02, ha="left")


def empty(axes: Any, text: str) -> None:
    """Say inside the axes why nothing is drawn."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, wrap=True)


def save(fig: Any, out: Path, name: str) -> list[Path]:
    """Write PDF and PNG; returns both paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.pdf", out / f"{name}.png"]
    # No creation date: the same records give the same bytes.
    fig.savefig(paths[0], metadata={"CreationDate": None})
    fig.savefig(paths[1], dpi=PNG_DPI)
    plt.close(fig)
    return paths
