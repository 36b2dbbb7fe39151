"""The SLO benchmark: an open loop of conversations at several arrival rates.

At rate r, 30 r arrivals warm up and 120 r are measured; arrivals and requests are identical
for every arm (paper, Appendix C). Rates are given, or probed for first and kept in rates.json.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from forespark.bench.arrivals import arrival_times, counts, read_trace
from forespark.bench.attainment import attained
from forespark.bench.client import Client
from forespark.bench.e2e import StreamBenchmark
from forespark.bench.estimate import StepClock
from forespark.bench.folder import RATES
from forespark.bench.loops import open_loop
from forespark.bench.measure import COUNTERS, Arm, NotMeasured, delta
from forespark.bench.probing import chosen_rates, probe
from forespark.bench.records import SloRecord
from forespark.config import Config
from forespark.record import read_json, write_json

_PROBE_WARMUP = 0.25  # of the arrivals of a probe


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One open loop."""

    rate: float
    round: int


class SloBenchmark(StreamBenchmark):
    """Open loops at ``slo.rates``; rates.json lies beside the records when it probed."""

    bench_name = "slo"
    record_type = SloRecord

    def __init__(self, config: Config, out: Path, endpoint: str | None = None) -> None:
        super().__init__(config, out, endpoint)
        self.slo = config.slo
        self.rates = sorted(self.slo.rates) or self._known_rates()
        if not self.rates and endpoint is not None:
            raise ValueError(
                f"{out / RATES} is not there and one --endpoint cannot be probed for several "
                "arms: name the rates with slo.rates=[...]"
            )
        if self.slo.arrivals.startswith("file:"):
            read_trace(self.slo.arrivals.removeprefix("file:"))

    def points(self, round_index: int) -> list[RatePoint]:
        return [RatePoint(rate, round_index) for rate in self.rates]

    def key(self, arm: str, point: RatePoint) -> tuple[Any, ...]:
        return ("slo", arm, point.rate, point.round)

    def unfinished(self) -> list[str]:
        """As for every benchmark; before rates are known, all arms and those to be probed."""
        if self.rates:
            return super().unfinished()
        return list(dict.fromkeys([*self.bench.arms, *self.slo.probe_arms]))

    def expected_s(self, point: RatePoint, clock: StepClock) -> float:
        return self.slo.warmup_s + self.slo.window_s + self.patience_s(1.0)

    def prepare(self) -> None:
        super().prepare()
        if not self.rates:
            self.rates = self._probe_all()

    def patience_s(self, scale: float) -> float:
        """After the last arrival: who is not done then misses limits up to this scale."""
        return scale * (self.slo.ttft_s + self.slo.tpot_s * self.stream.output_tokens)

    async def measure(self, client: Client, arm: Arm, point: RatePoint) -> SloRecord:
        warm, measured = counts(point.rate, self.slo.warmup_s, self.slo.window_s)
        scale = max(1.0, *self.slo.scales)
        return await self._loop(client, arm, point, (warm, measured), self.patience_s(scale))

    async def _loop(
        self,
        client: Client,
        arm: Arm,
        point: RatePoint,
        arrivals: tuple[int, int],  # of the warm-up, measured
        patience_s: float,
    ) -> SloRecord:
        await self.begin(client)
        warm, measured = arrivals
        seed = self.bench.seed + point.round
        prompts = list(islice(self.streams.endless(point.round * measured), warm + measured))
        due = arrival_times(self.slo.arrivals, point.rate, warm + measured, seed)
        before = await client.counters(COUNTERS)
        results, lag_s = await open_loop(self.send(client), prompts, due, patience_s=patience_s)
        after = await client.counters(COUNTERS)
        self.require_prompt_client(lag_s)
        window = results[warm:]
        arrived = [result.token_times_s[-1] for result in window if result.token_times_s]
        errors = sorted({str(result.error) for result in window if result.end == "error"})
        if errors and not arrived:  # a dead server is no overloaded one
            raise NotMeasured("; ".join(errors)[:500])
        drafted, verified, accepted = (delta(before, after, name) for name in COUNTERS)
        last = max(arrived, default=window[-1].due_s + patience_s)
        return SloRecord(
            run_id=arm.run_id, target=arm.target, arm=arm.name, rate=point.rate,
            round=point.round, arrivals=self.slo.arrivals, warmup_requests=warm,
            prompt_ids=[r.prompt_id for r in window], ends=[r.end for r in window],
            due_s=due[warm:], prompt_tokens=[r.prompt_tokens for r in window],
            output_tokens=[r.output_tokens for r in window],
            ttft_s=[r.ttft_s for r in window], tpot_s=[r.tpot_s for r in window],
            wall_s=last - window[0].due_s, lag_s_p99=lag_s, drafted_tokens=drafted,
            verified_tokens=verified, accepted_tokens=accepted,
        )  # fmt: skip

    # --- rates

    def _known_rates(self) -> list[float]:
        """Rates that an earlier run chose; none before all arms are probed."""
        rates = self._probed().get("rates", [])
        if not isinstance(rates, list) or not all(isinstance(r, int | float) for r in rates):
            raise ValueError(
                f"{self.out / RATES}: rates: got {rates!r}, want numbers; delete it to probe anew"
            )
        return [float(rate) for rate in rates]

    def _probed(self) -> dict[str, Any]:
        path = self.out / RATES
        found = read_json(path) if path.exists() else {"capacities": {}}
        if not isinstance(found, dict) or not isinstance(found.get("capacities"), dict):
            raise ValueError(f"{path}: want an object with capacities; delete it to probe anew")
        return found

    def _probe_all(self) -> list[float]:
        """Probe the arms of ``slo.probe_arms``; what was found is kept after each."""
        path = self.out / RATES
        capacities: dict[str, float] = self._probed()["capacities"]
        for arm in tqdm(self.slo.probe_arms, desc="probing", unit="arm"):
            if arm in capacities:
                continue
            with self.server(arm, f"probe-{arm}") as server:
                served = Arm(arm, self.config.target.name, self.run_id, None)
                capacities[arm] = asyncio.run(self._probe(server.endpoint, served))
            write_json(path, {"schema": 1, "capacities": capacities})
        chosen = [capacities[arm] for arm in self.slo.probe_arms]
        rates = chosen_rates(chosen, self.slo.points)
        write_json(path, {"schema": 1, "capacities": capacities, "rates": rates})
        return rates

    async def _probe(self, endpoint: str, arm: Arm) -> float:
        async with Client(endpoint, timeout_s=self.bench.request_timeout_s) as client:
            await self.warm_up(client, [])

            async def share(rate: float) -> float:
                arrivals = counts(rate, _PROBE_WARMUP * self.slo.probe_s, self.slo.probe_s)
                point, patience_s = RatePoint(rate, 0), self.patience_s(1.0)
                try:
                    record = await self._loop(client, arm, point, arrivals, patience_s)
                except NotMeasured as error:
                    raise ValueError(f"probing {arm.name} at {rate:g}/s: {error}") from None
                met = float(attained(record, self.slo.ttft_s, self.slo.tpot_s).mean())
                tqdm.write(f"{arm.name} at {rate:g} requests/s: {100 * met:.0f} % within limits")
                return met

            return await probe(share, self.slo.probe_rate, self.slo.level)
