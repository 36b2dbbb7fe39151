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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

STARTER = Path(__file__).resolve().parent.parent / "data" / "starter"
FORMS = "conversations (ShareGPT), messages (OpenAI), prompt, turns or question"
USER_ROLES = ("user", "human")
# Keys of a list of messages, of a message's role and of its text: OpenAI's, ShareGPT's.
CHAT_FORMS = (("messages", "role", "content"), ("conversations", "from", "value"))
Messages = tuple[tuple[str, str], ...]  # (role, content) each
T = TypeVar("T")


_BOXED = "{}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_PROGRAM = "Write a Python program that solves this problem. Read from standard input.\n\n{}"


@dataclass(frozen=True, slots=True)
class HubSet:
    """Where a named set of prompts lies on the hub, and how its prompts are made."""

    path: str
    config: str | None = None
    split: str = "train"
    field: str | None = None  # of the prompt; None: one of the forms above
    instruction: str = "{}"  # the set's usual one
    files: tuple[str, ...] = ()  # JSON lines of a set whose loader is a script


# Other sets by owner/dataset, whose rows have one of the forms above.
HUB = {
    "sharegpt": HubSet("Aeala/ShareGPT_Vicuna_unfiltered"),
    "gsm8k": HubSet("openai/gsm8k", "main", "test", "question", _BOXED),
    "math500": HubSet("HuggingFaceH4/MATH-500", None, "test", "problem", _BOXED),
    "aime25": HubSet("math-ai/aime25", None, "test", "problem", _BOXED),
    "humaneval": HubSet("openai/openai_humaneval", None, "test", "prompt",
                        "Complete this Python function.\n\n{}"),
    "mbpp": HubSet("google-research-datasets/mbpp", "sanitized", "test", "prompt"),
    "livecodebench": HubSet("livecodebench/code_generation_lite", None, "train",
                            "question_content", _PROGRAM, ("test5.jsonl", "test6.jsonl")),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """One benchmark request."""

    id: str  # hash of the messages: the same text has the same id everywhere
    messages: Messages  # ends with the user turn

    def chat(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.messages]


def load_prompts(sources: list[str], *, seed: int, limit: int | None = None) -> list[Prompt]:
    """Prompts of all sources without repetitions, shuffled by ``seed``.

    Args:
        sources: ``starter:PART``, ``file:PATH`` (JSON lines, also ``.gz``) or ``hub:NAME``
            (of ``HUB``, or ``owner/dataset``: its ``train`` split); a suffix
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
        rows = parsed_rows(source, first_turn, f"no usable prompt; want rows with {FORMS}")
        found.update((prompt.id, prompt) for prompt in map(prompt_of, rows))
    ordered = shuffled(found, seed)
    return ordered if limit is None else ordered[:limit]


def prompt_of(messages: Messages) -> Prompt:
    """The request of these messages."""
    text = json.dumps(messages, ensure_ascii=False)
    return Prompt(hashlib.sha256(text.encode()).hexdigest()[:16], messages)


def shuffled(found: dict[str, T], seed: int) -> list[T]:
    """Values in an order that depends on keys and seed alone, not on that of the sources."""
    ordered = [found[key] for key in sorted(found)]
    random.Random(seed).shuffle(ordered)
    return ordered


def parsed_rows(source: str, parse: Callable[[Any], T | None], wanted: str) -> Iterator[T]:
    """What ``parse`` makes of the rows of a source; rows it makes None of are counted.

    Raises:
        ValueError: as ``load_prompts``; with ``wanted`` when there is no usable row.
    """
    usable, unusable = 0, 0
    for number, row in _rows(source):
        parsed = parse(row)
        if parsed is None:
            unusable += 1
            logger.debug("%s, row %d: not usable", source, number)
            continue
        usable += 1
        yield parsed
    if not usable:
        raise ValueError(f"{source}: {wanted}")
    if unusable:
        logger.warning("%s: %d rows without what is wanted left out", source, unusable)


def _rows(source: str) -> Iterator[tuple[int, Any]]:
    """Numbered rows of a source, those of its category and between its limits."""
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
    for number, row in islice(rows, start, stop):
        if not of or (isinstance(row, dict) and row.get("category") == of[1]):
            yield number, row


def _hub_rows(name: str) -> Iterator[tuple[int, Any]]:
    if name not in HUB and "/" not in name:
        raise ValueError(
            f"hub:{name}: unknown name, want owner/dataset or one of {', '.join(sorted(HUB))}"
        )
    from datasets import load_dataset

    found = HUB.get(name, HubSet(name))
    where: tuple[Any, ...] = (found.path, found.config)
    files = None
    if found.files:
        where = ("json",)
        files = [f"hf://datasets/{found.path}/{file}" for file in found.files]
    try:
        rows = load_dataset(*where, data_files=files, split=found.split, streaming=True)
        for number, row in enumerate(rows, start=1):
            if found.field is not None:
                row = {"prompt": found.instruction.format(row[found.field])}
            yield number, row
    except Exception as error:  # the hub's errors have no common class
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"hub:{name}: cannot read {found.path} ({cause}); check the network and "
            "HF_HUB_OFFLINE, or give a JSON-lines copy as file:PATH"
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


def first_turn(row: Any) -> Messages | None:
    """System message (if any) and first user turn of a row, or None."""
    if not isinstance(row, dict):
        return None
    for key, role_key, text_key in CHAT_FORMS:
        if isinstance(row.get(key), list):
            return _first_user_message(row[key], role_key, text_key)
    turns = row.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else None
    for key in ("prompt", "question"):
        text = row.get(key) if text is None else text
    if isinstance(text, list):  # a prompt that is itself a list of messages
        return _first_user_message(text, "role", "content")
    return (("user", text.strip()),) if isinstance(text, str) and text.strip() else None


def _first_user_message(items: list[Any], role_key: str, text_key: str) -> Messages | None:
    head: list[tuple[str, str]] = []
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get(text_key), str):
            return None
        role, text = item.get(role_key), item[text_key].strip()
        if role == "system" and text and not head:
            head.append(("system", text))
        elif role in USER_ROLES:
            return (*head, ("user", text)) if text else None
    return None
