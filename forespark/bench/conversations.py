"""Request streams of the end-to-end benchmarks: conversations, one request per user turn.

Each request carries the conversation so far, with the answers that were recorded, so every
arm sees the same history whatever it answered. Consecutive turns of a conversation are a
fixed number of requests apart (paper, Appendix C), as other users' requests come between.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from forespark.bench.workloads import (
    CHAT_FORMS,
    USER_ROLES,
    Messages,
    Prompt,
    load_prompts,
    parsed_rows,
    prompt_of,
    shuffled,
)
from forespark.config import StreamConfig

logger = logging.getLogger(__name__)

LEAST_MESSAGES = 4  # "at least four turns", of user and assistant together
_ROLES = dict.fromkeys(USER_ROLES, "user") | {
    "system": "system", "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant",
}  # fmt: skip
_WANTED = (
    f"no conversation of {LEAST_MESSAGES} or more messages in turns; want rows with messages "
    "(OpenAI) or conversations (ShareGPT)"
)
CountTokens = Callable[[list[dict[str, str]]], int]  # tokens of a chat with its template


@dataclass(frozen=True, slots=True)
class Streams:
    """The two sequences of requests that every arm meets."""

    measured: list[Prompt]
    held_out: list[Prompt]  # of other conversations, for warm-ups
    left_out: int  # requests with a history above the limit

    def endless(self, start: int = 0) -> Iterator[Prompt]:
        """Measured requests from number ``start`` on, over and over."""
        return itertools.islice(itertools.cycle(self.measured), start, None)

    def warm(self) -> Iterator[Prompt]:
        """Held-out requests, over and over."""
        return itertools.cycle(self.held_out)


def conversation(row: Any) -> Messages | None:
    """A row as alternating user and assistant turns, or None.

    A leading system message stays; an assistant's greeting before the first user turn, as
    ShareGPT has them, is dropped. Any other role, an empty turn or two turns of one side in
    a row make it unusable.
    """
    turns: list[tuple[str, str]] = []
    for role, text in _messages(row):
        side = _ROLES.get(role) if isinstance(role, str) else None
        if side is None or not isinstance(text, str) or not text.strip():
            return None
        turns.append((side, text.strip()))
    system = turns[:1] if turns and turns[0][0] == "system" else []
    rest = turns[len(system) :]
    rest = rest[1:] if rest and rest[0][0] == "assistant" else rest
    sides = [role for role, _ in rest]
    if len(rest) < LEAST_MESSAGES or sides != (["user", "assistant"] * len(rest))[: len(rest)]:
        return None
    return (*system, *rest)


def _messages(row: Any) -> list[tuple[Any, Any]]:
    """(role, text) of every message of a row, whatever they are; none without a list of them."""
    for key, role_key, text_key in CHAT_FORMS:
        items = row.get(key) if isinstance(row, dict) else None
        if isinstance(items, list):
            chats = [item if isinstance(item, dict) else {} for item in items]
            return [(item.get(role_key), item.get(text_key)) for item in chats]
    return []


def turns(messages: Messages) -> list[Prompt]:
    """One request per user turn, with everything before it."""
    return [
        prompt_of(messages[: index + 1])
        for index, (role, _) in enumerate(messages)
        if role == "user"
    ]


def interleave(conversations: list[list[Prompt]], spacing: int) -> list[Prompt]:
    """All requests, consecutive ones of a conversation exactly ``spacing`` apart.

    ``spacing`` conversations are open at a time and take turns; one that ends gives its place
    to the next. At the end, when fewer are left, they come closer.
    """
    waiting = iter(conversations)
    lanes = [iter(requests) for requests in itertools.islice(waiting, spacing)]
    stream = []
    while lanes:
        still_open = []
        for lane in lanes:
            request = next(lane, None)
            while request is None and (following := next(waiting, None)) is not None:
                lane = iter(following)
                request = next(lane, None)
            if request is not None:
                stream.append(request)
                still_open.append(lane)
        lanes = still_open
    return stream


def conversation_streams(
    stream: StreamConfig, count: CountTokens, *, seed: int, limit: int | None = None
) -> Streams:
    """Streams of e2e and slo, from ``stream.conversations``.

    Args:
        count: tokens of a request.
        limit: conversations in all.

    Raises:
        ValueError: no usable conversation, or none is left beside those held out.
    """
    found: dict[str, Messages] = {}
    for source in stream.conversations:
        found.update((prompt_of(m).id, m) for m in parsed_rows(source, conversation, _WANTED))
    most = stream.max_conversations if limit is None else min(limit, stream.max_conversations)
    chosen = [turns(messages) for messages in shuffled(found, seed)[:most]]
    _require_rest(len(chosen), stream.held_out, "conversations")
    held, measured = chosen[: stream.held_out], chosen[stream.held_out :]
    spacing = stream.turn_spacing
    return _fitting(
        interleave(measured, spacing), interleave(held, spacing), stream.max_prompt_tokens, count
    )


def question_streams(
    stream: StreamConfig, count: CountTokens, *, seed: int, limit: int | None = None
) -> Streams:
    """Streams of mathcode: single-turn prompts of ``stream.questions``; see above."""
    prompts = load_prompts(stream.questions, seed=seed, limit=limit)
    _require_rest(len(prompts), stream.held_out, "questions")
    held, measured = prompts[: stream.held_out], prompts[stream.held_out :]
    return _fitting(measured, held, stream.max_prompt_tokens, count)


def _require_rest(there: int, held_out: int, what: str) -> None:
    if there <= held_out:
        raise ValueError(
            f"stream.held_out: got {held_out}, but there are only {there} {what}; lower it, name "
            f"more sources in stream.{what}, or raise --limit"
        )


def _fitting(measured: list[Prompt], held: list[Prompt], most: int, count: CountTokens) -> Streams:
    def fits(prompt: Prompt) -> bool:
        # A token has a byte or more, so short texts need no tokenizer; half is for the template.
        size = sum(len(content.encode()) for _, content in prompt.messages)
        return size <= most // 2 or count(prompt.chat()) <= most

    kept = [[prompt for prompt in prompts if fits(prompt)] for prompts in (measured, held)]
    left_out = len(measured) + len(held) - sum(map(len, kept))
    if left_out:
        logger.warning("%d requests of more than %d tokens are left out", left_out, most)
    if not all(kept):
        raise ValueError(f"stream.max_prompt_tokens: got {most}, which no request keeps to")
    return Streams(kept[0], kept[1], left_out)
