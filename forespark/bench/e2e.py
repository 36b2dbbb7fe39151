"""The end-to-end benchmarks: closed loops over conversations (e2e) and questions (mathcode).

Every point starts from an empty prefix cache, warms up on held-out requests, and then every
arm meets the same sequence of requests (paper, Appendices C and D).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forespark.bench import steptrace
from forespark.bench.client import Client, RequestResult, clock
from forespark.bench.conversations import (
    CountTokens,
    Streams,
    conversation_streams,
    question_streams,
)
from forespark.bench.estimate import StepClock
from forespark.bench.loops import RUNNING, ClosedLoop, Window
from forespark.bench.measure import COUNTERS, Arm, NotMeasured, delta
from forespark.bench.plan import Point
from forespark.bench.records import LoadRecord
from forespark.bench.rounds import ArmRounds
from forespark.bench.workloads import Prompt
from forespark.config import Config

_IDLE_S = 60.0  # at most, for a server to drop what was cancelled


@dataclass(frozen=True, slots=True)
class Observed:
    """A server at one moment."""

    counters: dict[str, float]
    trace: int  # bytes of the step trace


class StreamBenchmark(ArmRounds):
    """What closed and open loops share: streams of requests, an idle server, sending."""

    def __init__(self, config: Config, out: Path, endpoint: str | None = None) -> None:
        super().__init__(config, out, endpoint)
        self.stream = config.stream
        self.prefix_cache = config.stream.prefix_cache and self.bench_name != "mathcode"

    def prepare(self) -> None:
        make = question_streams if self.bench_name == "mathcode" else conversation_streams
        count = token_counter(self.config.target.model)
        self.streams: Streams = make(
            self.stream, count, seed=self.bench.seed, limit=self.bench.limit
        )

    async def warm_up(self, client: Client, todo: Sequence[Any]) -> None:
        """One request: every point warms up by itself, but first calls compile."""
        prompt = self.streams.held_out[0]
        await self.send(client)(prompt, RequestResult(prompt.id, clock()))

    def send(self, client: Client) -> Any:
        """How a loop sends one prompt."""

        async def sent(prompt: Prompt, result: RequestResult) -> RequestResult:
            return await client.chat(
                prompt,
                max_tokens=self.stream.output_tokens,
                temperature=self.bench.temperature,
                seed=self.bench.seed,
                into=result,
            )

        return sent

    async def begin(self, client: Client) -> None:
        """An idle server with an empty prefix cache.

        Raises:
            NotMeasured: something else is still running on it, or it keeps its cache.
        """
        deadline = clock() + _IDLE_S
        while (await client.counters((RUNNING,))).get(RUNNING, 0.0) > 0:
            if clock() > deadline:
                raise NotMeasured(f"the server still runs requests after {_IDLE_S:.0f} s")
            await asyncio.sleep(0.2)
        if self.prefix_cache and (failure := await client.empty_prefix_cache()):
            raise NotMeasured(
                f"the server does not empty its prefix cache ({failure}): start it with "
                "VLLM_SERVER_DEV_MODE=1, or set stream.prefix_cache=false"
            )

    def require_prompt_client(self, lag_s: float) -> None:
        """
        Raises:
            NotMeasured: the client was later than ``stream.max_lag_s``.
        """
        if lag_s > self.stream.max_lag_s:
            raise NotMeasured(
                f"invalid: the load generator was {1000 * lag_s:.0f} ms late (p99), more than "
                f"stream.max_lag_s={self.stream.max_lag_s:g}; give it a processor of its own"
            )


class ClosedLoopBenchmark(StreamBenchmark):
    """e2e: conversations with their history."""

    bench_name = "e2e"
    record_type = LoadRecord

    def points(self, round_index: int) -> list[Point]:
        loads = sorted(set(self.stream.loads or self.bench.loads))
        return [Point(load, round_index, 0) for load in loads]

    def key(self, arm: str, point: Point) -> tuple[Any, ...]:
        return (self.bench_name, arm, point.load, point.round, point.batch)

    def expected_s(self, point: Point, clock: StepClock) -> float:
        # Answers are as long as the limit at most, and prompts come on top.
        answers_s = self.stream.output_tokens * clock.step_s(point.load)
        waves = -(-self.answers(point.load) // point.load)
        return self.stream.warmup_s + max(self.stream.window_s, waves * answers_s)

    async def measure(self, client: Client, arm: Arm, point: Point) -> LoadRecord:
        await self.begin(client)

        async def observe() -> Observed:
            return Observed(await client.counters(COUNTERS), steptrace.end_of(arm.trace))

        # Rounds go on in the sequence, so that together they see more of it.
        needed = self.answers(point.load)
        loop = ClosedLoop(
            client, self.send(client), self.streams.warm(),
            self.streams.endless(point.round * needed), observe,
        )  # fmt: skip
        window = await loop.run(
            point.load, warmup_s=self.stream.warmup_s, requests=needed,
            window_s=self.stream.window_s,
        )  # fmt: skip
        errors = sorted({r.error for r in loop.results if r.done and r.error})
        if errors:
            raise NotMeasured("; ".join(errors)[:500])
        self.require_prompt_client(window.lag_s_p99)
        steps = steptrace.step_times(arm.trace, window.before.trace, window.after.trace)
        return summarize(self.bench_name, window, point, arm, steps)

    def answers(self, load: int) -> int:
        """Answers that end a window at this load."""
        return max(self.stream.window_requests, self.stream.window_per_client * load)


class QuestionBenchmark(ClosedLoopBenchmark):
    """mathcode: single-turn questions, without a prefix cache."""

    bench_name = "mathcode"


def summarize(
    bench: str, window: Window, point: Point, arm: Arm, steps: steptrace.StepTimes | None
) -> LoadRecord:
    """Throughput of the window, and the rates of the requests that ended in it.

    Raises:
        NotMeasured: no request with two tokens ended in it.
    """
    results = window.ended
    timed = [max(r.output_tokens - 1, 0) for r in results]
    spans = [r.token_times_s[-1] - r.token_times_s[0] if r.token_times_s else 0.0 for r in results]
    rates = [count / span for count, span in zip(timed, spans, strict=True) if span > 0]
    ttft = [r.ttft_s for r in results]
    if not rates or None in ttft:
        raise NotMeasured("requests ended without two tokens, so there is no rate")
    wall_s = window.end_s - window.start_s
    drafted, verified, accepted = (
        delta(window.before.counters, window.after.counters, name) for name in COUNTERS
    )
    first_tokens = [t for t in ttft if t is not None]
    return LoadRecord(
        bench=bench, run_id=arm.run_id, target=arm.target, arm=arm.name, load=point.load,
        round=point.round, batch=point.batch,
        prompt_ids=[r.prompt_id for r in results], timed_tokens=timed, span_s=spans,
        ends=[r.end for r in results], output_sha256=[r.output_sha256 for r in results],
        throughput_tokens_per_s=window.tokens / wall_s,
        interactivity_tokens_per_s=statistics.median(rates), wall_s=wall_s,
        ttft_s_p50=statistics.median(first_tokens), ttft_s=first_tokens,
        drafted_tokens=drafted, verified_tokens=verified, accepted_tokens=accepted,
        decode_steps=steps.decode_steps if steps else None,
        verify_ms=steps.verify_ms if steps else None, draft_ms=steps.draft_ms if steps else None,
        other_ms=steps.other_ms if steps else None,  # of the window's steps without prefill
        prompt_tokens=[r.prompt_tokens for r in results], warmup_s=window.warmup_s,
        window_tokens=window.tokens, lag_s_p99=window.lag_s_p99,
    )  # fmt: skip


def token_counter(model: str) -> CountTokens:
    """Tokens of a chat as the target's template writes it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def count(messages: list[dict[str, str]]) -> int:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return len(tokenizer(ids, add_special_tokens=False).input_ids)

    return count
