"""Estimator shapes and their files: a round trip, and every refusal names the remedy."""

from __future__ import annotations

import json

import pytest
import torch

from forespark.models.estimators import (
    HeadsMeta,
    PostDraftEstimator,
    PreDraftEstimator,
    load_heads,
    row_slice,
    save_heads,
)
from forespark.record import file_sha256

K, HIDDEN, EMBED, RANK, SELECTOR = 4, 10, 6, 3, 5


@pytest.fixture(params=["triangle", "row"])
def saved(request, tmp_path):
    torch.manual_seed(0)
    pre = PreDraftEstimator(K, HIDDEN, EMBED, RANK, request.param, embed_scale=7.0)
    post = PostDraftEstimator(HIDDEN, SELECTOR)
    with torch.no_grad():
        for parameter in [*pre.parameters(), *post.parameters()]:
            parameter.normal_()
    drafter = tmp_path / "model.safetensors"
    drafter.write_bytes(b"weights")
    meta = HeadsMeta(
        target="tiny", num_speculative_tokens=K, hidden_size=HIDDEN, embed_size=EMBED, rank=RANK,
        selector_rank=SELECTOR, drafter_sha256=file_sha256(drafter), form=request.param,
    )  # fmt: skip
    save_heads(tmp_path / "forespark", pre, post, meta)
    return tmp_path, pre, post


def test_rows_of_the_triangle():
    assert [(row_slice(d).start, row_slice(d).stop) for d in (1, 2, 3)] == [(0, 1), (1, 3), (3, 6)]


def test_round_trip_gives_the_same_logits(saved):
    folder, pre, post = saved
    pre2, post2, meta = load_heads(
        folder / "forespark", drafter=folder / "model.safetensors", num_speculative_tokens=K,
        target="tiny",
    )  # fmt: skip
    c, e, h, s = (torch.randn(3, n) for n in (HIDDEN, EMBED, HIDDEN, SELECTOR))
    # The embedding scale is folded into W_e: same product, one rounding apart.
    torch.testing.assert_close(pre2(c, e), pre(c, e), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(post2(h, s), post(h, s))
    assert pre2.row(pre2(c, e), 2).shape == (3, 2) and meta.form == pre.form
    with pytest.raises(ValueError, match=r"want 1\.\.4"):
        pre2.row(pre2(c, e), 5)


@pytest.mark.parametrize(
    ("kwargs", "what"), [({"num_speculative_tokens": 7}, "4, want 7"), ({"target": "x"}, "'x'")]
)
def test_mismatch_is_refused(saved, kwargs, what):
    with pytest.raises(ValueError, match=what):
        load_heads(saved[0] / "forespark", **kwargs)


def test_another_drafter_is_refused(saved):
    (saved[0] / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ValueError, match="another drafter"):
        load_heads(saved[0] / "forespark", drafter=saved[0] / "model.safetensors")


def test_damage_is_refused(saved):
    folder = saved[0] / "forespark"
    weights = (folder / "heads.safetensors").read_bytes()
    (folder / "heads.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="corrupt or truncated"):
        load_heads(folder)
    (folder / "heads.safetensors").write_bytes(weights)
    raw = json.loads((folder / "heads.json").read_text())
    (folder / "heads.json").write_text(json.dumps({**raw, "rank": RANK + 1}))
    with pytest.raises(ValueError, match="shapes"):
        load_heads(folder)
    (folder / "heads.json").write_text("{")
    with pytest.raises(ValueError, match="corrupt or truncated"):
        load_heads(folder)
    (folder / "heads.json").unlink()
    with pytest.raises(ValueError, match=r"train\.py"):
        load_heads(folder)
