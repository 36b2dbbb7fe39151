"""Prompts of a benchmark: the first user turn of each row of the named sources.

The same source names and row forms as in the data stage, read here on their own because
a benchmark shares only files with the other stages.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

STARTER = Path(__file__).resolve().parent.parent / "data" / "starter"
FORMS = "conversations (ShareGPT), messages (OpenAI), prompt, turns or question"
# Short names of the data stage whose rows have one of these forms; more as owner/dataset.
HUB = {"sharegpt": "Aeala/ShareGPT_Vicuna_unfiltered"}
_USER_ROLES = ("user", "human")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One benchmark request."""

    id: str  # hash of the messages: the same text has the same id everywhere
    messages: tuple[tuple[str, str], ...]  # (role, content); ends with the user turn

    def chat(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.messages]


def load_prompts(sources: list[str], *, seed: int, limit: int | None = None) -> list[Prompt]:
    """Prompts of all sources without repetitions, shuffled by ``seed``.

    Args:
        sources: ``starter:PART``, ``file:PATH`` (JSON lines, also ``.gz``) or ``hub:NAME``
            (``sharegpt``, or ``owner/dataset``: its ``train`` split); a suffix
            ``@CATEGORY`` takes only rows of this ``category`` (the form of Spec-Bench and
            SPEED-Bench), a last one ``#START:STOP`` only these rows of the file.
        seed: Order of the result; the same sources and seed give the same order.
        limit: At most this many, taken from the front of that order.

    Raises:
        ValueError: unknown source, unreadable file, no usable row in a source, or the hub
            cannot be reached.
    """
    found: dict[str, Prompt] = {}
    for source in sources:
        prompts = list(_read_source(source))
        if not prompts:
            raise ValueError(f"{source}: no usable prompt; want rows with {FORMS}")
        found.update((prompt.id, prompt) for prompt in prompts)
    # Sorted first, so that the order of the sources does not matter.
    ordered = sorted(found.values(), key=lambda prompt: prompt.id)
    random.Random(seed).shuffle(ordered)
    return ordered if limit is None else ordered[:limit]


def _read_source(source: str) -> Iterator[Prompt]:
    cut = re.search(r"#(\d*):(\d*)$", source)
    start, stop = (int(n) if n else None for n in cut.groups()) if cut else (None, None)
    whole = source[: cut.start() if cut else None]
    of = re.search(r"@(\w+)$", whole)
    kind, _, rest = whole[: of.start() if of else None].partition(":")
    if kind == "hub" and rest:
        rows = _hub_rows(rest)
    elif kind == "file" and rest:
        rows = _json_lines(Path(rest).expanduser(), source)
    elif kind == "starter":
        rows = _json_lines(STARTER / f"{rest or 'bench'}.jsonl", source)
    else:
        raise ValueError(
            f"unknown prompt source {source!r}: want starter:PART, file:PATH or hub:NAME"
        )
    unusable = 0
    for number, row in islice(rows, start, stop):
        if of and not (isinstance(row, dict) and row.get("category") == of[1]):
            continue
        messages = first_turn(row)
        if messages is None:
            unusable += 1
            logger.debug("%s, row %d: no user turn", source, number)
            continue
        text = json.dumps(messages, ensure_ascii=False)
        yield Prompt(hashlib.sha256(text.encode()).hexdigest()[:16], messages)
    if unusable:
        logger.warning("%s: %d rows without a usable user turn left out", source, unusable)


def _hub_rows(name: str) -> Iterator[tuple[int, Any]]:
    if name not in HUB and "/" not in name:
        raise ValueError(
            f"hub:{name}: unknown name, want owner/dataset or one of {', '.join(sorted(HUB))}"
        )
    from datasets import load_dataset

    path = HUB.get(name, name)
    try:
        yield from enumerate(load_dataset(path, split="train", streaming=True), start=1)
    except Exception as error:  # the hub's errors have no common class
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"hub:{name}: cannot read {path} ({cause}); check the network and HF_HUB_OFFLINE, "
            "or give a JSON-lines copy as bench.prompts=[file:PATH]"
        ) from None


def _json_lines(path: Path, source: str) -> Iterator[tuple[int, Any]]:
    if not path.is_file():
        raise ValueError(f"{source}: no such file {path}")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _json(line, f"{path}, line {number}")
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: not readable as UTF-8 JSON lines ({error})") from None


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None


def first_turn(row: Any) -> tuple[tuple[str, str], ...] | None:
    """System message (if any) and first user turn of a row, or None."""
    if not isinstance(row, dict):
        return None
    for key, role_key, text_key in (
        ("messages", "role", "content"),
        ("conversations", "from", "value"),
    ):
        if isinstance(row.get(key), list):
            return _first_user_message(row[key], role_key, text_key)
    turns = row.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else None
    for key in ("prompt", "question"):
        text = row.get(key) if text is None else text
    if isinstance(text, list):  # a prompt that is itself a list of messages
        return _first_user_message(text, "role", "content")
    return (("user", text.strip()),) if isinstance(text, str) and text.strip() else None


def _first_user_message(
    items: list[Any], role_key: str, text_key: str
) -> tuple[tuple[str, str], ...] | None:
    head: list[tuple[str, str]] = []
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get(text_key), str):
            return None
        role, text = item.get(role_key), item[text_key].strip()
        if role == "system" and text and not head:
            head.append(("system", text))
        elif role in _USER_ROLES:
            return (*head, ("user", text)) if text else None
    return None
