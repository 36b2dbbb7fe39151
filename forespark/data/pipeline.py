"""The data stage: prompts, the target's answers, checked token rows on disk.

Files of ``out``: ``prompts.jsonl`` (what the target is asked), ``responses.jsonl`` (raw
answers, also the resume state), ``responses.errors.jsonl``, ``magpie.jsonl`` (samples),
the corpus itself, ``errors.jsonl``, ``manifest.json`` and ``config.yaml``.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forespark import record
from forespark.config import Config, dump, require_model
from forespark.data import corpus, regenerate
from forespark.data.prompts import Drops, Forbidden, Prompt, Seen, content_id
from forespark.data.server import Endpoint, check_endpoint, served_target
from forespark.data.sources import (
    SourceContext,
    excluded_specs,
    iterate,
    no_prompt,
    require_files,
)
from forespark.data.template import template_hash, template_kwargs, tokenizer_of

MANIFEST_SCHEMA = 1


def forbidden_prompts(config: Config) -> Forbidden:
    """Every user turn of the excluded sources."""
    forbidden = Forbidden()
    context = SourceContext(config, Drops())
    for spec in excluded_specs(config):
        for prompt in iterate(spec, context):
            forbidden.add(prompt)
    return forbidden


def _round_robin(sources: list[Iterator[Prompt]]) -> Iterator[Prompt]:
    """One prompt of each source in turn, so that a limit takes some of all."""
    while sources:
        for source in list(sources):
            prompt = next(source, None)
            if prompt is None:
                sources.remove(source)
            else:
                yield prompt


def collect(context: SourceContext, forbidden: Forbidden, limit: int | None) -> list[Prompt]:
    """Clean, distinct, decontaminated prompts of ``data.sources``, at most ``limit``."""
    from tqdm import tqdm

    config, drops = context.config, context.drops
    longest = min(
        config.data.max_prompt_tokens, config.target.max_model_len - regenerate.answer_cap(config)
    )
    special = [token for token in tokenizer_of(config.target.model).all_special_tokens if token]
    seen, taken, kept = Seen(), set[str](), list[Prompt]()
    sources = [iterate(spec, context) for spec in config.data.sources]
    with tqdm(total=limit, desc="collecting prompts", unit="prompt", mininterval=1.0) as bar:
        for prompt in _round_robin(sources):
            origin = forbidden.match(prompt)
            text = "\n".join(text for _, text in prompt.messages)
            if seen.duplicate(prompt):
                drops.add("duplicate", prompt.id, prompt.source)
            elif origin is not None:
                drops.add(
                    "contaminated",
                    prompt.id,
                    prompt.source,
                    detail=f"a turn is in {origin}",
                    row=prompt.row(),
                )
            elif any(token in text for token in special):
                drops.add("special_token", prompt.id, prompt.source, row=prompt.row())
            elif (length := regenerate.prompt_tokens(config, prompt)) > longest:
                drops.add(
                    "over_long",
                    prompt.id,
                    prompt.source,
                    detail=f"{length} prompt tokens, at most {longest}",
                    row=prompt.row(),
                )
            else:
                if prompt.id in taken:  # two files may number their rows alike
                    prompt = Prompt(
                        content_id(prompt.id, prompt.messages), prompt.source, prompt.messages
                    )
                taken.add(prompt.id)
                kept.append(prompt)
                bar.update(1)
            if limit is not None and len(kept) >= limit:
                break  # before a source is asked for one more: magpie would sample it
    return kept


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{out}: another data run is writing there; wait for it or choose another --out"
            ) from None
        yield


def _key(config: Config, limit: int | None, out: Path) -> dict[str, Any]:
    """What a finished corpus was made of; equal keys mean there is nothing to do."""
    files = {
        name: record.file_sha256(out / name)
        for name in ("prompts.jsonl", "responses.jsonl")
        if (out / name).is_file()
    }
    settings = {**asdict(config.data), "limit": limit, "concurrency": None}
    return {
        "target": config.target.name,
        "model": config.target.model,
        "max_model_len": config.target.max_model_len,
        "template": template_hash(tokenizer_of(config.target.model), template_kwargs(config)),
        "data": settings,
        "files": files,
    }


def _check_sampling(config: Config, responses: list[dict[str, Any]], path: Path) -> None:
    for row in responses:
        used = (
            row.get("metadata", {})
            .get("sampling_params", {})
            .get("temperature", config.data.temperature)
        )
        if used != config.data.temperature:
            raise ValueError(
                f"{path}, row {row['id']}: sampled at temperature {used}, data.temperature is "
                f"{config.data.temperature}; choose another --out or set data.temperature={used}"
            )


def _errors(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    return {
        str(row["id"]): str(row.get("metadata", {}).get("error", ""))
        for row in record.read_jsonl(path)
    }


def _answer(
    config: Config, prompts: list[Prompt], out: Path, server: Callable[[], Endpoint]
) -> None:
    """Let the target answer what has no answer yet; repair what a kill left behind."""
    path = out / "responses.jsonl"
    room = regenerate.room_for(config, prompts)
    removed = regenerate.repair(path, {p.id: len(p.user_turns) for p in prompts}, room)
    if removed:
        print(
            f"{path}: {removed} unfinished row(s) of an interrupted run taken out, to be made again"
        )
    responses = regenerate.read_responses(path)
    _check_sampling(config, responses, path)
    done = {str(row["primary_id"]) for row in responses}
    hopeless = regenerate.permanent_errors(out / "responses.errors.jsonl")
    pending = [p for p in prompts if p.id not in done and p.id not in hopeless]
    if pending:
        print(f"answers: {len(prompts) - len(pending)} there, {len(pending)} to generate")
        regenerate.regenerate(config, pending, out, server(), room)


def _manifest(
    config: Config,
    key: dict[str, Any],
    prompts: list[Prompt],
    rows: list[dict[str, Any]],
    drops: Drops,
) -> dict[str, Any]:
    return {
        "schema": MANIFEST_SCHEMA,
        "key": key,
        "counts": corpus.counts(prompts, rows),
        "reasons": drops.counts(),
        "reasons_trained": Drops([row for row in drops.rows if row["trained"]]).counts(),
        "excluded": excluded_specs(config),
        "sampling": regenerate.sampling_params(config),
        "hashes": {**key["files"], "template": key["template"], "rows": corpus.rows_digest(rows)},
        "provenance": record.provenance(),
    }


def _write_errors(out: Path, drops: Drops) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in drops.rows)
    record.write_text(out / "errors.jsonl", lines)


def _finished(out: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    if not (out / "manifest.json").is_file() or not (out / "state.json").is_file():
        return None
    manifest: dict[str, Any] = record.read_json(out / "manifest.json")
    # Failed requests deserve another try; every other reason would only repeat itself.
    retry = manifest.get("reasons", {}).get("request_failed", 0)
    return manifest if manifest.get("key") == json.loads(json.dumps(key)) and not retry else None


def run(
    config: Config, *, out: Path, endpoint: str | None = None, limit: int | None = None
) -> dict[str, Any]:
    """Build the corpus in ``out``; a second run goes on where the first one stopped.

    Args:
        endpoint: URL of a server that serves the target; None starts one when needed.
        limit: Prompts in all; None takes ``data.limit``.

    Returns:
        The manifest.

    Raises:
        ValueError: a bad source, setting or endpoint, or no usable row at all.
        ServerDied: the server we started failed; what was answered is kept.
    """
    limit = config.data.limit if limit is None else limit
    if limit is not None and limit < 1:
        raise ValueError(f"--limit: got {limit}, want >= 1")
    require_files(config)
    require_model(config.target.model)
    out = Path(out)
    servers: list[Endpoint] = []
    if endpoint is not None and not (out / "manifest.json").is_file():
        # Before any work; a corpus that is complete already needs no server.
        servers.append(check_endpoint(endpoint, config))
    with _lock(out), ExitStack() as stack:

        def server() -> Endpoint:
            if not servers and endpoint is not None:
                servers.append(check_endpoint(endpoint, config))
            elif not servers:
                started = stack.enter_context(served_target(config, log=out / "server.log"))
                servers.append(Endpoint(started.url, config.target.model))
            return servers[0]

        drops = Drops()
        context = SourceContext(config, drops, out, server)
        prompts = collect(context, forbidden_prompts(config), limit)
        if not prompts:
            _write_errors(out, drops)
            raise ValueError(f"{no_prompt(config.data.sources, drops)}; see {out / 'errors.jsonl'}")
        text = "".join(json.dumps(prompt.row(), ensure_ascii=False) + "\n" for prompt in prompts)
        record.write_text(out / "prompts.jsonl", text)
        finished = _finished(out, _key(config, limit, out))
        if finished is not None:
            print(f"{out}: the corpus is complete, nothing to do")
            return finished
        record.write_text(out / "config.yaml", dump(config))
        _answer(config, prompts, out, server)
        responses = regenerate.read_responses(out / "responses.jsonl")
        rows = corpus.corpus_rows(
            config, prompts, responses, _errors(out / "responses.errors.jsonl"), drops
        )
        _write_errors(out, drops)
        if not rows:
            raise ValueError(
                f"{out}: no answer can be trained on: {drops.counts()}; see {out / 'errors.jsonl'}"
            )
        corpus.save(rows, out)
        manifest = _manifest(config, _key(config, limit, out), prompts, rows, drops)
        record.write_json(out / "manifest.json", manifest)
    return manifest
