"""Continue in the repository's ``.venv`` when this Python lacks what the figures import.

Every figure imports this module first, before pandas: importing it is all there is to call.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

PLOT = Path(__file__).resolve().parent
NEEDED = ("pandas", "matplotlib", "forespark")


def use() -> None:
    """Start the running figure again in ``.venv``, or say how to get one (exit code 2)."""
    script = Path(sys.argv[0])
    if all(map(importlib.util.find_spec, NEEDED)) or script.resolve().parent != PLOT:
        return
    environment = PLOT.parent / ".venv"
    python = environment / "bin" / "python"
    if python.exists() and Path(sys.prefix) != environment:
        os.execv(python, [str(python), *sys.argv])
    print(f"{script.name}: error: pandas, matplotlib or forespark is not installed in this "
          "Python; run ./setup.sh first", file=sys.stderr)  # fmt: skip
    sys.exit(2)


use()
