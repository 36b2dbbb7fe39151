"""Closed and open loops of streaming requests, and how late their client was.

A closed loop keeps a fixed number of clients busy; an open loop sends at given times whatever
the server does. Both run on one event loop, so a client that has no processor left measures
itself; ``LagMeter`` watches for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forespark.bench.client import Client, RequestResult, clock
from forespark.bench.workloads import Prompt

RUNNING = "vllm:num_requests_running"
_TICK_S = 0.02
_POLL_S = 1.0
_STILL_S = 5.0  # a batch that has not grown for so long does not grow any more
_FULL = 0.9  # of the load

Observe = Callable[[], Awaitable[Any]]
Send = Callable[[Prompt, RequestResult], Awaitable[RequestResult]]


class LagMeter:
    """How late this event loop wakes up, by a timer that does nothing else."""

    def __init__(self) -> None:
        self.late_s: list[float] = []

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[LagMeter]:
        ticking = asyncio.create_task(self._tick())
        try:
            yield self
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            due = clock() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.late_s.append(clock() - due)

    def p99_s(self, since: int = 0) -> float:
        """Of the ticks from number ``since`` on; 0 when there was none."""
        late = self.late_s[since:]
        return float(np.percentile(late, 99)) if late else 0.0


@dataclass(slots=True)
class Window:
    """What a closed loop did while it was measured. Times are ``clock`` seconds."""

    start_s: float
    warmup_s: float
    before: Any  # what was observed at its start, and at its end
    after: Any = None
    end_s: float = 0.0
    ended: list[RequestResult] = field(default_factory=list)  # of the measured sequence
    tokens: int = 0  # of all requests, by their arrival
    lag_s_p99: float = 0.0


class ClosedLoop:
    """``load`` clients, each with one request in flight.

    Args:
        send: sends one prompt and streams into the given result.
        warm: requests before the window.
        measured: requests from the window's start on.
        observe: called at the start and at the end of the window, which keeps what it returns.
    """

    def __init__(
        self,
        client: Client,
        send: Send,
        warm: Iterator[Prompt],
        measured: Iterator[Prompt],
        observe: Observe,
    ) -> None:
        self.client, self.send, self.observe = client, send, observe
        self.warm, self.measured = warm, measured
        self.results: list[RequestResult] = []  # of all requests, as they were sent
        self.warming = True
        self.failed = asyncio.Event()

    async def run(self, load: int, *, warmup_s: float, requests: int, window_s: float) -> Window:
        """Warm up, measure, and cancel what is still in flight.

        The window lasts ``window_s`` or more, until the first ``requests`` requests of the
        measured sequence have ended, so that these are the same for every arm; it ends early
        when a request fails.
        """
        meter = LagMeter()
        async with meter.watch():
            began = clock()
            clients = [asyncio.create_task(self._client()) for _ in range(load)]
            try:
                await self._warm_up(load, warmup_s)
                window = Window(clock(), clock() - began, await self.observe())
                ticks, first, self.warming = len(meter.late_s), len(self.results), False
                await self._until(lambda: self._complete(window, first, requests, window_s))
                window.end_s, window.after = clock(), await self.observe()
            finally:
                for task in clients:
                    task.cancel()
                await asyncio.gather(*clients, return_exceptions=True)
        # Requests of the warm-up that end in the window are not of the sequence.
        window.ended = [result for result in self.results[first:] if result.done]
        window.tokens = sum(
            window.start_s < t <= window.end_s for r in self.results for t in r.token_times_s
        )
        window.lag_s_p99 = meter.p99_s(ticks)
        return window

    def _complete(self, window: Window, first: int, requests: int, window_s: float) -> bool:
        sequence = self.results[first : first + requests]
        return (
            clock() - window.start_s >= window_s
            and len(sequence) == requests
            and all(result.done for result in sequence)
        )

    async def _client(self) -> None:
        while True:
            prompt = next(self.warm if self.warming else self.measured)
            result = RequestResult(prompt.id, clock())
            self.results.append(result)
            await self.send(prompt, result)
            if result.error:
                self.failed.set()

    async def _until(self, finished: Callable[[], bool]) -> None:
        while not finished() and not self.failed.is_set():
            await asyncio.sleep(0.05)

    async def _warm_up(self, load: int, least_s: float) -> None:
        """At least ``least_s``, until the batch has 90 % of the load or stops growing."""
        began = grown = clock()
        most = 0.0
        while not self.failed.is_set():
            running = (await self.client.counters((RUNNING,))).get(RUNNING)
            now = clock()
            if running is not None and running > most:
                most, grown = running, now
            steady = running is None or most >= _FULL * load or now - grown >= _STILL_S
            if now - began >= least_s and steady:
                return
            await asyncio.sleep(min(_POLL_S, max(least_s - (now - began), 0.05)))


async def open_loop(
    send: Send, prompts: list[Prompt], due_s: list[float], *, patience_s: float
) -> tuple[list[RequestResult], float]:
    """Send every prompt at its time, and wait for the answers.

    Args:
        due_s: seconds after now, ascending, one per prompt.
        patience_s: after the last arrival; what is in flight then is cancelled.

    Returns:
        One result per prompt, and the 99th percentile of the client's lateness in seconds:
        of its sends and of its timers, whichever is worse.
    """
    meter = LagMeter()
    start = clock()
    results = [RequestResult(p.id, start + due) for p, due in zip(prompts, due_s, strict=True)]

    async def one(prompt: Prompt, result: RequestResult) -> None:
        await asyncio.sleep(max(result.due_s - clock(), 0.0))
        await send(prompt, result)

    async with meter.watch():
        tasks = [
            asyncio.create_task(one(prompt, result))
            for prompt, result in zip(prompts, results, strict=True)
        ]
        try:
            await asyncio.wait(tasks, timeout=due_s[-1] + patience_s - (clock() - start))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if not result.done:
            result.end = "cancelled"  # also of one that was never sent
    sent = [result.sent_s - result.due_s for result in results if result.sent_s]
    return results, max(meter.p99_s(), float(np.percentile(sent, 99)) if sent else 0.0)
