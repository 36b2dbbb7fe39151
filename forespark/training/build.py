"""From the configuration: the drafter to train, its loss, and the target's hidden states."""

from __future__ import annotations

from pathlib import Path

import torch

from forespark.config import Config, TrainConfig
from forespark.models.base import LossOptions
from forespark.models.build import build_drafter
from forespark.models.drafter import ForeSparkDrafter
from forespark.models.dspark import DSparkDrafter
from forespark.training.export import read_weights
from forespark.training.states import LocalStates, ServerStates, StateCache, StateSource, target_key

FRESH = ("random", "target")  # values of drafter.init that no trained drafter stands behind


def drafter_of(config: Config, name: str) -> ForeSparkDrafter | DSparkDrafter:
    """A drafter shaped by the configuration: fresh, or with the weights of ``drafter.init``."""
    shape, train = config.drafter, config.train
    fresh = shape.init in FRESH
    model = build_drafter(
        name,
        target_model=config.target.model,
        target_layer_ids=config.target.target_layer_ids,
        num_speculative_tokens=shape.num_speculative_tokens,
        num_layers=shape.num_layers,
        selector_rank=shape.selector_rank,
        selector_top_k=shape.selector_top_k,
        estimator_rank=shape.estimator_rank,
        mask_token_id=shape.mask_token_id,
        init=shape.init if fresh else "random",
        directional=shape.directional,
        options=loss_options(train),
        seed=train.seed,
    )
    if not fresh:
        read_weights(model, Path(shape.init))
    return model.to(torch.get_default_device())


def loss_options(train: TrainConfig) -> LossOptions:
    """The objective's weights as the configuration has them."""
    return LossOptions(
        ce_weight=train.ce_weight,
        tv_weight=train.tv_weight,
        position_decay=train.position_decay,
        lambda_pre=train.lambda_pre,
        lambda_post=train.lambda_post,
        redraft_every=train.redraft_every,
    )


def state_cache(config: Config, endpoint: str | None = None) -> StateCache:
    """Hidden states as ``train.hidden_states`` says, cached under the run's folder."""
    layers = config.target.target_layer_ids
    source: StateSource
    if endpoint is not None:
        source = ServerStates(endpoint, layers)
    else:
        source = LocalStates(config.target.model, layers)
    if not config.train.cache_hidden_states:
        return StateCache(source, None)
    folder = Path(config.run_dir) / "hidden" / target_key(config.target.model, layers)
    return StateCache(source, folder)
