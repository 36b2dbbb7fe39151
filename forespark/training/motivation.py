"""Why draft lengths must be estimated, and each length on its own (paper, Section 3, Figure 3).

Held-out answers of the corpus are walked as greedy speculation with full blocks walks them:
draft K tokens at an anchor, keep those that equal the answer, go on at the next token.
Recorded are the accepted counts in their order, which tell how far the previous step's
count is from the next one, and for every d < K whether the d-token draft from the same
anchor differs from the first d tokens of the K-token draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from forespark.config import Config, drafter_places, require_model
from forespark.models.drafter import ForeSparkDrafter
from forespark.models.dspark import DSparkDrafter
from forespark.record import SCHEMA, append_jsonl, file_sha256, provenance, write_json
from forespark.training import rows
from forespark.training.build import state_cache
from forespark.training.replay import Replayed, load_exported, replay
from forespark.training.run import corpus_sources, prepare_torch, state_source
from forespark.training.states import StateSource

BENCH = "motivation"
CHUNK = 64  # anchors of one replay: each has K rows of logits


def answers(row: rows.CorpusRow) -> list[tuple[int, int]]:
    """[first, end) of every answer in the row."""
    found, start = [], None
    for index, mask in enumerate([*row.loss_mask, 0]):
        if mask and start is None:
            start = index
        elif not mask and start is not None:
            found.append((start, index))
            start = None
    return found


def _replayed(
    model: ForeSparkDrafter | DSparkDrafter,
    source: StateSource,
    ids: Sequence[int],
    anchors: Sequence[int],
    length: int,
) -> list[Replayed]:
    found: list[Replayed] = []
    for start in range(0, len(anchors), CHUNK):
        found += replay(model, source, ids, anchors[start : start + CHUNK], length)
    return found


def walk(
    model: ForeSparkDrafter | DSparkDrafter,
    source: StateSource,
    ids: Sequence[int],  # prompt and answer
    first: int,
    end: int,
) -> dict[str, Any] | None:
    """One answer's accepted counts and the drafts of other lengths.

    An anchor counts when K answer tokens follow it, so no count is cut short.

    Returns:
        ``accepted`` [S] in order, ``differs`` [S][K - 1] for d = 1..K-1; None for an answer
        too short for two anchors.
    """
    K = model.num_speculative_tokens
    places = list(range(max(first, 1), end - K))
    if not places:
        return None
    full = {r.anchor: r for r in _replayed(model, source, ids, places, K)}
    visited = []
    at = places[0]
    while at in full:
        visited.append(full[at])
        at += full[at].accepted + 1
    if len(visited) < 2:
        return None
    anchors = [r.anchor for r in visited]
    shorter = [_replayed(model, source, ids, anchors, d) for d in range(1, K)]
    return {
        "accepted": [r.accepted for r in visited],
        "differs": [
            [drafts[i].drafts != r.drafts[: d + 1] for d, drafts in enumerate(shorter)]
            for i, r in enumerate(visited)
        ],
    }


def measure(config: Config, out: Path, endpoint: str | None = None) -> Path:
    """Walk the held-out answers; leaves records.jsonl (a row an answer) and run.json.

    Raises:
        ValueError: no corpus, target or drafter, no answer long enough, or an ``out`` that
            holds records already.
    """
    require_model(config.target.model)
    records = out / "records.jsonl"
    if records.exists():
        raise ValueError(f"{records} is there already; one run is one measurement: use another "
                         "--out, or delete the folder")  # fmt: skip
    prepare_torch(config)
    places = drafter_places(config, "forespark")
    folder = next((p for p in places if (p / "model.safetensors").is_file()), places[0])
    model = load_exported(config, "forespark", folder)
    found = rows.read_rows(corpus_sources(config), None, config.train.most_repeated)
    _, held_out = rows.split_rows(found, config.train.validation_fraction)
    held_out = sorted(held_out, key=lambda row: row.id)[: config.train.limit]
    walked = []
    with state_source(config, endpoint) as url:
        source = state_cache(config, url).source
        for row in tqdm(held_out, desc="answers", unit="row"):
            for first, end in answers(row):
                result = walk(model, source, row.input_ids[:end], first, end)
                if result is not None:
                    walked.append({"row": row.id, "first": first, **result})
    if not walked:
        raise ValueError(
            f"{', '.join(map(str, corpus_sources(config)))}: no held-out answer is longer than "
            f"{model.num_speculative_tokens + 1} tokens; build a larger corpus with data.py"
        )
    write_json(
        out / "run.json",
        {"schema": SCHEMA, "bench": BENCH, "target": config.target.name,
         "K": model.num_speculative_tokens, "answers": len(walked),
         "drafter_sha256": file_sha256(folder / "model.safetensors"), "provenance": provenance()},
    )  # fmt: skip
    for entry in walked:
        append_jsonl(records, {"schema": SCHEMA, "bench": BENCH, **entry})
    return records
