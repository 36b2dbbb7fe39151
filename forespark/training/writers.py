"""Where the scalars of a training run go beside metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forespark.config import Config


def log_writer(config: Config, folder: Path) -> Any:
    """Scalars to TensorBoard or wandb.

    Raises:
        ValueError: wandb was asked for and is not installed.
    """
    if config.train.logger == "wandb":
        try:
            import wandb
        except ImportError:
            raise ValueError(
                "train.logger=wandb: wandb is not installed; pip install wandb, or use tensorboard"
            ) from None
        run = wandb.init(project="forespark", dir=str(folder))
        return lambda split, values, step: run.log(
            {f"{split}/{key}": value for key, value in values.items()}, step=step
        )
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(folder / "tensorboard"), flush_secs=60)

    def write(split: str, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            board.add_scalar(f"{split}/{key}", value, step)

    return write
