"""Time one batch through the decode barrier and turn it into a record."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from forespark.bench import steptrace
from forespark.bench.client import Client, RequestResult
from forespark.bench.plan import Point
from forespark.bench.records import LoadRecord
from forespark.bench.workloads import Prompt
from forespark.config import BenchConfig

COUNTERS = (
    "forespark:drafted_tokens_total",
    "forespark:verified_tokens_total",
    "forespark:accepted_tokens_total",
)


class NotMeasured(Exception):
    """A point gave no measurement; the message says why."""


class BatchFailed(NotMeasured):
    """Some request of a batch failed, so the batch is no measurement."""

    def __init__(self, results: list[RequestResult]) -> None:
        self.errors = sorted({r.error for r in results if r.error is not None})
        super().__init__("; ".join(self.errors)[:500])


@dataclass(frozen=True, slots=True)
class Arm:
    """A served arm, as one batch sees it."""

    name: str
    target: str
    run_id: str
    trace: Path | None


async def measure(
    client: Client, prompts: list[Prompt], bench: BenchConfig, point: Point, arm: Arm
) -> LoadRecord:
    """Run one batch and summarize it.

    Raises:
        BatchFailed: at least one request has an error.
    """
    before = await client.counters(COUNTERS)
    steptrace.settle(arm.trace)
    trace_start = steptrace.end_of(arm.trace)
    results = await client.batch(
        prompts,
        max_tokens=bench.output_tokens + 1,
        temperature=bench.temperature,
        seed=bench.seed,
    )
    if any(result.error for result in results):
        raise BatchFailed(results)
    after = await client.counters(COUNTERS)
    steptrace.settle(arm.trace)
    steps = steptrace.step_times(arm.trace, trace_start)
    return summarize(
        results,
        point,
        arm,
        [delta(before, after, name) for name in COUNTERS],
        steps,
        bench.output_tokens,
    )


def summarize(
    results: list[RequestResult],
    point: Point,
    arm: Arm,
    counts: list[int | None],  # drafted, verified, accepted tokens
    steps: steptrace.StepTimes | None,
    output_tokens: int,
) -> LoadRecord:
    """Throughput and interactivity of one batch (Appendix C).

    A request's rate is its timed tokens over the time from the release to the last of
    them. The release is the batch's last first token: until then the barrier held every
    request, so the wait belongs to the prefill of the others and not to its own decoding.

    Raises:
        BatchFailed: no request has a timed token, so there is no rate.
    """
    firsts = [r.token_times_s[0] for r in results if r.token_times_s]
    if not firsts or max(r.output_tokens for r in results) < 2:
        raise BatchFailed([*results, RequestResult("", 0.0, error="no request had two tokens")])
    release_s = max(firsts)
    timed = [min(max(r.output_tokens - 1, 0), output_tokens) for r in results]
    spans = [
        r.token_times_s[count] - release_s if count else 0.0
        for r, count in zip(results, timed, strict=True)
    ]
    rates = [count / span for count, span in zip(timed, spans, strict=True) if count and span > 0]
    if not rates:
        raise BatchFailed([RequestResult("", 0.0, error="all tokens came before the release")])
    drafted, verified, accepted = counts
    return LoadRecord(
        run_id=arm.run_id,
        target=arm.target,
        arm=arm.name,
        load=point.load,
        round=point.round,
        batch=point.batch,
        prompt_ids=[r.prompt_id for r in results],
        timed_tokens=timed,
        span_s=spans,
        ends=[r.end for r in results],
        output_sha256=[r.output_sha256 for r in results],
        throughput_tokens_per_s=sum(rates),
        interactivity_tokens_per_s=statistics.median(rates),
        wall_s=max(spans),
        ttft_s_p50=statistics.median(r.ttft_s for r in results if r.ttft_s is not None),
        drafted_tokens=drafted,
        verified_tokens=verified,
        accepted_tokens=accepted,
        **(asdict(steps) if steps else {}),
    )


def delta(before: dict[str, float], after: dict[str, float], name: str) -> int | None:
    """Growth of a counter; None for one that the server does not have."""
    # A counter that appears with its first increment was zero before.
    return round(after[name] - before.get(name, 0.0)) if name in after else None
