"""The target answers every prompt, through speculators' regenerate-responses.

speculators appends one row per answer to ``responses.jsonl`` and skips, on resume, the
conversations that have a row there. Three gaps of that are closed here:

* a line torn by a kill would swallow the next row: the torn tail is cut off first;
* a kill between two rows of one conversation leaves it half written yet "done": the last
  conversation is taken out again unless it is known to be whole;
* its ``max_tokens`` also ends a conversation whose *prompt and answer* together are
  longer (speculators PR 1037): the answer's cap therefore travels as
  ``max_completion_tokens``, and ``max_tokens`` is the length at which a conversation
  really cannot go on.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from forespark import record
from forespark.config import Config
from forespark.data.prompts import Prompt
from forespark.data.server import Endpoint
from forespark.data.template import render, template_kwargs, tokenizer_of

# Tokens a chat template puts around one more user turn, generously.
TURN_OVERHEAD = 32


def read_responses(path: Path) -> list[dict[str, Any]]:
    """Rows of ``responses.jsonl``, the first of each row id; unreadable lines are skipped.

    Only a kill during a run of speculators' own command leaves such lines inside.
    """
    rows: dict[str, dict[str, Any]] = {}
    if path.is_file():
        with path.open("rb") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                except (json.JSONDecodeError, UnicodeDecodeError):
                    continue
                if (
                    isinstance(row, dict)
                    and {"id", "primary_id", "input_ids", "loss_mask"} <= row.keys()
                ):
                    rows.setdefault(str(row["id"]), row)
    return list(rows.values())


def repair(path: Path, turns: dict[str, int], room: int) -> int:
    """Make ``responses.jsonl`` fit to be appended to; returns rows and torn lines removed.

    Args:
        path: The file; it may be missing.
        turns: User turns of each wanted conversation, by id. The last conversation in
            the file is removed when it has fewer answers than that.
        room: Length in tokens past which a conversation was ended on purpose.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return 0
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    removed = int(end != len(data))
    lines = data[:end].splitlines(keepends=True)
    last = _primary(lines[-1]) if lines else None
    own = 0
    while own < len(lines) and _primary(lines[-1 - own]) == last:
        own += 1
    if last in turns and own < turns[last] and len(_row(lines[-1]).get("input_ids", ())) <= room:
        del lines[len(lines) - own :]
        removed += own
    if removed:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(b"".join(lines))
        temporary.replace(path)
    return removed


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return {}
    return row if isinstance(row, dict) else {}


def _primary(line: bytes) -> str:
    return str(_row(line).get("primary_id"))


def permanent_errors(path: Path) -> dict[str, str]:
    """Conversations that would fail again: id -> error, from the errors file."""
    failed: dict[str, str] = {}
    if path.is_file():
        for row in record.read_jsonl(path):
            error = str(row.get("metadata", {}).get("error", ""))
            reason = error_reason(error)
            if reason != "request_failed":
                failed[str(row["id"])] = error
    return failed


def error_reason(error: str) -> str:
    """Reason under which a failed conversation is counted."""
    if "empty assistant generation" in error:
        return "empty_response"
    if "HTTP 400" in error and ("length" in error or "maximum" in error or "tokens" in error):
        return "over_long"
    if "HTTP 4" in error and "HTTP 408" not in error and "HTTP 429" not in error:
        return "refused"
    return "request_failed"


def room_for(config: Config, prompts: Sequence[Prompt]) -> int:
    """Length in tokens past which no conversation of these can take another turn."""
    tokenizer = tokenizer_of(config.target.model)
    later = [turn for prompt in prompts for turn in prompt.user_turns[1:]]
    longest = max(
        (len(tokenizer.encode(turn, add_special_tokens=False)) for turn in later), default=0
    )
    return max(1, config.target.max_model_len - answer_cap(config) - longest - TURN_OVERHEAD)


def answer_cap(config: Config) -> int:
    """Tokens an answer may have, so that the longest allowed prompt still fits the context.

    Raises:
        ValueError: prompts alone may fill the context.
    """
    data, context = config.data, config.target.max_model_len
    cap = min(data.max_tokens, context - data.max_prompt_tokens)
    if cap < 1:
        raise ValueError(
            f"data.max_prompt_tokens is {data.max_prompt_tokens}, the target's context {context}: "
            "no room for an answer, lower data.max_prompt_tokens or raise target.max_model_len"
        )
    return cap


def sampling_params(config: Config) -> dict[str, Any]:
    """Sampling parameters merged into every chat request."""
    data = config.data
    params: dict[str, Any] = {
        "temperature": data.temperature,
        "max_completion_tokens": answer_cap(config),
    }
    if data.temperature > 0:
        params.update(top_p=data.top_p, seed=data.seed)
    if kwargs := template_kwargs(config):
        params["chat_template_kwargs"] = kwargs
    return params


def prompt_tokens(config: Config, prompt: Prompt) -> int:
    """Length in tokens of the longest user turn, with system message and template."""
    tokenizer, kwargs = tokenizer_of(config.target.model), template_kwargs(config)
    system = [{"role": role, "content": text} for role, text in prompt.messages if role == "system"]
    turns = ([*system, {"role": "user", "content": turn}] for turn in prompt.user_turns)
    return max(len(render(tokenizer, messages, kwargs)) for messages in turns)


def regenerate(
    config: Config, prompts: Sequence[Prompt], out: Path, endpoint: Endpoint, room: int
) -> None:
    """Append the target's answers to ``out/responses.jsonl``.

    Args:
        prompts: Conversations that have no answer yet.
        endpoint: The served target.
        room: As ``room_for`` gives it for all prompts of the corpus.
    """
    library = importlib.import_module("speculators.cli.regenerate_responses")
    pending = out / "pending.jsonl"
    record.write_text(
        pending, "".join(json.dumps(p.row(), ensure_ascii=False) + "\n" for p in prompts)
    )
    # The library loads a tokenizer by the name in its requests, which a served name is not.
    decode = library.build_detokenizer(config.target.model)
    with mock.patch.object(library, "build_detokenizer", return_value=decode):
        library.regenerate_responses(
            endpoint=f"{endpoint.url}/v1/chat/completions",
            model=endpoint.model,
            dataset=str(pending),
            limit=len(prompts),
            concurrency=config.data.concurrency,
            max_tokens=room,
            sampling_params=json.dumps(sampling_params(config)),
            outfile=str(out / "responses.jsonl"),
            resume=True,
            seed=config.data.seed,
        )
    pending.unlink()
