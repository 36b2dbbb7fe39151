"""Self-synthesis: the target writes user turns by continuing its own chat template.

The prompt is the template rendered up to where a user's text would start, default system
message included; what the target samples there is a user turn. Source: Magpie
(arXiv 2406.08464), first step.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from forespark import record
from forespark.data.prompts import normalize
from forespark.data.template import template_kwargs, tokenizer_of

if TYPE_CHECKING:
    from forespark.data.sources import SourceContext

MAX_TOKENS = 256  # a user turn that has not ended by then is not kept
MIN_CHARS, MIN_WORDS = 12, 3
MIN_DISTINCT = 0.4  # distinct words over words; below it the text loops
ATTEMPTS_PER_ROW = 3
QUEUE_AHEAD = 4
_MARK = "\x00turn\x00"


def user_turn_prefix(tokenizer: Any, kwargs: dict[str, Any]) -> tuple[str, int]:
    """The rendered template up to a user's text, and the token that ends the turn.

    Raises:
        ValueError: the template does not show where a user turn starts or ends.
    """
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=False, **kwargs
    )
    before, mark, after = text.partition(_MARK)
    ids = tokenizer.encode(after, add_special_tokens=False)
    if not mark or not ids:
        raise ValueError(
            "magpie: the target's chat template does not delimit a user turn; drop this source"
        )
    return before, ids[0]


def refusal(text: str, finish_reason: str | None) -> str | None:
    """Why a sampled turn is not worth keeping, or None."""
    words = text.split()
    if not words:
        return "magpie_empty"
    if finish_reason != "stop":
        return "magpie_too_long"
    if len(text) < MIN_CHARS or len(words) < MIN_WORDS:
        return "magpie_too_short"
    if len(set(words)) < MIN_DISTINCT * len(words) or not any(ch.isalpha() for ch in text):
        return "magpie_repetitive"
    return None


def _sample(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=3600) as reply:
            choice = json.load(reply)["choices"][0]
    except urllib.error.HTTPError as error:
        raise ValueError(
            f"magpie: {url} answered {error.code}: {error.read(300).decode(errors='replace')}"
        ) from None
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(
            f"magpie: {url} gave no completion ({error}); run again to resume"
        ) from None
    kept = {key: body[key] for key in ("seed", "temperature")}
    return {**kept, "finish_reason": choice["finish_reason"], "text": choice["text"].strip()}


def _attempts(context: SourceContext) -> Iterator[dict[str, Any]]:
    """Samples in order of their number: those on disk first, then new ones.

    A sample's seed is the run's seed plus its number, so an interrupted run goes on with
    the samples it would have drawn.
    """
    config = context.config
    assert context.state_dir is not None and context.endpoint is not None
    kept = context.state_dir / "magpie.jsonl"
    temperature = config.data.magpie_temperature
    number = -1
    if kept.is_file():
        for number, row in enumerate(record.read_jsonl(kept)):
            if (row["seed"], row["temperature"]) != (config.data.seed + number, temperature):
                raise ValueError(
                    f"{kept}, sample {number}: drawn with another data.seed or "
                    "data.magpie_temperature; delete the file or choose another --out"
                )
            yield row
    endpoint = context.endpoint()
    tokenizer = tokenizer_of(config.target.model)
    prefix, stop = user_turn_prefix(tokenizer, template_kwargs(config))
    body = {
        "model": endpoint.model,
        "prompt": prefix,
        "add_special_tokens": False,
        "max_tokens": MAX_TOKENS,
        "temperature": temperature,
        "stop_token_ids": [stop],
    }
    workers = max(1, min(config.data.concurrency, config.data.magpie_rows))
    with ThreadPoolExecutor(workers) as pool:
        window: deque[Future[dict[str, Any]]] = deque()
        issued = number
        try:
            while True:
                # Samples are taken in order but end out of order: a queue well ahead of
                # the oldest keeps every worker busy while a long one runs.
                while len(window) < QUEUE_AHEAD * workers:
                    issued += 1
                    seed = config.data.seed + issued
                    window.append(pool.submit(_sample, endpoint.url, {**body, "seed": seed}))
                row = window.popleft().result()
                record.append_jsonl(kept, row)
                yield row
        finally:
            for future in window:
                future.cancel()


def magpie_rows(context: SourceContext) -> Iterator[dict[str, Any]]:
    """Up to ``data.magpie_rows`` distinct user turns written by the target.

    Raises:
        ValueError: no rows asked for, no server, or the server fails.
    """
    wanted = context.config.data.magpie_rows
    if wanted < 1:
        raise ValueError("source magpie: data.magpie_rows is 0, set how many user turns to sample")
    if context.endpoint is None or context.state_dir is None:
        raise ValueError(
            "source magpie samples from a served target and works in data.py only; "
            "use file:PATH here"
        )
    seen: set[str] = set()
    for number, row in enumerate(_attempts(context)):
        if len(seen) >= wanted or number >= ATTEMPTS_PER_ROW * wanted + 10:
            break
        text = row["text"]
        reason = refusal(text, row["finish_reason"])
        if reason is None and normalize(text) in seen:
            reason = "magpie_duplicate"
        if reason is not None:
            context.drops.add(reason, f"magpie#{number}", "magpie", text=text)
            continue
        seen.add(normalize(text))
        yield {"prompt": text}
