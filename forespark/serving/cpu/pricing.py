"""Step prices for vLLM's adaptive verification, measured when a CPU worker warms up.

vLLM measures them while it captures CUDA graphs, which the CPU worker never does.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

_REPLAYS = 3
_CONTEXT = 256  # tokens behind each request; vLLM's default, 8192, would time the attention


def profile_sizes(largest: int, max_requests: int) -> list[int]:
    """Token counts to time: 1, 2, 4, ... below the largest, and the two batch limits.

    Args:
        largest: tokens of the largest step worth timing.
        max_requests: requests the engine runs at once.
    """
    sizes = {1 << power for power in range(largest.bit_length()) if 1 << power <= largest}
    return sorted(sizes | {min(max_requests, largest), largest})


def dense_curve(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """A price for every size up to the largest measured, linear between the medians.

    vLLM reads its curves as steps because a graph pads to the next captured size. A CPU
    pads nothing, and a step would make every token up to the next size look free. Past
    the largest size vLLM extends the last slope.

    Args:
        points: (size, milliseconds), several per size.
    """
    grouped: defaultdict[int, list[float]] = defaultdict(list)
    for size, milliseconds in points:
        grouped[size].append(milliseconds)
    sizes = sorted(grouped)
    medians = [float(np.median(grouped[size])) for size in sizes]
    wanted = np.arange(1, sizes[-1] + 1)
    prices = np.interp(wanted, sizes, medians)
    return [(int(size), float(price)) for size, price in zip(wanted, prices, strict=True)]


def price_steps(runner: Any) -> None:
    """Time dummy steps of a V2 model runner and hand the curves to its manager.

    Sizes end at the largest verification (every request with all its drafts): a larger step
    is mostly prefill, whose price the last slope tells well enough.
    """
    states = runner.req_states
    verification = states.max_num_reqs * (1 + states.num_speculative_steps)
    sizes = profile_sizes(min(verification, states.max_num_batched_tokens), states.max_num_reqs)
    context = int(os.environ.get("VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN", _CONTEXT))
    for size in sizes[:2]:
        runner._dummy_run(num_tokens=size, context_len=context)  # compiles and allocates
    with runner.step_timing.collect() as samples:
        for size in sizes:
            for _ in range(_REPLAYS):
                runner._dummy_run(num_tokens=size, context_len=context)
    runner.adaptive_verification.set_cost_curves(
        dense_curve((s.num_reqs, s.drafter_ms) for s in samples),
        dense_curve((s.num_target_tokens, s.forward_ms) for s in samples),
    )
