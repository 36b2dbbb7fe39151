"""Copy committed result tables into the README, so that none of its numbers is typed.

    python scripts/readme_results.py [--check]

A block of the README between ``<!-- from FILE -->`` and ``<!-- end -->`` is replaced by the
text of FILE. ``--check`` changes nothing and fails when a block differs from its file.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- from (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, root: Path) -> str:
    """``text`` with the content of each named file, paths relative to ``root``.

    Raises:
        FileNotFoundError: a block names a file that is not there.
    """

    def block(found: re.Match[str]) -> str:
        content = (root / found[2]).read_text(encoding="utf-8").strip()
        return f"{found[1]}\n{content}\n\n{found[3]}"

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    try:
        wanted = filled(text, ROOT)
    except FileNotFoundError as error:
        print(f"README.md quotes {error.filename}, which is not there", file=sys.stderr)
        return 2
    if check:
        if text != wanted:
            print("README.md differs from the tables it quotes; run python "
                  "scripts/readme_results.py", file=sys.stderr)  # fmt: skip
        return int(text != wanted)
    readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
