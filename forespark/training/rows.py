"""Corpus rows for training: read, split by hash, order and pack.

A corpus is a ``datasets`` folder (columns ``id``, ``input_ids``, ``loss_mask``) or a JSONL
file with the same fields, as ``data.py`` and speculators' ``regenerate-responses`` leave
them. Sources are read again at every epoch, so rows that arrived meanwhile join.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class CorpusRow:
    """One tokenized conversation."""

    id: str
    group: str  # rows of one prompt share it, and so a side of the validation split
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]  # 1 where the target wrote the token


def _row(raw: dict[str, Any], where: str) -> CorpusRow:
    try:
        ids, mask = tuple(raw["input_ids"]), tuple(int(bool(m)) for m in raw["loss_mask"])
        name = str(raw["id"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: a corpus row needs id, input_ids and loss_mask ({error!r}); "
            "build the corpus with `python data.py`"
        ) from None
    if len(ids) != len(mask):
        raise ValueError(f"{where}: {len(ids)} input_ids but {len(mask)} loss_mask entries")
    return CorpusRow(
        name, str(raw.get("primary_id") or name.rpartition("_gen")[0] or name), ids, mask
    )


def _read_jsonl(path: Path) -> list[CorpusRow]:
    rows = []
    with path.open(encoding="utf-8") as source:
        for number, line in enumerate(source, start=1):
            if not line.endswith("\n"):
                break  # still being written
            if line.strip():
                try:
                    raw = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
                rows.append(_row(raw, f"{path}, line {number}"))
    return rows


def expand(sources: Sequence[Path]) -> list[Path]:
    """Sources with glob patterns replaced by what matches now (possibly nothing yet)."""
    found: list[Path] = []
    for source in map(Path, sources):
        if any(mark in source.name for mark in "*?["):
            found.extend(sorted(source.parent.glob(source.name)))
        else:
            found.append(source)
    return found


def _read_folder(source: Path) -> Iterator[CorpusRow]:
    from datasets import load_from_disk

    try:
        corpus = load_from_disk(str(source))
    except (FileNotFoundError, ValueError):
        raise ValueError(
            f"{source}: holds no finished corpus; build it with `python data.py`"
        ) from None
    return (_row(raw, str(source)) for raw in corpus)


def cut_loops(row: CorpusRow, most: int, gram: int = 8) -> CorpusRow:
    """The row up to where an answer has repeated itself for more than ``most`` tokens.

    A small target decoded greedily often falls into a loop until its answer is cut off. Such
    tokens are copied with ease and would be most of a corpus, while a served draft meets
    few of them. A token counts as repeated when it ends ``gram`` tokens that were in the
    same answer before.

    Args:
        most: repeated tokens in a row that are kept.
    """
    seen: set[tuple[int, ...]] = set()
    written = repeated = 0  # tokens of this answer, and how many of the last were repeated
    for index, mask in enumerate(row.loss_mask):
        if not mask:
            seen, written, repeated = set(), 0, 0
            continue
        written += 1
        if written < gram:
            continue
        tail = row.input_ids[index + 1 - gram : index + 1]
        repeated = repeated + 1 if tail in seen else 0
        seen.add(tail)
        if repeated > most:
            return replace(row, input_ids=row.input_ids[:index], loss_mask=row.loss_mask[:index])
    return row


def read_rows(
    sources: Sequence[Path], limit: int | None = None, most_repeated: int | None = None
) -> list[CorpusRow]:
    """Rows of all sources in order, the first of each id, rows without labels left out.

    Args:
        most_repeated: ends each row where ``cut_loops`` does; None keeps rows whole.

    Raises:
        ValueError: a source is missing or malformed, or nothing is left to train on.
    """
    found: dict[str, CorpusRow] = {}
    for source in expand(sources):
        if source.is_dir():
            rows: Iterable[CorpusRow] = _read_folder(source)
        elif source.exists():
            rows = _read_jsonl(source)
        else:
            raise ValueError(f"{source}: no such corpus; build it with `python data.py`")
        for row in rows:
            found.setdefault(row.id, row)
    kept = [row for row in found.values() if any(row.loss_mask)][:limit]
    if not kept:
        names = ", ".join(map(str, sources))
        raise ValueError(f"{names}: no row with a labelled token; run `python data.py` first")
    return kept if most_repeated is None else [cut_loops(row, most_repeated) for row in kept]


def split_rows(
    rows: Sequence[CorpusRow], fraction: float
) -> tuple[list[CorpusRow], list[CorpusRow]]:
    """(training, validation) by a hash of the prompt: rows that arrive later move nobody.

    A corpus too small to put a prompt on each side trains and validates on all of it.
    """

    def held_out(row: CorpusRow) -> bool:
        digest = hashlib.sha256(row.group.encode()).digest()
        return int.from_bytes(digest[:4], "big") < fraction * 2**32

    train = [row for row in rows if not held_out(row)]
    validation = [row for row in rows if held_out(row)]
    if not train or not validation:
        return list(rows), list(rows)
    return train, validation


def epoch_order(rows: Sequence[CorpusRow], seed: int, epoch: int) -> list[str]:
    """Row ids in this epoch's order, a function of the ids, seed and epoch alone."""
    ids = sorted(row.id for row in rows)
    random.Random(f"{seed}-{epoch}").shuffle(ids)
    return ids


def pack(order: Sequence[str], lengths: dict[str, int], budget: int) -> list[list[str]]:
    """Consecutive rows into packs of at most ``budget`` tokens; longer rows get their own."""
    packs: list[list[str]] = []
    used = budget + 1
    for name in order:
        length = min(lengths[name], budget)
        if used + length > budget:
            packs.append([])
            used = 0
        packs[-1].append(name)
        used += length
    return packs


def frequent_tokens(rows: Iterable[CorpusRow], count: int) -> torch.Tensor:
    """Ids of the ``count`` most frequent answer tokens, ties by id, sorted, [<= count]."""
    tokens = torch.tensor(
        [t for row in rows for t, m in zip(row.input_ids, row.loss_mask, strict=True) if m]
    )
    ids, totals = tokens.unique(return_counts=True)
    best = totals.sort(descending=True, stable=True).indices[:count]
    return ids[best].sort().values
