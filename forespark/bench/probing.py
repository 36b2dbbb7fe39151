"""At which rates the open loop is measured: the paper's fixed rule (Appendix C).

Two light rates, then evenly spaced ones from 0.75 times the lowest probed capacity to beyond
the highest. A probe doubles the rate until attainment falls below the level, then halves the
interval between the last two a few times.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from forespark.bench.attainment import capacity

LIGHT = (0.25, 0.5)  # of the lowest capacity
FROM, BEYOND = 0.75, 1.25  # of the lowest and of the highest capacity
_DOUBLINGS = 12
_HALVINGS = 2


async def probe(
    attainment: Callable[[float], Awaitable[float]], start: float, level: float
) -> float:
    """Capacity of one arm by a few short runs.

    Args:
        attainment: share of requests within the limits at a rate (requests per second).
        start: first rate.

    Raises:
        ValueError: attainment stays on one side of the level over a 4096-fold range.
    """
    seen = {start: await attainment(start)}
    down = seen[start] < level
    rate = start
    for _ in range(_DOUBLINGS):
        rate = rate / 2 if down else rate * 2
        seen[rate] = await attainment(rate)
        if (seen[rate] >= level) == down:
            break
    else:
        raise ValueError(
            f"slo.probe_rate: from {start:g} to {rate:g} requests/s attainment stays "
            f"{'below' if down else 'above'} {level:g}; loosen or tighten slo.ttft_s and "
            "slo.tpot_s, or set slo.rates"
        )
    low, high = sorted((rate, rate * 2 if down else rate / 2))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        seen[middle] = await attainment(middle)
        low, high = (middle, high) if seen[middle] >= level else (low, middle)
    found = capacity([low, high], [seen[low], seen[high]], level)
    assert found is not None
    return found


def chosen_rates(capacities: list[float], points: int) -> list[float]:
    """Rates to measure (requests per second), ascending, with three significant digits.

    Args:
        capacities: of the probed arms.
        points: rates in all, at least four.
    """
    lowest, highest = min(capacities), max(capacities)
    even = points - len(LIGHT)
    first, last = FROM * lowest, BEYOND * highest
    rates = [share * lowest for share in LIGHT]
    rates += [first + (last - first) * index / (even - 1) for index in range(even)]
    return [float(f"{rate:.3g}") for rate in rates]
