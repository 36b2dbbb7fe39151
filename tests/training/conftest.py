"""A tiny target on disk, a corpus of random conversations, and a matching configuration."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

VOCAB = 60


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
        tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="2").save_pretrained(folder)
    return folder


def write_corpus(path: Path, count: int, seed: int = 0, first: int = 0) -> Path:
    rng = random.Random(seed)
    with path.open("a") as out:
        for i in range(first, first + count):
            prompt, answer = rng.randint(2, 6), rng.randint(1, 14)
            row = {
                "id": f"row{i}_gen0", "primary_id": f"row{i}",
                "input_ids": [rng.randrange(VOCAB) for _ in range(prompt + answer)],
                "loss_mask": [0] * prompt + [1] * answer,
            }  # fmt: skip
            out.write(json.dumps(row) + "\n")
    return path


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl", 24)


def tiny_overrides(target: Path, corpus: Path, folder: Path) -> list[str]:
    return [
        "target=smollm2", f"target.model={target}", "target.target_layer_ids=[0,2,3]",
        "target.name=tiny", f"run_dir={folder / 'run'}", f"train.data=['{corpus}']",
        "drafter.num_speculative_tokens=4", "drafter.selector_rank=4",
        "drafter.selector_top_k=4", "drafter.estimator_rank=4", "drafter.mask_token_id=1",
        "train.hidden_states=local", "train.total_seq_len=48", "train.max_anchors=8",
        "train.loss_vocab=20", "train.loss_vocab_samples=8", "train.max_steps=8",
        "train.checkpoint_every=3", "train.validate_every=100", "train.validation_rows=3",
        "train.validation_fraction=0.2",
    ]  # fmt: skip


@pytest.fixture
def overrides(tiny_target, corpus, tmp_path):
    return tiny_overrides(tiny_target, corpus, tmp_path)


@pytest.fixture
def config(overrides):
    from forespark.config import load

    return load(overrides)
