"""What a target needs of a machine's memory, as far as its files tell; for --dry-run."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from forespark.config import Config

GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2, "fp8": 1, "fp8_e4m3": 1}


def needs(config: Config) -> list[str]:
    """Lines on weights, KV cache and what the machine has.

    Raises:
        ValueError: weights and the configured KV cache do not fit.
    """
    target, model = config.target, Path(config.target.model)
    if not (model / "config.json").is_file():
        return [f"memory:    not known before {target.model} is on this machine"]
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    ranks = target.tensor_parallel_size
    devices = gpus()
    per_token = kv_bytes_per_token(json.loads((model / "config.json").read_text()), config)
    whole = per_token * target.max_num_seqs * target.max_model_len
    lines = [
        f"memory:    weights {weights / GIB:.2f} GiB over {ranks} devices; KV cache "
        f"{per_token / 1024:.1f} KiB a token, {whole / GIB:.1f} GiB if {target.max_num_seqs} "
        f"requests fill {target.max_model_len} tokens each"
    ]
    if devices:
        have = sum(sorted(devices, reverse=True)[:ranks])
        lines.append(f"           {len(devices)} GPUs, {have / GIB:.0f} GiB in {ranks} of them")
        wanted = weights
    else:
        have = available_memory()
        wanted = weights + target.cpu_kv_cache_gib * GIB
        lines.append(f"           {have / GIB:.1f} GiB are free; the engine reserves "
                     f"{target.cpu_kv_cache_gib} GiB for its KV cache")  # fmt: skip
    if 0 < len(devices) < ranks or wanted > have:
        raise ValueError(
            f"target {target.name} wants {wanted / GIB:.1f} GiB on {ranks} devices, this machine "
            f"has {have / GIB:.1f} GiB on {len(devices) or 1}; lower target.cpu_kv_cache_gib or "
            "target.tensor_parallel_size, or use another machine"
        )
    return lines


def kv_bytes_per_token(model: dict[str, Any], config: Config) -> int:
    """Bytes that one token takes in all layers of the KV cache, by the model's config.json."""
    model = model.get("text_config") or model
    kind = config.target.kv_cache_dtype
    size = _BYTES.get(config.target.dtype if kind == "auto" else kind, 2)
    layers = int(model["num_hidden_layers"])
    if model.get("kv_lora_rank"):  # multi-head latent attention keeps one latent vector
        return layers * size * (int(model["kv_lora_rank"]) + int(model["qk_rope_head_dim"]))
    heads = int(model.get("num_key_value_heads") or model["num_attention_heads"])
    width = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    return layers * size * 2 * heads * int(width)


def gpus() -> list[int]:
    """Bytes of every GPU that the driver shows; none without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return [int(line) * 2**20 for line in found.stdout.split() if line.isdigit()]


def available_memory() -> int:
    """Bytes that new programs can have, by the kernel's estimate."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("this kernel does not say how much memory is available")
