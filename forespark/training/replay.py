"""What the training code drafts at given positions of a token sequence.

The served trace says how many drafts were accepted at each anchor; this module says what
the same checkpoint accepts there by the training code. Where the two part, a layer offset,
a position id, a context row or the mask token differs between training and serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forespark.config import Config
from forespark.models.blocks import Context, Row
from forespark.models.drafter import ForeSparkDrafter
from forespark.models.dspark import DSparkDrafter
from forespark.record import read_json
from forespark.training.build import drafter_of
from forespark.training.export import read_weights
from forespark.training.states import StateSource


@dataclass
class Replayed:
    """Outcome at one anchor, at temperature 0."""

    anchor: int  # position of the anchor token in the sequence
    drafts: list[int]  # token ids, one per draft position
    accepted: int  # leading drafts that equal the sequence (as far as it goes)
    z: list[float] | None  # pre-draft logits of row d, where there is such an estimator
    logits: list[float]  # post-draft (ForeSpark) or confidence (DSpark) logits


def load_exported(config: Config, name: str, folder: Path) -> ForeSparkDrafter | DSparkDrafter:
    """A drafter with the weights that serving loads: the exported bfloat16 ones and heads."""
    # The checkpoint says what its blocks are, as it does to vLLM.
    made = Path(folder) / "config.json"
    directional = made.exists() and _causal(read_json(made), name)
    shape = replace(config.drafter, init="random", directional=directional)
    model = drafter_of(replace(config, drafter=shape), name)
    if not read_weights(model, folder) and model.pre is not None:
        raise ValueError(f"{folder}/forespark: no estimators; fit them with `python heads.py`")
    return model.eval()


def _causal(checkpoint: dict[str, Any], name: str) -> bool:
    if name == "dspark":
        return bool(checkpoint["transformer_layer_config"].get("is_causal", False))
    return not checkpoint.get("sliding_window_non_causal", True)


@torch.no_grad()
def replay(
    model: ForeSparkDrafter | DSparkDrafter,
    source: StateSource,
    input_ids: Sequence[int],  # prompt and answer
    anchors: Sequence[int],  # positions >= 1 of the anchor tokens, ascending
    length: int | None = None,  # d; None drafts K
) -> list[Replayed]:
    """Draft ``length`` tokens from each anchor the way serving does at temperature 0.

    Unlike the loss, later drafts follow the drafter's own earlier choices, the whole
    vocabulary competes, and the states are not rounded to bfloat16.
    """
    k = model.num_speculative_tokens
    length = k if length is None else length
    if not 1 <= length <= k:
        raise ValueError(f"draft length: got {length}, want 1..{k}")
    states = source.fetch(input_ids)
    ids = torch.tensor(list(input_ids))
    row = Row(
        input_ids=ids, loss_mask=torch.ones(len(ids), dtype=torch.bool), lengths=[len(ids)],
        states=states[:, :-1].flatten(1), last=states[:, -1],
    )  # fmt: skip
    at = torch.tensor(list(anchors))
    context = Context(model.core, row)
    if isinstance(model, ForeSparkDrafter):
        tokens, logits = _walk_selector(model, model.draft(context, at, length), ids[at])
    else:
        tokens, logits = _walk_markov(model, model.draft(context, at, length), ids[at])
    z: list[Any] = [None] * len(at)
    if model.pre is not None:
        z = model.pre.row(model.pre(*model.pre_inputs(row, context, at)), length).tolist()
    found = []
    for i, anchor in enumerate(anchors):
        accepted = 0
        for j, token in enumerate(tokens[i].tolist()):
            if anchor + 1 + j >= len(ids) or token != int(ids[anchor + 1 + j]):
                break
            accepted += 1
        found.append(Replayed(int(anchor), tokens[i].tolist(), accepted, z[i], logits[i].tolist()))
    return found


def _walk_selector(
    model: ForeSparkDrafter,
    hidden: torch.Tensor,  # [A, d, H]
    previous: torch.Tensor,  # [A] anchor tokens
) -> tuple[torch.Tensor, torch.Tensor]:
    unary, candidates = (hidden @ model.core.lm_head.weight.T).topk(
        model.core.candidate_selector.top_k, dim=-1
    )
    tokens, logits = [], []
    for j in range(hidden.shape[1]):
        scores, feature = model.selector_scores(
            hidden[:, j], previous, candidates[:, j], unary[:, j]
        )
        logits.append(model.post(hidden[:, j], feature))
        previous = candidates[:, j].gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
        tokens.append(previous)
    return torch.stack(tokens, 1), torch.stack(logits, 1)


def _walk_markov(
    model: DSparkDrafter,
    hidden: torch.Tensor,  # [A, d, H]
    previous: torch.Tensor,  # [A] anchor tokens
) -> tuple[torch.Tensor, torch.Tensor]:
    core = model.core
    tokens, logits = [], []
    for j in range(hidden.shape[1]):
        embedding = core.markov_head.prev_embeddings(previous)
        logits.append(core.confidence_head(torch.cat([hidden[:, j], embedding], dim=-1)))
        biased = hidden[:, j] @ core.lm_head.weight.T + core.markov_head.markov_w2(embedding)
        previous = biased.argmax(-1)
        tokens.append(previous)
    return torch.stack(tokens, 1), torch.stack(logits, 1)
