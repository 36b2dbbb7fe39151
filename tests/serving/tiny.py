"""A tiny random target with a tiny random drafter, served by the real engine in seconds.

The drafters are trained for a few seconds, so that some of their drafts are accepted: a
test on drafts that are always rejected would prove little.
"""

from __future__ import annotations

from pathlib import Path

from forespark import config as configuration
from forespark import record

K = 3
VOCAB = 12
TRAINING = [
    "train.max_steps=40",
    "train.total_seq_len=128",
    "train.max_anchors=64",
    "train.loss_vocab=null",
    "train.ce_warmup_steps=30",
    "train.validate_every=1000",
    "train.checkpoint_every=1000",
    "train.hidden_states=local",
    "train.cache_hidden_states=false",
]


def build(folder: Path) -> None:
    """Write target, drafters, heads, calibration and latency tables under ``folder``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=128,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    target = LlamaForCausalLM(shape)
    with torch.no_grad():
        # Logits with a spread that gives both likely and unlikely tokens.
        target.model.embed_tokens.weight.normal_(std=0.12)
    target.save_pretrained(folder / "target")
    _drafters(folder, target)
    tokens = [1, 4, 16, 64]
    from forespark.serving.artifacts import calibration_name, drafter_sha256, latency_key

    digest = drafter_sha256(folder / "forespark")
    prices = {
        "draft": {"tokens": tokens, "ms": [0.1 + 0.05 * t for t in tokens]},
        "verify": {
            "batch": [1, 16],
            "per_request": [0, K],
            "ms": [[5.0, 5.3], [6.0, 9.0]],
        },
        "other": {"batch": [1, 16], "ms": [0.5, 0.6]},
    }
    record.write_json(
        folder / "latency.json",
        {"schema": 1, "key": latency_key(configuration_for(folder), digest), **prices},
    )
    for name in ("forespark", "dspark"):
        record.write_json(folder / calibration_name(name), _calibration(folder, name))
    # The directional DSpark's lie beside it and under its drafter's name.
    causal = folder / "dspark_wcs"
    record.write_json(causal / "forespark/calibration.json", _calibration(folder, causal.name))
    key = latency_key(configuration_for(folder), drafter_sha256(causal))
    record.write_json(folder / "latency-dspark.json", {"schema": 1, "key": key, **prices})


def _calibration(folder: Path, name: str) -> dict:
    """The identity calibration of one drafter."""
    digest = record.file_sha256(folder / name / "model.safetensors")
    lengths = [K] if name == "dspark_wcs" else range(1, K + 1)
    pre = {
        "form": "row" if name == "dspark_wcs" else "triangle",
        "scale": [[1.0] * d for d in lengths],
        "bias": [[0.0] * d for d in lengths],
        "samples": [[1] * d for d in lengths],
        "kept": [[False] * d for d in lengths],
        "ece_before": [0.1] * K,
        "ece_after": [0.1] * K,
    }
    post = {
        "theta": [1.0] * K,
        "ece_before": [0.1] * K,
        "ece_after": [0.1] * K,
        "samples": [1] * K,
    }
    return {
        "schema": 1,
        "key": {
            "target": "smollm2",
            "drafter": name.removesuffix("_wcs"),
            "drafter_sha256": digest,
            "K": K,
        },
        "post": post,
        "pre": None if name == "dspark" else pre,
    }


def _drafters(folder: Path, target) -> None:
    """Train every drafter for a few seconds on the target's own answers."""
    import torch

    from forespark.training.run import run

    rng = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, VOCAB, (48, 4), generator=rng)
    answers = target.generate(prompts, max_new_tokens=28, do_sample=False, eos_token_id=None)
    for index, ids in enumerate(answers.tolist()):
        row = {"id": str(index), "input_ids": ids, "loss_mask": [0] * 4 + [1] * (len(ids) - 4)}
        record.append_jsonl(folder / "corpus.jsonl", row)
    for name in ("forespark", "dspark", "dspark_wcs"):
        causal = f"drafter.directional={str(name == 'dspark_wcs').lower()}"
        config = configuration_for(folder, "ar", *TRAINING, causal)
        run(config, name.removesuffix("_wcs"), folder / name)
        _tell_layers_apart(folder / name)


def _tell_layers_apart(drafter: Path) -> None:
    """Give each layer's key norm its own scale, as long training does.

    A few steps leave all norms near one, and serving a layer with another layer's norm
    would then go unseen.
    """
    from safetensors.torch import load_file, save_file

    weights = load_file(drafter / "model.safetensors")
    for layer, scale in ((0, 0.8), (1, 1.5)):
        weights[f"layers.{layer}.self_attn.k_norm.weight"] *= scale
    save_file(weights, drafter / "model.safetensors", metadata={"format": "pt"})
    heads = drafter / "forespark" / "heads.json"
    if heads.exists():
        digest = record.file_sha256(drafter / "model.safetensors")
        record.write_json(heads, {**record.read_json(heads), "drafter_sha256": digest})


def overrides_for(folder: Path, arm: str) -> list[str]:
    """Hydra overrides that turn smollm2's section into the tiny target."""
    drafter = arm if arm in ("dspark", "dspark_wcs") else "forespark"
    return [
        f"target.model={folder / 'target'}",
        "target.max_model_len=128",
        "target.max_num_seqs=16",
        "target.max_num_batched_tokens=128",
        "target.cpu_kv_cache_gib=1",
        "target.target_layer_ids=[0,1,2]",
        f"drafter.dir={folder / drafter}",
        f"drafter.num_speculative_tokens={K}",
        "drafter.num_layers=2",
        "drafter.selector_rank=4",
        "drafter.selector_top_k=4",
        "drafter.estimator_rank=4",
        "drafter.mask_token_id=0",
        f"train.data=[{folder / 'corpus.jsonl'}]",
        f"run_dir={folder}",
    ]


def configuration_for(folder: Path, arm: str = "forespark", *overrides: str):
    """Configuration of one arm of the tiny target (it borrows smollm2's section)."""
    return configuration.load(
        ["target=smollm2", f"arm={arm}", *overrides_for(folder, arm), *overrides]
    )
