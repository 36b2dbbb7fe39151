"""Sections of the end-to-end benchmarks: request streams, and the open loop's SLOs."""

from __future__ import annotations

from dataclasses import dataclass, field

from forespark.config.checks import require, require_least, require_positive


@dataclass
class StreamConfig:
    """Request streams of e2e, slo and mathcode, and the windows of closed loops (Appendix C)."""

    loads: list[int] = field(default_factory=list)  # of e2e and mathcode; [] is bench.loads
    # Of e2e and slo: conversations of at least four messages, one request per user turn.
    conversations: list[str] = field(default_factory=lambda: ["starter:conversations"])
    max_conversations: int = 20_000
    held_out: int = 64  # conversations, or questions, that only warm-ups use
    turn_spacing: int = 512  # requests between consecutive turns of a conversation
    # Of mathcode: single-turn prompts.
    questions: list[str] = field(default_factory=lambda: ["starter:questions"])
    max_prompt_tokens: int = 16_384  # history included; longer requests are left out
    output_tokens: int = 4096  # an answer ends there at the latest
    # Reuse prefixes within a point of e2e and slo; the cache is emptied before each.
    prefix_cache: bool = True
    # A closed loop's warm-up ends after warmup_s, once 90 % of the load is in flight or the
    # number stops growing; its window lasts window_s, until the first window_requests (or
    # window_per_client times the load, if more) of the measured sequence have ended.
    warmup_s: float = 30.0
    window_requests: int = 128
    window_per_client: int = 0
    window_s: float = 120.0
    max_lag_s: float = 0.05  # p99; a client whose timers fire later measures itself

    def __post_init__(self) -> None:
        loads = self.loads
        require(all(load >= 1 for load in loads), "stream.loads", loads, "requests, all >= 1")
        require_least("stream", self, 1, "max_conversations", "held_out", "turn_spacing")
        require_least("stream", self, 1, "max_prompt_tokens", "window_requests")
        require_least("stream", self, 2, "output_tokens")  # one token has no rate
        require_least("stream", self, 0, "warmup_s", "window_s", "window_per_client")
        require_positive("stream", self, "max_lag_s")


@dataclass
class SloConfig:
    """Open loop: arrival rates, time limits, and how rates are found (Appendix C)."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05
    level: float = 0.9  # attainment at which the rate is the capacity
    scales: list[float] = field(
        default_factory=lambda: [0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0]
    )
    # Requests per second; [] probes for them: two light rates, then even steps.
    rates: list[float] = field(default_factory=list)
    points: int = 8  # rates in all, when they are probed for
    probe_arms: list[str] = field(default_factory=lambda: ["ar", "dflash2", "forespark"])
    probe_rate: float = 1.0  # where a probe starts
    probe_s: float = 30.0  # arrivals of one probe, after as much warm-up as fits a quarter
    warmup_s: float = 30.0  # rate x this: arrivals before the measured ones
    window_s: float = 120.0  # rate x this: measured arrivals
    # "poisson", or a recorded trace: JSON lines with t_s, stretched to the rate.
    arrivals: str = "poisson"

    def __post_init__(self) -> None:
        require_positive("slo", self, "ttft_s", "tpot_s", "probe_rate", "probe_s", "window_s")
        require_least("slo", self, 0, "warmup_s")
        require(0 < self.level < 1, "slo.level", self.level, "between 0 and 1")
        scales = self.scales
        require(bool(scales) and min(scales) > 0, "slo.scales", scales, "one or more, all > 0")
        rates = self.rates
        require(not rates or min(rates) > 0, "slo.rates", rates, "all > 0, or [] to probe")
        require(len(set(rates)) == len(rates), "slo.rates", rates, "each once")
        require(bool(rates) or bool(self.probe_arms), "slo.probe_arms", [], "an arm to probe")
        require_least("slo", self, 4, "points")
        poisson = self.arrivals == "poisson" or self.arrivals.startswith("file:")
        require(poisson, "slo.arrivals", self.arrivals, "poisson or file:PATH")
