"""Documents do not rot: paths, programs and flags that they name exist."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forespark import config

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
WALKTHROUGH = ROOT / "docs" / "walkthrough.md"
# Made by running something, so absent from a fresh clone.
GENERATED = ("runs/", ".venv", "models/smollm2")
CODE = re.compile(r"```bash\n(.*?)```|`([^`\n]+)`", re.DOTALL)
PATH = re.compile(r"(?<![\w/.:<>-])((?:\.?[\w-]+/)+[\w.-]*|[\w-]+\.(?:py|sh|md|toml))(?![\w/<>*])")


def snippets(document: Path) -> list[str]:
    """Code of a document: fenced shell blocks (comments cut) and inline code."""
    text = document.read_text(encoding="utf-8")
    return [
        re.sub(r"(^|\s)#.*", "", block or inline).replace("\\\n", " ")
        for block, inline in CODE.findall(text)
    ]


@functools.cache
def help_text(program: str) -> str:
    """What ``python PROGRAM --help`` prints."""
    result = subprocess.run(
        [sys.executable, program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.replace("]", " ")


def tracked_top_level() -> set[str]:
    """First path components of files under version control."""
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {line.partition("/")[0] for line in listing.stdout.splitlines()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_paths_exist(document: Path) -> None:
    top_level = tracked_top_level()
    checked = 0
    for snippet in snippets(document):
        for path in PATH.findall(snippet):
            inside = path.partition("/")[0] in top_level or path.endswith((".py", ".sh"))
            if not inside or path.startswith(GENERATED):
                continue
            assert (ROOT / path).exists(), f"{document.name} names {path}, which does not exist"
            checked += 1
    assert checked > 5, "the pattern no longer finds any path"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_name_programs_flags_and_settings_that_exist(document: Path) -> None:
    for snippet in snippets(document):
        for line in snippet.splitlines():
            words = line.split()
            if words[:1] != ["python"] or len(words) < 2:
                continue
            for word in words[2:]:
                if word.startswith("--"):
                    flag = word.partition("=")[0]
                    assert f"{flag} " in help_text(words[1]), f"{line}: no flag {flag}"


def test_named_arms_targets_and_settings_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for group in ("arm", "target"):
        for name in config.names(group):
            assert f"`{name}`" in text, f"README does not name the {group} {name}"
        for name in re.findall(rf"--{group} (\w+)", text):
            assert name in config.names(group)
    for override in re.findall(r"`((?:\w+\.)\w+=[^`\s]+)`", text):
        config.load([override])


def test_readme_quotes_its_tables_as_they_are() -> None:
    check = [sys.executable, "scripts/readme_results.py", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "records", sorted(ROOT.glob("results/*/bench/decode/records.jsonl")), ids=str
)
def test_tables_are_those_of_the_committed_records(records: Path, tmp_path: Path) -> None:
    command = [sys.executable, "plot/table.py", "--records", records.parent, "--out", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    made = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert made == (records.parents[2] / "figures/table.md").read_text(encoding="utf-8")


def test_walkthrough_names_what_exists() -> None:
    text = WALKTHROUGH.read_text(encoding="utf-8")
    names = re.findall(r"`([\w./]+\.py)::(\w+)`", text)
    assert len(names) > 25, "the pattern no longer finds the names"
    for path, name in names:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(def|class) {name}\b", source, re.MULTILINE), f"{path}::{name}"
    for path in re.findall(r"`([\w./]+\.py)`", text):
        assert (ROOT / path).exists(), path
