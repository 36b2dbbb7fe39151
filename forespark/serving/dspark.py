"""DSpark as a fair baseline: its confidence head, calibrated as ours is.

Stock vLLM ranks and prices DSpark's drafts by raw confidences. The paper calibrates them
with per-position temperatures like ForeSpark's (Appendix B), which vLLM has no place for,
so the temperatures are applied where the budget manager receives the confidences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from forespark.serving.wrap import wrap


def temper(
    probabilities: torch.Tensor,  # [R, K] in [0, 1]
    theta: torch.Tensor,  # [K] > 0
) -> torch.Tensor:
    """sigmoid(logit(p) / theta), float32; 0 and 1 stay what they are."""
    return torch.sigmoid(torch.logit(probabilities.float()) / theta)


def calibrate_confidences(manager: Any, theta: Sequence[float]) -> None:
    """Let a stock budget manager see tempered confidences."""
    temperatures = torch.tensor(theta, dtype=torch.float32)

    def record(original: Callable[..., None], confidences: torch.Tensor, batch: Any) -> None:
        original(temper(confidences, temperatures.to(confidences.device)), batch)

    wrap(manager, "record_confidences", record)


def verify_everything(manager: Any) -> None:
    """Make a stock manager verify all drafts: steps of any size cost the same."""
    draft, verify = manager.cost_tables
    manager.cost_tables = (np.zeros_like(draft), np.ones_like(verify))
