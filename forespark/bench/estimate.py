"""How long a served benchmark will take, said before it starts.

A step of the target alone is priced by the latency tables of curves.py, where they are; an
arm that drafts takes about as long a step and fewer or more of them, so this is a guess.
"""

from __future__ import annotations

from pathlib import Path

from forespark.config import Config
from forespark.fore_d.costs import CostTables
from forespark.record import read_json

START_S = 60.0  # a server's start, a guess for what is not measured yet
_PER_TOKEN_S = 0.02  # without tables: about fifty tokens a second for each user


class StepClock:
    """Seconds of a target step by number of requests."""

    def __init__(self, config: Config) -> None:
        path = Path(config.run_dir) / "latency.json"
        self.tables: CostTables | None = None
        if path.is_file():
            self.tables = CostTables.from_record(read_json(path), None, str(path))

    def step_s(self, requests: int) -> float:
        if self.tables is None:
            return _PER_TOKEN_S
        ms = self.tables.verify_ms(requests, requests) + self.tables.other_ms(requests)
        return ms / 1000


def in_words(seconds: float) -> str:
    """``about 25 minutes``, ``about 3.2 hours``."""
    minutes = seconds / 60
    if minutes < 90:
        return f"about {max(round(minutes), 1)} minute{'s' if round(minutes) > 1 else ''}"
    return f"about {minutes / 60:.1f} hours"
