"""Helpers of the data tests: JSON-lines files and a fake OpenAI-compatible server."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write JSON lines and return the ``file:`` source of them."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"file:{path}"


@dataclass
class FakeServer:
    """An OpenAI-compatible server that answers by rule; ``reply`` may be replaced."""

    model: str
    name: str = ""  # listed instead of the model when set
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)  # user turns for /v1/completions
    # Last user message -> (answer, finish_reason) or an HTTP status.
    special: dict[str, tuple[str, str] | int] = field(default_factory=dict)

    def chat(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        from forespark.data.template import render, tokenizer_of

        tokenizer = tokenizer_of(self.model)
        question = body["messages"][-1]["content"]
        found = self.special.get(question, (f"echo {question}", "stop"))
        if isinstance(found, int):
            return found, {"error": "the prompt's length exceeds the maximum number of tokens"}
        answer, finish = found
        ids = tokenizer.encode(
            answer + ("</s>" if finish == "stop" else ""), add_special_tokens=False
        )
        choice = {"message": {"content": answer}, "token_ids": ids, "finish_reason": finish}
        prompt = render(tokenizer, body["messages"], {})
        return 200, {"choices": [choice], "prompt_token_ids": prompt, "usage": {}}

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        text = self.turns[body["seed"] % len(self.turns)]
        return 200, {
            "choices": [{"text": text, "finish_reason": "stop" if text != "long" else "length"}]
        }
