"""Rooms import only what the design allows; thin programs stay thin."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "forespark"
# Room -> rooms it may import. A room is a folder or a top-level module of the package.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "record": set(),
    "process": set(),
    "memory": {"config"},
    "cli": {"config", "record", "memory"},
    "data": {"config", "record", "process"},
    "models": set(),
    "fore_d": set(),
    "calibration": {"fore_d", "record"},
    "training": {"models", "data", "config", "record"},
    "serving": {"models", "fore_d", "config", "record", "process", "memory"},
    "bench": {"fore_d", "config", "record", "process"},
}
# Third-party packages kept to some rooms ("plot" is the folder beside the package).
ONLY_IN = {"vllm": {"serving"}}
NEVER_IN = {
    "config": {"torch"},
    "process": {"torch"},
    "record": set(),  # torch only when it is loaded already, to name the device
    "cli": {"torch", "transformers"},
    "plot": {"torch", "hydra"},
}
POLICY = {"torch", "numpy", "numba", "triton"}  # all that fore_d may take from outside
CLI_LINES = 60


def imported(path: Path) -> set[str]:
    """Dotted names of every absolute import in a file, function bodies included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; spell it out"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def rooms() -> list[tuple[str, Path]]:
    """(room, file) for every python file of the package and of plot/."""
    files = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            files.append((parts[0], path))
    files.extend(("plot", path) for path in sorted((ROOT / "plot").glob("*.py")))
    return files


FILES = rooms()
IDS = [str(path.relative_to(ROOT)) for _, path in FILES]


@pytest.mark.parametrize(("room", "path"), FILES, ids=IDS)
def test_room_imports_only_what_it_may(room: str, path: Path) -> None:
    allowed = {"record"} if room == "plot" else ALLOWED[room]
    for name in imported(path):
        head, _, rest = name.partition(".")
        if head == PACKAGE and rest not in ("", "__version__"):
            other = rest.split(".")[0]
            assert other == room or other in allowed, f"{room} may not import {name}"


@pytest.mark.parametrize(("room", "path"), FILES, ids=IDS)
def test_third_party_packages_stay_in_their_rooms(room: str, path: Path) -> None:
    heads = {name.partition(".")[0] for name in imported(path)}
    for package, homes in ONLY_IN.items():
        assert package not in heads or room in homes, f"only {homes} may import {package}"
    assert not heads & NEVER_IN.get(room, set())
    if room == "fore_d":
        import sys

        outside = heads - POLICY - set(sys.stdlib_module_names) - {PACKAGE}
        assert not outside, f"fore_d may not import {outside}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.name)
def test_programs_stay_thin(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= CLI_LINES, f"{path.name} has {lines} lines, at most {CLI_LINES}"


@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for top in (ROOT, ROOT / "plot", *(ROOT / d for d in (PACKAGE, "tests", "scripts")))
        for path in (top.glob("*.py") if top in (ROOT, ROOT / "plot") else top.rglob("*.py"))
    ),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_file_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{path} starts with no docstring"
