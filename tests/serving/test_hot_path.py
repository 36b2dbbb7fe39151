"""A planned step leaves the device alone, and counts only drafts that are still there."""

import numpy as np
import pretend_gpu
import pytest
import small_engine
import torch

COUNTS = ("n", "N", "B", "scheduled", "drafted", "drafter_tokens", "accepted", "prefill")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def vllm():
    """vLLM's modules, loaded before torch pretends anything."""
    from forespark.serving import manager, planned

    return manager, planned


@pytest.fixture
def gpu(monkeypatch, vllm):
    with pretend_gpu.pretend_gpu(monkeypatch) as made:
        for module in vllm:
            monkeypatch.setattr(module, "async_tensor_h2d", made.upload)
        yield made


@pytest.fixture
def split():
    return "host"


@pytest.fixture
def cpu(monkeypatch, split):
    """An engine on a CPU, where waiting costs nothing."""
    monkeypatch.setattr(torch.cuda, "Event", pretend_gpu.Event)
    monkeypatch.setattr(torch.cuda, "Stream", pretend_gpu.Stream)
    return small_engine.SmallEngine("cpu", split=split)


@pytest.mark.parametrize("split", ["host", "device"])
def test_a_planned_step_waits_for_nothing_and_does_what_a_cpu_does(cpu, split, request):
    on_cpu = small_engine.life(cpu)
    request.getfixturevalue("gpu")
    engine = small_engine.SmallEngine("cuda", split=split)
    log = small_engine.life(engine)
    assert sum(sum(step["lengths"]) for step in log) > 10 and sum(step["B"] for step in log) > 5
    for ours, theirs in zip(log, on_cpu, strict=True):
        assert ours["lengths"] == theirs["lengths"] and ours["B"] == theirs["B"]
        assert torch.equal(small_engine.held(ours["tokens"]), theirs["tokens"])
        assert torch.equal(small_engine.held(ours["verified"]), theirs["verified"])
        # Kernel and CPU twin add the same products in another order.
        torch.testing.assert_close(
            small_engine.held(ours["survival"]), theirs["survival"], atol=1e-5, rtol=0
        )
    for ours, theirs in zip(engine.meter.steps, cpu.meter.steps, strict=True):
        if split == "device":  # the host does not know how many requests are drafted at all
            assert ours.pop("drafter_tokens") >= theirs["drafter_tokens"]
        counts = [name for name in COUNTS if name in ours]
        assert [ours[name] for name in counts] == [theirs[name] for name in counts]


def test_nothing_waits_while_no_copy_lands(gpu, monkeypatch):
    """The host plans from the prior, and completes no record, until the device comes along."""
    engine = small_engine.SmallEngine("cuda")
    engine.add("a", 3)
    monkeypatch.setattr(pretend_gpu.Event, "passes", False)
    steps = [engine.step() for _ in range(4)]
    assert sum(sum(step["lengths"]) for step in steps) > 0
    assert not engine.planner.scores.known.any() and engine.meter.steps == []
    monkeypatch.setattr(pretend_gpu.Event, "passes", True)
    engine.step()
    assert engine.planner.scores.known[3]
    assert [row["step"] for row in engine.meter.steps] == [0, 1, 2, 3, 4]
    assert all(row["draft_ms"] == row["verify_ms"] == 1.0 for row in engine.meter.steps)


def test_budget_counts_only_drafts_that_are_still_there(cpu):
    for slot, name in enumerate("abc"):
        cpu.add(name, slot)
    for _ in range(4):
        step = cpu.step()
    lengths = dict(zip("abc", step["lengths"], strict=True))
    assert all(lengths.values()), "every request has drafts to lose"
    cpu.remove("a")  # finished or aborted, after B's drafts were counted on
    cpu.remove("b")
    cpu.add("b", 0, prompt=0)  # preempted; decodes again at once, in the slot of a
    step = cpu.step()
    assert list(cpu.live) == ["c", "b"] and step["verified"][1] == 0
    assert step["B"] == step["verified"][0] <= lengths["c"]
    before = sum(cpu.step()["lengths"])
    step = cpu.step(offered=1)  # the scheduler has room for one draft each
    assert before > 2 >= step["B"] and max(step["verified"].tolist()) <= 1


def test_a_new_request_is_planned_by_the_mean_and_never_by_the_old_ones_estimate(cpu):
    for slot, name in enumerate("ab"):
        cpu.add(name, slot)
    for _ in range(3):
        cpu.step()
    scores = cpu.planner.scores
    assert scores.known[:2].all()
    scores.rows[0] = 77.0  # what the old request of the slot left
    cpu.remove("a")
    cpu.add("n", 0, prompt=0)
    seen = cpu.planner._host_scores(np.array([1, 0]))
    assert seen.max() <= 1 and np.array_equal(seen[0], seen[1])


def test_b_is_filled_though_no_length_has_landed(gpu, monkeypatch):
    """Lengths stay on the device: B keeps to what must still be there when requests leave."""
    monkeypatch.setattr(pretend_gpu.Event, "passes", False)
    engine = small_engine.SmallEngine("cuda", split="device")
    for slot, name in enumerate("abcd"):
        engine.add(name, slot)
    budgets = []
    for index in range(9):
        if index == 5:
            engine.remove("b")
            engine.add("b", 6, prompt=0)  # preempted: another slot, no drafts
        if index == 7:
            engine.remove("a")
        offered = 2 if index == 8 else small_engine.K
        before = sum(engine.log[-1]["lengths"]) if engine.log else 0
        step = engine.step(offered=offered)
        assert small_engine.held(step["verified"]).sum() == step["B"] <= before
        budgets.append(step["B"])
    assert not engine.planner.scores.known.any(), "no copy has landed"
    assert sum(budgets) > 0
