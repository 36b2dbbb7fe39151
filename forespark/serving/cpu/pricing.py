"""Step prices for vLLM's adaptive verification, measured when a CPU worker warms up.

vLLM measures them while it captures CUDA graphs, which the CPU worker never does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

_REPLAYS = 3


def profile_sizes(max_requests: int, max_tokens: int) -> list[int]:
    """Token counts to time: 1, 2, 4, ... up to the largest batch, that batch, then doublings.

    Args:
        max_requests: requests the engine runs at once.
        max_tokens: tokens of the largest step.
    """
    sizes = {min(1 << power, max_tokens) for power in range(max_tokens.bit_length())}
    return sorted(sizes | {min(max_requests, max_tokens), max_tokens})


def dense_curve(points: Iterable[tuple[int, float]], limit: int) -> list[tuple[int, float]]:
    """A price for every size 1 ... limit, linear between the medians of measured sizes.

    vLLM reads its curves as steps because a graph pads to the next captured size. A CPU
    pads nothing, and a step would make every token up to the next size look free.

    Args:
        points: (size, milliseconds), several per size.
        limit: largest size to price.
    """
    grouped: defaultdict[int, list[float]] = defaultdict(list)
    for size, milliseconds in points:
        grouped[size].append(milliseconds)
    sizes = sorted(grouped)
    medians = [float(np.median(grouped[size])) for size in sizes]
    wanted = np.arange(1, limit + 1)
    prices = np.interp(wanted, sizes, medians)
    return [(int(size), float(price)) for size, price in zip(wanted, prices, strict=True)]


def price_steps(runner: Any) -> None:
    """Time dummy steps of a V2 model runner and hand the curves to its manager."""
    manager = runner.adaptive_verification
    states = runner.req_states
    sizes = profile_sizes(states.max_num_reqs, states.max_num_batched_tokens)
    for size in sizes[:2]:
        runner._dummy_run(num_tokens=size)  # first use compiles and allocates
    with runner.step_timing.collect() as samples:
        for size in sizes:
            for _ in range(_REPLAYS):
                runner._dummy_run(num_tokens=size)
    manager.set_cost_curves(
        dense_curve(((s.num_reqs, s.drafter_ms) for s in samples), states.max_num_reqs),
        dense_curve(
            ((s.num_target_tokens, s.forward_ms) for s in samples), states.max_num_batched_tokens
        ),
    )
