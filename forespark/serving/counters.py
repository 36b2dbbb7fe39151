"""Prometheus counters and histograms of an engine's steps.

Steps happen in the engine's worker, ``/metrics`` is answered by the API server: both
share files through ``PROMETHEUS_MULTIPROC_DIR``, which ``serve.py`` sets. Draft tokens are
counted three times on purpose: drafted, verified and accepted. vLLM's own acceptance rate
divides by drafts that adaptive verification never verified. ``accepted`` is what rejection
sampling accepted, tokens past a stop token inside an accepted block included: the worker
does not see stops.
"""

from __future__ import annotations

from typing import Any

_metrics: dict[str, Any] = {}


def _build() -> dict[str, Any]:
    from prometheus_client import Counter, Histogram

    if not _metrics:
        tokens = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
        times = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
        label = ["arm"]
        _metrics.update(
            drafted=Counter("forespark:drafted_tokens", "Draft tokens proposed.", label),
            verified=Counter("forespark:verified_tokens", "Draft tokens verified.", label),
            accepted=Counter("forespark:accepted_tokens", "Draft tokens accepted.", label),
            planned=Histogram(
                "forespark:planned_draft_tokens", "Planned sum of draft lengths per step.",
                label, buckets=tokens,
            ),
            budget=Histogram(
                "forespark:verification_budget_tokens", "Draft tokens verified per step.",
                label, buckets=tokens,
            ),
            plan_us=Histogram(
                "forespark:plan_time_microseconds", "Host time of the joint schedule per step.",
                label, buckets=times,
            ),
        )  # fmt: skip
    return _metrics


class Counters:
    """Adds step records to the process-wide metrics under one arm label."""

    def __init__(self, arm: str) -> None:
        self._of = {name: metric.labels(arm) for name, metric in _build().items()}

    def add(self, row: dict[str, Any]) -> None:
        """Count one step record of the meter."""
        self._of["drafted"].inc(row["drafted"])
        self._of["verified"].inc(row["B"])
        self._of["accepted"].inc(row["accepted"])
        self._of["planned"].observe(row["planned_draft"])
        self._of["budget"].observe(row["B"])
        self._of["plan_us"].observe(row["plan_us"])
