"""The paper's headline claims, and how the same number is computed from our records.

A claim with several values gives them for Qwen3-14B / GLM5.3-Flash / GLM5.3. Ours are for
the target whose records are read, at its own K and loads. A claim whose records are not
there, or hold no such arm or load, has no value of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import acceptance
import environment  # noqa: F401  (before pandas)
import motivation
import pandas as pd
import predictor
import results
import scheduler
import slo
import training_cost

from forespark.record import read_json

OURS, DSPARK, NOJS = "forespark", "dspark", "forespark_nojs"


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence of the paper with a number in it."""

    topic: str
    text: str
    paper: str
    where: str  # section, figure or table of the paper
    bench: str  # folder of the records, relative to a folder laid out like runs/TARGET
    command: str  # what makes these records
    ours: Callable[[Path], str | None] | None = None  # None: no benchmark of ours measures it


def _times(value: float, interval: list[float] | None = None) -> str:
    return f"{value:.2f}×" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _pair(folder: Path, arm: str, base: str) -> dict[str, Any] | None:
    found = results.summary(folder)
    pairs = found["pairs"] if found else []
    return next((p for p in pairs if (p["arm"], p["base"]) == (arm, base)), None)


def matched(base: str, arm: str = OURS) -> Callable[[Path], str | None]:
    """Largest throughput ratio of ``arm`` to ``base`` at equal interactivity."""

    def ours(folder: Path) -> str | None:
        pair = _pair(folder, arm, base)
        best = pair["best"] if pair else None
        return _times(best["ratio"], best["interval"]) if best else None

    return ours


def at_length(K: int, ours: Callable[[Path], str | None]) -> Callable[[Path], str | None]:
    """The same for records of drafts of at most ``K`` tokens; others have no value."""

    def checked(folder: Path) -> str | None:
        run = folder / "run.json"
        if not run.exists() or read_json(run)["fixed"].get("K") != K:
            return None
        return ours(folder)

    return checked


def over_strongest(folder: Path) -> str | None:
    found = results.summary(folder)
    best = found.get("best_over_strongest") if found else None
    return _times(best["ratio"]) if best else None


def alone(folder: Path) -> str | None:
    """Interactivity over DSpark's at load 1."""
    pair = _pair(folder, OURS, DSPARK)
    load = pair["loads"].get("1") if pair else None
    return _times(load["interactivity_ratio"], load["interactivity_interval"]) if load else None


def _heaviest(folder: Path, part: str) -> pd.Series | None:
    """Milliseconds per output token of every arm at the largest load they share."""
    points = results.points(results.read(folder))
    if not len(points):
        return None
    points = points[points["load"] == points["load"].max()].set_index("arm")
    parts = ["verify_ms", "draft_ms", "other_ms"] if part == "all" else [part]
    return points[parts].sum(axis=1, min_count=1) * points["decode_steps"] / points["tokens"]


def saved(base: str, part: str) -> Callable[[Path], str | None]:
    """Share of ``base``'s time per token that ForeSpark does without, heaviest load."""

    def ours(folder: Path) -> str | None:
        times = _heaviest(folder, part)
        if times is None or not {OURS, base} <= set(times.dropna().index) or not times[base]:
            return None
        return f"−{100 * (1 - times[OURS] / times[base]):.0f} %"

    return ours


def against_ar(folder: Path) -> str | None:
    """Time per token over AR's at the heaviest load."""
    times = _heaviest(folder, "all")
    if times is None or not {OURS, "ar"} <= set(times.dropna().index):
        return None
    return _times(times[OURS] / times["ar"])


def decision(folder: Path) -> str | None:
    """Medians of one decision at 192 requests, and of exhaustive search there."""
    wide = scheduler.medians(scheduler.read(folder)["time"])
    if not len(wide) or scheduler.PAPER_AT not in wide.index or "plan" not in wide:
        return None
    row = wide.loc[scheduler.PAPER_AT]
    search = row.get("search")
    return f"{row['plan']:.0f} µs" + ("" if pd.isna(search) else f" / {search / 1000:.1f} ms")


def loss(folder: Path) -> str | None:
    rows = scheduler.read(folder)["loss"]
    return f"{100 * (1 - rows['rate'] / rows['best_rate']).mean():.4f} %" if len(rows) else None


def judged(field: str) -> Callable[[Path], str | None]:
    """``within_one`` or ``mae`` of the pre-draft estimate and of the previous step."""

    def ours(folder: Path) -> str | None:
        rows = predictor.read(folder)
        if not rows:
            return None
        both = [rows[0]["predictors"][name][field] for name in ("served", "previous")]
        if field == "within_one":
            return " / ".join(f"{100 * value:.0f} %" for value in both)
        return " / ".join(f"{value:.2f}" for value in both)

    return ours


def _costs(folder: Path) -> pd.DataFrame:
    return training_cost.summarize(*training_cost.read(folder)).set_index("arm")


def iteration_over(base: str) -> Callable[[Path], str | None]:
    """Median time per training iteration over ``base``'s."""

    def ours(folder: Path) -> str | None:
        table = _costs(folder)
        if not {OURS, base} <= set(table.index):
            return None
        return _times(table["median_ratio"][OURS] / table["median_ratio"][base])

    return ours


def estimator_share(folder: Path) -> str | None:
    table = _costs(folder)
    return f"{100 * table['estimator_share'][OURS]:.2f} %" if OURS in table.index else None


def accepted(folder: Path) -> str | None:
    """Mean over the sets that both drafters have."""
    mean = acceptance.means(acceptance.read(folder))
    if not {OURS, DSPARK} <= set(mean.dropna().index):
        return None
    return f"{mean[OURS]:.2f} ({mean[DSPARK]:.2f})"


def moved(least: int) -> Callable[[Path], str | None]:
    """Share of steps whose accepted count is ``least`` or more off the step before."""

    def ours(folder: Path) -> str | None:
        steps = motivation.changes(motivation.read(folder))
        return f"{100 * (steps >= least).mean():.0f} %" if len(steps) else None

    return ours


def length_dependence(folder: Path) -> str | None:
    frame = motivation.table(motivation.read(folder))
    shares = frame[frame["kind"] == "differs"]["share"]
    return f"{100 * shares.min():.0f} to {100 * shares.max():.0f} %" if len(shares) else None


def capacity_over(base: str) -> Callable[[Path], str | None]:
    """Arrival rate at the level of attainment, over ``base``'s."""

    def ours(folder: Path) -> str | None:
        summary = slo.read(folder)
        ratio = summary["ratios"].get(base) if summary else None
        return _times(ratio["ratio"], ratio["interval"]) if ratio and ratio["ratio"] else None

    return ours


def capacity_over_strongest(folder: Path) -> str | None:
    """The same, over the largest capacity of the other arms."""
    summary = slo.read(folder)
    ratios = [r["ratio"] for r in summary["ratios"].values()] if summary else []
    return None if not ratios or None in ratios else _times(min(ratios))


_DECODE = ("bench/decode", "python eval.py --target smollm2 --bench decode")
_SCHEDULER = ("bench/scheduler", "python eval.py --target smollm2 --bench scheduler")
_PREDICTOR = ("bench/predictor", "python eval.py --target smollm2 --bench predictor")
_MOTIVATION = ("bench/motivation", "python eval.py --target smollm2 --bench motivation")
_ACCEPTANCE = ("bench/acceptance", "scripts/bench/acceptance.sh")
_COST = ("bench/training_cost", "scripts/bench/training_cost.py")
_E2E = ("bench/e2e", "python eval.py --target smollm2 --bench e2e")
_SLO = ("bench/slo", "python eval.py --target smollm2 --bench slo")
_MATHCODE = ("bench/mathcode", "scripts/bench/mathcode.sh")


def _variant(name: str) -> tuple[str, str]:
    return f"bench/decode_{name}", f"scripts/bench/variant.sh smollm2 {name}"


_NONE = ("", "not written yet")

CLAIMS = (
    Claim("motivation", "steps whose accepted count differs from the step before",
          "over 80 %", "3, Fig. 3", *_MOTIVATION, moved(1)),
    Claim("motivation", "the same by three tokens or more",
          "about 40 %", "3, Fig. 3", *_MOTIVATION, moved(3)),
    Claim("motivation", "d-token drafts that differ from the full draft's first d tokens",
          "4 to 38 %", "3, Fig. 3", *_MOTIVATION, length_dependence),
    Claim("decode", "throughput over DSpark at equal interactivity, at most",
          "1.77 / 1.40 / 1.34×", "6.2, Fig. 8", *_DECODE, matched(DSPARK)),
    Claim("decode", "throughput over AR at equal interactivity, at most",
          "1.61 / 2.49 / 2.39×", "6.2, Fig. 8", *_DECODE, matched("ar")),
    Claim("decode", "throughput over ForeSpark w/o JS at equal interactivity, at most",
          "1.37 / 1.46 / 1.46×", "6.2, Fig. 8", *_DECODE, matched(NOJS)),
    Claim("decode", "throughput over the strongest other arm at equal interactivity, at most",
          "1.31 / 1.40 / 1.34×", "6.2, Fig. 8", *_DECODE, over_strongest),
    Claim("decode", "interactivity over DSpark's at load 1",
          "1.15 / 1.07 / 0.96×", "6.2", *_DECODE, alone),
    Claim("time per token", "drafting time against DSpark, heaviest load",
          "−76 / −68 / −67 %", "6.3, Fig. 10", *_DECODE, saved(DSPARK, "draft_ms")),
    Claim("time per token", "drafting time against ForeSpark w/o JS, heaviest load",
          "−62 / −70 / −76 %", "6.3, Fig. 10", *_DECODE, saved(NOJS, "draft_ms")),
    Claim("time per token", "total time against DSpark, heaviest load",
          "−37 / −13 / −11 %", "6.3, Fig. 10", *_DECODE, saved(DSPARK, "all")),
    Claim("time per token", "total time over AR, heaviest load",
          "0.89× (Qwen3-14B)", "6.3, Fig. 10", *_DECODE, against_ar),
    Claim("scheduler", "one decision at 192 requests / exhaustive search",
          "88 µs / 8.2 ms", "6.4, Fig. 11", *_SCHEDULER, decision),
    Claim("scheduler", "goodput lost against exhaustive search, mean",
          "≤ 0.01 %", "6.4, Fig. 11", *_SCHEDULER, loss),
    Claim("predictor", "drafts predicted within one token / by the previous step",
          "60 % / 41 %", "6.5, Fig. 12", *_PREDICTOR, judged("within_one")),
    Claim("predictor", "mean absolute error (tokens) / of the previous step",
          "1.82 / 2.80", "6.5, Fig. 12", *_PREDICTOR, judged("mae")),
    Claim("training", "time per iteration over DSpark's",
          "1.12 / 1.05 / 1.11×", "6.6, Fig. 15", *_COST, iteration_over(DSPARK)),
    Claim("training", "time per iteration over DFlash 2's",
          "1.03 to 1.05×", "6.6, Fig. 15", *_COST, iteration_over("dflash2")),
    Claim("training", "estimators' share of the drafter's parameters",
          "0.1 to 0.2 %", "6.6, Fig. 15", *_COST, estimator_share),
    Claim("end to end", "throughput over DSpark at equal interactivity, at most",
          "1.53 / 1.21 / 1.18×", "6.2, Fig. 8", *_E2E, matched(DSPARK)),
    Claim("SLO", "request rate at 90 % attainment over DSpark's",
          "1.51 / 1.13 / 1.17×", "6.2, Fig. 9", *_SLO, capacity_over(DSPARK)),
    Claim("SLO", "request rate at 90 % attainment over the strongest other arm's",
          "1.20 / 1.13 / 1.17×", "6.2, Fig. 9", *_SLO, capacity_over_strongest),
    Claim("math and code", "throughput over DSpark at equal interactivity, at most",
          "1.49 / 1.38 / 1.24×", "6.5, Fig. 14", *_MATHCODE, matched(DSPARK)),
    Claim("acceptance", "mean acceptance length over the sets of prompts, ForeSpark (DSpark)",
          "4.38 (4.28) / 3.33 (3.35) / 3.37 (3.48)", "6.6, Table 2", *_ACCEPTANCE, accepted),
    Claim("acceptance", "mean acceptance length on math and code, K = 7 to K = 15",
          "5.85 to 7.65 / 4.48 to 5.31 / 4.34 to 5.09", "Appendix F, Table 3", *_NONE),
    Claim("drafter type", "throughput over DSpark with a directional drafter, at most",
          "1.55×", "6.5, Fig. 12", *_variant("directional"), matched(DSPARK)),
    Claim("temperature", "throughput over DSpark at temperature 1, at most",
          "1.76×", "6.5, Fig. 12", *_variant("t1"), matched(DSPARK)),
    Claim("draft length", "throughput over DSpark at K = 7, at most",
          "1.32× (Qwen3-14B)", "6.5, Fig. 16", *_DECODE, at_length(7, matched(DSPARK))),
    Claim("draft length", "request rate at 90 % attainment over DSpark's at K = 7",
          "1.21× (Qwen3-14B)", "Appendix F, Fig. 16", *_SLO,
          at_length(7, capacity_over(DSPARK))),
    Claim("draft length", "throughput over DSpark at K = 15, at most",
          "1.77 / 1.40 / 1.34×", "6.2, Fig. 17", *_variant("k15"),
          at_length(15, matched(DSPARK))),
    Claim("other drafters", "throughput of DSpark with WCS over DSpark, at most",
          "1.27×", "6.7, Fig. 13", *_variant("dspark_wcs"), matched(DSPARK, "dspark_wcs")),
    Claim("other drafters", "throughput with WCS over MTP / EAGLE-3, at most",
          "1.30 / 1.26×", "6.7, Fig. 13", *_NONE),
)  # fmt: skip
