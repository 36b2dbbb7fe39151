"""Where prompts come from: ``starter``, ``magpie``, ``file:PATH`` and ``hub:NAME``.

Any source may carry a slice, ``file:prompts.jsonl#0:800``, counted in rows of the source
before anything is dropped. Sources are iterators: a limit stops a long download early.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forespark.config import Config
from forespark.data.prompts import FIELDS, Drops, Prompt, Seen, content_id, parse_row

if TYPE_CHECKING:
    from forespark.data.server import Endpoint

STARTER_DIR = Path(__file__).resolve().parent / "starter"
STARTER_PARTS = ("train", "calibration", "bench", "conversations", "questions")
KINDS = (
    "starter[:train|calibration|bench], magpie, file:PATH, hub:NAME (each may end in #START:STOP)"
)
_WANTED_ROWS = f"give JSON lines, one object a line, with one of {', '.join(FIELDS)}"


@dataclass
class SourceContext:
    """What a source may need beyond its name."""

    config: Config
    drops: Drops
    state_dir: Path | None = None  # where magpie keeps what it sampled
    endpoint: Callable[[], Endpoint] | None = None  # starts the target's server if need be


def split_spec(spec: str) -> tuple[str, str, slice]:
    """``kind:argument#start:stop`` in its three parts.

    Raises:
        ValueError: unknown kind, missing argument or a slice that is not one.
    """
    body, mark, cut = spec.rpartition("#")
    rows = slice(None)
    if mark and (found := re.fullmatch(r"(\d*):(\d*)", cut)):
        start, stop = (int(n) if n else None for n in found.groups())
        rows = slice(start, stop)
    else:
        body = spec
    kind, _, argument = body.partition(":")
    if kind not in ("starter", "magpie", "file", "hub"):
        raise ValueError(f"unknown prompt source {spec!r}: want {KINDS}")
    if kind in ("file", "hub") and not argument:
        raise ValueError(
            f"prompt source {spec!r} names no {'path' if kind == 'file' else 'dataset'}"
        )
    if kind == "starter" and (argument or "train") not in STARTER_PARTS:
        raise ValueError(
            f"unknown starter part {argument!r}: want one of {', '.join(STARTER_PARTS)}"
        )
    return kind, argument, rows


def _require_file(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"file:{path}: is a directory, want a file; {_WANTED_ROWS}")
    if not path.is_file():
        raise ValueError(f"file:{path}: no such file")


def _open_lines(path: Path) -> Iterator[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        yield from lines


def file_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file, plain or gzipped.

    Raises:
        ValueError: no file or an empty one, a line that is not a JSON object (names the line), or a
            damaged archive.
    """
    _require_file(path)
    number, rows = 0, 0
    try:
        for number, line in enumerate(_open_lines(path), start=1):
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: want a JSON object, got {line[:40]!r}")
            rows += 1
            yield row
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {number}: not JSON ({error.msg}); want one JSON object a line, "
            "the file is truncated or of another form"
        ) from None
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read after line {number} ({error})") from None
    if not rows:
        raise ValueError(f"{path}: the file is empty; {_WANTED_ROWS}")


def hub_rows(name: str) -> Iterator[dict[str, Any]]:
    """Rows of a dataset of the Hugging Face hub, streamed.

    ``name`` is a preset of speculators (``magpie``, ``ultrachat``, ``sharegpt``, ...),
    ``alpaca``, or ``owner/dataset`` (its ``train`` split).

    Raises:
        ValueError: unknown preset, or the hub cannot be reached.
    """
    from datasets import load_dataset
    from speculators.data_generation.configs import DATASET_CONFIGS, DatasetConfig

    presets = {key: preset for key, preset in DATASET_CONFIGS.items() if "coco" not in key}
    presets["alpaca"] = DatasetConfig(
        name="alpaca", hf_path="tatsu-lab/alpaca", split="train", prompt_field="instruction"
    )
    if name not in presets and "/" not in name:
        raise ValueError(
            f"hub:{name}: unknown preset, want owner/dataset or one of {', '.join(sorted(presets))}"
        )
    preset = presets.get(name) or DatasetConfig(name=name, hf_path=name, split="train")
    try:
        rows = iter(
            load_dataset(preset.hf_path, name=preset.subset, split=preset.split, streaming=True)
        )
        first = next(rows, None)
    except Exception as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"hub:{name}: cannot load {preset.hf_path} ({cause}); "
            "check the network and HF_HUB_OFFLINE, or give a JSON-lines copy as file:PATH"
        ) from None
    if first is None:
        return
    for row in _chain(first, rows):
        if preset.filter_fn is None or preset.filter_fn(row):
            yield {**row, **preset.normalize_fn(row)} if preset.normalize_fn else row


def _chain(first: dict[str, Any], rest: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield first
    yield from rest


def _prefix(kind: str, argument: str) -> str:
    stem = Path(argument).name.split(".")[0] if kind == "file" else argument.replace("/", "_")
    return kind if kind in ("starter", "magpie") else stem or kind


def iterate(spec: str, context: SourceContext) -> Iterator[Prompt]:
    """Prompts of one source; rows that give none are added to ``context.drops``.

    Raises:
        ValueError: as ``split_spec``, ``file_rows``, ``hub_rows``; magpie without a server.
    """
    kind, argument, cut = split_spec(spec)
    if kind == "magpie":
        from forespark.data.magpie import magpie_rows

        rows = magpie_rows(context)
    elif kind == "hub":
        rows = hub_rows(argument)
    else:
        path = STARTER_DIR / f"{argument or 'train'}.jsonl" if kind == "starter" else Path(argument)
        rows = file_rows(path)
    prefix = _prefix(kind, argument)
    for row in islice(rows, cut.start, cut.stop):
        parsed = parse_row(row)
        given = row.get("id")
        row_id = str(given) if given not in (None, "") else content_id(prefix, parsed.messages)
        if parsed.reason is not None:
            shown = {} if parsed.messages else {"row": row}
            context.drops.add(
                parsed.reason,
                row_id,
                spec,
                trained=bool(parsed.messages),
                detail=parsed.detail,
                **shown,
            )
        if parsed.messages:
            yield Prompt(row_id, spec, parsed.messages)


def excluded_specs(config: Config) -> list[str]:
    """Sources that training must not see: ``data.exclude``, calibration and benchmarks."""
    return list(
        dict.fromkeys([*config.data.exclude, *config.calibrate.sources, *config.bench.prompts])
    )


def needed_files(config: Config) -> list[Path]:
    """Local files that building the corpus reads.

    Raises:
        ValueError: a source that ``split_spec`` refuses.
    """
    specs = [split_spec(spec) for spec in [*config.data.sources, *excluded_specs(config)]]
    return [Path(argument) for kind, argument, _ in specs if kind == "file"]


def require_files(config: Config) -> None:
    """Refuse a ``file:`` source that is no file, before any work.

    Raises:
        ValueError: as ``needed_files``; the source is missing or a directory.
    """
    for path in needed_files(config):
        _require_file(path)


def check_files(config: Config) -> None:
    """Read every ``file:`` source to its end, for a dry run.

    Raises:
        ValueError: as ``file_rows``; a source to train on has no usable row.
    """
    context = SourceContext(config, Drops())
    for spec in [*config.data.sources, *excluded_specs(config)]:
        if split_spec(spec)[0] != "file":
            continue
        usable = sum(1 for _ in iterate(spec, context))
        if not usable and spec in config.data.sources:
            raise ValueError(no_prompt([spec], context.drops))


def no_prompt(specs: list[str], drops: Drops) -> str:
    """The message when sources give no prompt at all."""
    details = [row["detail"] for row in drops.rows if row.get("detail")]
    example = f"; for example: {details[0]}" if details else ""
    return f"no usable prompt in {', '.join(specs)}: {drops.counts() or 'empty'}{example}"


def load_prompts(specs: list[str], config: Config, *, limit: int | None = None) -> list[Prompt]:
    """Prompts of several sources, one source after the other, without duplicates.

    For calibration and benchmarks; training goes through ``pipeline.run``.
    """
    context = SourceContext(config, Drops())
    seen, found = Seen(), list[Prompt]()
    for spec in specs:
        for prompt in iterate(spec, context):
            if limit is not None and len(found) >= limit:
                return found
            if not seen.duplicate(prompt):
                found.append(prompt)
    return found
