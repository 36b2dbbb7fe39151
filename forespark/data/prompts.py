"""Prompts: rows of every known dataset form become conversations of user turns.

Answers in a source are thrown away, because a drafter has to imitate its target and the
target answers again. What stays of a conversation is its optional system message and its
user turns, in order.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
FIELDS = ("messages", "conversations", "turns", "prompt", "question", "instruction", "data")
# Punctuation that carries meaning in arithmetic and code: "3 + 4" is not "3 - 4".
_MEANINGFUL = set("-*/%#&@\\")


@dataclass(frozen=True)
class Prompt:
    """One conversation without its answers."""

    id: str  # stable across runs: the row's own id, or a hash of the content
    source: str  # the source that gave it, e.g. "starter:train"
    messages: tuple[tuple[str, str], ...]  # (role, text), role is system or user

    @property
    def user_turns(self) -> list[str]:
        return [text for role, text in self.messages if role == "user"]

    def row(self) -> dict[str, Any]:
        """The JSON line that regeneration reads."""
        turns = [{"role": role, "content": text} for role, text in self.messages]
        return {"id": self.id, "source": self.source, "conversations": turns}


@dataclass
class Drops:
    """What was left out or cut short, by reason, with the rows themselves."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, reason: str, row_id: str, source: str, *, trained: bool = False, **more: Any
    ) -> None:
        """Record one row; ``trained`` says that the corpus holds it all the same."""
        entry = {"id": row_id, "source": source, "reason": reason, "trained": trained}
        self.rows.append({**entry, **more})

    def counts(self) -> dict[str, int]:
        return dict(sorted(Counter(row["reason"] for row in self.rows).items()))


@dataclass(frozen=True)
class Parsed:
    """A row's turns, and why it is shorter than the row or missing."""

    messages: tuple[tuple[str, str], ...] = ()
    reason: str | None = None
    detail: str = ""


def normalize(text: str) -> str:
    """Text as compared for duplicates: case, blanks and plain punctuation do not count."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    kept = (
        " " if unicodedata.category(ch).startswith("P") and ch not in _MEANINGFUL else ch
        for ch in folded
    )
    plain = " ".join("".join(kept).split())
    return plain or folded.strip()


def content_id(prefix: str, messages: Sequence[tuple[str, str]]) -> str:
    """``<prefix>-<16 hex digits>`` of the exact content."""
    text = json.dumps([list(m) for m in messages], ensure_ascii=False)
    return f"{prefix}-{hashlib.sha256(text.encode('utf-8')).hexdigest()[:16]}"


def _text(content: Any) -> str | None:
    """Message content as text; None when it holds anything but text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content.strip()
    if isinstance(content, list):
        parts = [
            p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None
            for p in content
        ]
        if all(isinstance(part, str) for part in parts):
            return "\n".join(parts).strip()  # type: ignore[arg-type]
    return None


def _from_messages(messages: list[Any]) -> Parsed:
    kept: list[tuple[str, str]] = []
    reason, detail = None, ""
    answered_first = False
    for message in messages:
        if not isinstance(message, dict):
            reason, detail = "unreadable", f"message is a {type(message).__name__}"
            break
        name = str(message.get("role") or message.get("from"))
        role = _ROLES.get(name.strip().lower())
        if role is None:
            # Tool calls and their results cannot be regenerated without the tools: the
            # conversation ends here.
            reason, detail = "unknown_role", name
            break
        if role == "assistant":
            answered_first = answered_first or not any(r == "user" for r, _ in kept)
            continue
        text = _text(message["content"] if "content" in message else message.get("value"))
        if text is None:
            reason, detail = "unsupported_content", f"a {role} message holds more than text"
            break
        if not text:
            if role == "system":
                continue
            reason, detail = "empty_prompt", "a user message is empty"
            break
        kept.append((role, text))
    if answered_first:
        # Its first user turn replies to something the target would never see.
        return Parsed(reason="assistant_first", detail="the conversation opens with an answer")
    while kept and kept[-1][0] == "system":
        kept.pop()
    if not kept:
        return Parsed(reason=reason or "empty_prompt", detail=detail or "no user message")
    return Parsed(tuple(kept), reason, detail)


def parse_row(row: dict[str, Any]) -> Parsed:
    """Read one dataset row.

    Forms: ``messages`` or ``conversations`` (role/content or from/value), ``turns``,
    ``prompt`` (text or messages), ``question``, ``instruction`` with optional ``input``,
    and UltraChat's ``data`` (one text, or texts of user and assistant in turn).

    Returns:
        The turns; with a ``reason`` when the row was cut short (turns left) or is
        unusable (none left).
    """
    for key in ("messages", "conversations"):
        if isinstance(row.get(key), list) and row[key]:
            return _from_messages(row[key])
    turns: Any = None
    if isinstance(row.get("turns"), list):
        turns = row["turns"]
    elif isinstance(row.get("prompt"), list):
        return _from_messages(row["prompt"])
    elif "data" in row and not any(k in row for k in ("prompt", "question", "instruction")):
        data = row["data"]
        turns = data[::2] if isinstance(data, list) else [data]
    else:
        for key in ("prompt", "question", "instruction"):
            if key in row:
                extra = row.get("input") if key == "instruction" else None
                turns = [f"{row[key]}\n\n{extra}" if extra else row[key]]
                break
    if turns is None:
        found = f"no known field among {sorted(row)[:8]}, want one of {', '.join(FIELDS)}"
        return Parsed(reason="unreadable", detail=found)
    return _from_messages([{"role": "user", "content": turn} for turn in turns])


class Seen:
    """Tells duplicates apart, exactly and normalized, over whole conversations."""

    def __init__(self) -> None:
        self._keys: set[tuple[str, ...]] = set()

    def duplicate(self, prompt: Prompt) -> bool:
        """True when an equal conversation was seen before; remembers this one."""
        key = tuple(f"{role}:{normalize(text)}" for role, text in prompt.messages)
        if key in self._keys:
            return True
        self._keys.add(key)
        return False


class Forbidden:
    """User turns of benchmarks and calibration sets, which training must not see."""

    def __init__(self) -> None:
        self._origin: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._origin)

    def add(self, prompt: Prompt) -> None:
        for turn in prompt.user_turns:
            self._origin.setdefault(normalize(turn), prompt.source)

    def match(self, prompt: Prompt) -> str | None:
        """The source that holds one of this conversation's turns, first or later."""
        for turn in prompt.user_turns:
            origin = self._origin.get(normalize(turn))
            if origin is not None:
                return origin
        return None
