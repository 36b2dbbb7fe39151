"""Hidden states from a vLLM server equal those computed in process (starts an engine)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

MODEL = Path(__file__).resolve().parents[2] / "models" / "smollm2"


@pytest.mark.engine
@pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="run setup.sh first")
def test_server_and_local_states_agree(tmp_path):
    from forespark.config import load
    from forespark.training.run import state_source
    from forespark.training.states import LocalStates, ServerStates

    config = load(
        [
            "target=smollm2", f"target.model={MODEL}", f"run_dir={tmp_path}", "serve.port=8123",
            "target.max_model_len=256", "target.max_num_batched_tokens=256",
            "target.max_num_seqs=4", "target.cpu_kv_cache_gib=1", "train.hidden_states=server",
        ]
    )  # fmt: skip
    layers = config.target.target_layer_ids
    local = LocalStates(str(MODEL), layers)
    with state_source(config, None) as url:
        assert url is not None
        server = ServerStates(url, layers)
        for length in (3, 40, 170):
            ids = torch.randint(
                17, 40000, (length,), generator=torch.Generator().manual_seed(length)
            )
            got, want = server.fetch(ids.tolist()).float(), local.fetch(ids.tolist())
            assert got.shape == want.shape == (length, len(layers) + 1, 576)
            # Float32 on both sides through 30 layers: sums in another order stay below 1e-3 of
            # a row's size; another layer or position differs by its whole size.
            error = (got - want).norm(dim=-1) / want.norm(dim=-1)
            assert float(error.max()) < 1e-2 and float(error.mean()) < 1e-3
