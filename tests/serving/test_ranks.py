"""Ranks that see different numbers hold the same schedule, and none waits for ever."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pretend_gpu
import pytest
import small_engine
import torch
import torch.distributed as dist

from forespark.serving.ranks import Ranks, check_parallel

ROOT = Path(__file__).resolve().parents[2]


class Wire:
    """One rank after the other: what rank 0 sends is kept for the rank that runs later."""

    def __init__(self, monkeypatch):
        self.messages: list[torch.Tensor] = []
        self.rank = 0
        monkeypatch.setattr(dist, "broadcast", self._broadcast)

    def _broadcast(self, tensor, src, group):
        assert src == 0
        if self.rank == 0:
            self.messages.append(tensor.clone())
        else:
            tensor.copy_(self.messages.pop(0))

    def as_rank(self, rank: int) -> Ranks:
        self.rank = rank
        ranks = Ranks()
        ranks.size, ranks.rank = 2, rank
        return ranks


@pytest.fixture
def wire(monkeypatch):
    return Wire(monkeypatch)


def test_one_rank_sends_nothing(wire):
    ranks = Ranks()
    ranks.share(torch.ones(2))
    assert ranks.from_first(lambda: [1]) == [1]
    assert wire.messages == []


def test_a_message_carries_tensors_of_any_type_and_layout(wire):
    def tensors(offset):
        wide = torch.arange(6).view(2, 3) + offset
        return [
            (torch.arange(3) + offset).to(torch.int32), wide.T, torch.rand(2, 2) + offset,
            torch.tensor([offset > 0, True, False]), torch.zeros(0, 4),
        ]  # fmt: skip

    first, other = tensors(100), tensors(0)
    wire.as_rank(0).share(*first)
    assert len(wire.messages) == 1
    wire.as_rank(1).share(*other)
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_tables_are_those_of_rank_0_and_so_is_the_refusal(wire):
    assert wire.as_rank(0).from_first(lambda: {"ms": [1.5]}) == {"ms": [1.5]}
    assert wire.as_rank(1).from_first(lambda: pytest.fail("read its own")) == {"ms": [1.5]}

    def refuse():
        raise ValueError("made for another GPU")

    for rank in (0, 1):
        with pytest.raises(ValueError, match="made for another GPU"):
            wire.as_rank(rank).from_first(refuse)


@pytest.mark.parametrize("kind", ["data", "pipeline", "prefill_context", "decode_context"])
def test_only_tensor_parallelism_is_served(kind):
    kinds = ("tensor", "data", "pipeline", "prefill_context", "decode_context")
    sizes = {f"{name}_parallel_size": 1 for name in kinds} | {"tensor_parallel_size": 8}
    check_parallel(SimpleNamespace(**sizes), "forespark")
    sizes[f"{kind}_parallel_size"] = 2
    with pytest.raises(ValueError, match=f"{kind}_parallel_size=2, want 1"):
        check_parallel(SimpleNamespace(**sizes), "forespark")


@pytest.mark.parametrize("drawn", [False, True])
def test_the_speculator_holds_rank_0s_scores_and_drafts(monkeypatch, wire, drawn):
    """Real steps of two ranks whose weights differ by noise: every length and budget alike."""
    from forespark.serving import speculator  # noqa: F401  (loads vLLM before torch is patched)

    monkeypatch.setattr(torch.cuda, "Event", pretend_gpu.Event)
    monkeypatch.setattr(torch.cuda, "Stream", pretend_gpu.Stream)

    def run(rank, noise):
        ranks = wire.as_rank(rank) if rank is not None else None
        engine = small_engine.SmallEngine("cpu", ranks, noise, drawn)
        return small_engine.life(engine), engine

    (first, one), (second, two) = run(0, 0.0), run(1, 0.3)
    alone, _ = run(None, 0.3)
    assert wire.messages == [], "both ranks sent and took the same messages"
    assert [step["lengths"] for step in alone] != [step["lengths"] for step in first]
    for a, b in zip(first, second, strict=True):
        assert a["lengths"] == b["lengths"] and a["B"] == b["B"]
        for name in ("verified", "tokens", "survival"):
            assert torch.equal(a[name], b[name]), name
    if drawn:
        assert torch.equal(one.speculator.draft_logits, two.speculator.draft_logits)


def test_acceptance_is_that_of_rank_0(wire):
    from forespark.serving import runner

    def sample(rank, tokens, sampled):
        output = SimpleNamespace(sampled_token_ids=torch.tensor([tokens]))
        counts = torch.tensor([sampled], dtype=torch.int32), torch.tensor([3 - sampled])
        worker = SimpleNamespace(speculator=SimpleNamespace(ranks=wire.as_rank(rank)))
        return runner._sample(lambda *_: (output, *counts), worker, None, None, None)

    sample(0, [7, 8, 9], 3)
    output, sampled, rejected = sample(1, [7, 5, 0], 2)
    assert output.sampled_token_ids.tolist() == [[7, 8, 9]]
    assert sampled.tolist() == [3] and rejected.tolist() == [0]


def test_processes_agree_step_by_step():
    """Two and four gloo ranks (``scripts/bench/rank_drill.py``; 10,000 steps are run there)."""
    drill = _drill()
    common = {"share": True, "seed": 1}
    good = [
        {**common, "ranks": 2, "steps": 80, "late": False, "lockstep": True},
        {**common, "ranks": 4, "steps": 60, "late": True, "lockstep": True},
    ]
    bad = [
        {**common, "ranks": 2, "steps": 40, "late": False, "lockstep": True, "share": False},
        {**common, "ranks": 2, "steps": 40, "late": True, "lockstep": False},
    ]
    found = drill.drill(good + bad)
    assert [one["differing"] for one in found[:2]] == [0, 0]
    assert all(one["differing"] > 0 for one in found[2:]), "the drill cannot fail"


def _drill():
    path = ROOT / "scripts" / "bench" / "rank_drill.py"
    spec = importlib.util.spec_from_file_location("rank_drill", path)
    module = importlib.util.module_from_spec(spec)
    # Under its own name: the processes it starts must find it again.
    sys.path.insert(0, str(path.parent))
    sys.modules["rank_drill"] = module
    spec.loader.exec_module(module)
    return module
