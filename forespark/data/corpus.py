"""Answers to corpus: check every row, count what is left out, write datasets on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forespark.config import Config
from forespark.data.prompts import Drops, Prompt
from forespark.data.regenerate import error_reason
from forespark.data.template import render, template_kwargs, tokenizer_of

COLUMNS = ("id", "source", "input_ids", "loss_mask")


def _boundary(row: dict[str, Any]) -> int | None:
    """Where the answer starts; None unless the mask is zeros, then ones, of equal length."""
    ids, mask = row["input_ids"], row["loss_mask"]
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        return None
    start = len(mask) - sum(mask)
    return start if mask == [0] * start + [1] * (len(mask) - start) else None


def _fault(
    row: dict[str, Any], start: int | None, expected: list[int], limit: int, eos: set[int]
) -> tuple[str, str] | None:
    """Why a row cannot be trained on, as (reason, detail)."""
    ids = row["input_ids"]
    if start is None:
        return "unreadable", "loss_mask does not mark one answer at the end"
    if ids[:start] != expected:
        return (
            "template_mismatch",
            "the prompt's tokens are not the target's chat template of this prompt",
        )
    if not [token for token in ids[start:] if token not in eos]:
        return "empty_response", "the answer has no token besides the end of turn"
    if len(ids) > limit:
        return "over_long", f"{len(ids)} tokens, the target's context is {limit}"
    return None


def _conversation(
    config: Config, prompt: Prompt, rows: list[dict[str, Any]], drops: Drops
) -> list[dict[str, Any]]:
    """Corpus rows of one conversation: answer k has turns and answers before it as context."""
    tokenizer, kwargs = tokenizer_of(config.target.model), template_kwargs(config)
    eos = set(tokenizer.all_special_ids)
    history: list[dict[str, str]] = []
    answers = iter(sorted(rows, key=lambda row: int(str(row["id"]).rpartition("_gen")[2])))
    kept: list[dict[str, Any]] = []
    for role, text in prompt.messages:
        history.append({"role": role, "content": text})
        if role == "system":
            continue
        row = next(answers, None)
        if row is None:
            drops.add(
                "conversation_cut",
                prompt.id,
                prompt.source,
                trained=bool(kept),
                detail=f"{len(rows)} of {len(prompt.user_turns)} turns fit the context",
            )
            break
        start = _boundary(row)
        fault = _fault(
            row, start, render(tokenizer, history, kwargs), config.target.max_model_len, eos
        )
        if fault is not None:
            drops.add(fault[0], row["id"], prompt.source, detail=fault[1], row=row)
            break  # later answers have this one in their context
        assert start is not None
        truncated = row.get("metadata", {}).get("finish_reason") == "length"
        if truncated:
            trained = config.data.keep_truncated
            drops.add(
                "truncated",
                row["id"],
                prompt.source,
                trained=trained,
                **({} if trained else {"row": row}),
            )
        if not truncated or config.data.keep_truncated:
            kept.append(
                {
                    "id": row["id"],
                    "source": prompt.source,
                    "input_ids": row["input_ids"],
                    "loss_mask": row["loss_mask"],
                }
            )
        answer = tokenizer.decode(row["input_ids"][start:], skip_special_tokens=True)
        history.append({"role": "assistant", "content": answer})
    return kept


def corpus_rows(
    config: Config,
    prompts: Sequence[Prompt],
    responses: Sequence[dict[str, Any]],
    errors: dict[str, str],
    drops: Drops,
) -> list[dict[str, Any]]:
    """Rows to train on, in the order of the prompts.

    Args:
        responses: Rows of regenerate-responses; those of other prompts are ignored.
        errors: Failed conversations, id -> error.
        drops: Receives every row that is left out, cut or truncated.
    """
    from tqdm import tqdm

    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in responses:
        by_prompt.setdefault(str(row["primary_id"]), []).append(row)
    found: list[dict[str, Any]] = []
    for prompt in tqdm(prompts, desc="checking answers", unit="prompt", mininterval=1.0):
        rows = by_prompt.get(prompt.id)
        if rows:
            found += _conversation(config, prompt, rows, drops)
        else:
            error = errors.get(prompt.id, "no answer was written")
            drops.add(error_reason(error), prompt.id, prompt.source, detail=error, row=prompt.row())
    return found


def rows_digest(rows: Sequence[dict[str, Any]]) -> str:
    """Digest of everything a trainer reads, independent of the file format."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row[name] for name in COLUMNS]).encode("utf-8"))
    return digest.hexdigest()


def save(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Write the corpus so that ``datasets.load_from_disk(out)`` reads it.

    The new files replace the old ones at the end, ``state.json``, which names them, last.
    """
    from datasets import Dataset, Features, Sequence, Value

    kinds = {
        "id": Value("string"),
        "source": Value("string"),
        "input_ids": Sequence(Value("int32")),
        "loss_mask": Sequence(Value("int8")),
    }
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    scratch = out / ".corpus.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    Dataset.from_dict(columns, features=Features(kinds)).save_to_disk(scratch)
    written = sorted(scratch.iterdir(), key=lambda path: path.name == "state.json")
    for stale in set(out.glob("data-*.arrow")) - {out / path.name for path in written}:
        stale.unlink()
    for path in written:
        path.replace(out / path.name)
    scratch.rmdir()


def counts(prompts: Sequence[Prompt], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sizes of the corpus."""
    return {
        "prompts": len(prompts),
        "rows": len(rows),
        "tokens": sum(len(row["input_ids"]) for row in rows),
        "answer_tokens": sum(sum(row["loss_mask"]) for row in rows),
        "prompts_by_source": dict(Counter(prompt.source for prompt in prompts)),
        "rows_by_source": dict(Counter(row["source"] for row in rows)),
    }
