"""The pretended GPU finds every way of waiting that it claims to find."""

import pretend_gpu
import pytest
import torch

GPU = "cuda:0"
WAITING = {
    "item": lambda t: t.sum().item(),
    "int": lambda t: int(t[0]),
    "bool": lambda t: bool(t.any()),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "numpy": lambda t: t.numpy(),
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 1),
    "mask": lambda t: t[t > 1],
    "mask assignment": lambda t: t.__setitem__(t > 1, t[:1]),
    "masked_select": lambda t: t.masked_select(t > 1),
    "unique": lambda t: t.unique(),
    "equal": lambda t: torch.equal(t, t),
    "repeat_interleave": lambda t: torch.repeat_interleave(t, t.long()),
    "scalar index": lambda t: t[t.argmax() : 2],
    "upload": lambda t: torch.ones(3).to(GPU),
    "unpinned upload": lambda t: torch.ones(3).to(GPU, non_blocking=True),
    "copy from host": lambda t: t.copy_(torch.ones(4)),
    "download to unpinned": lambda t: torch.zeros(4).copy_(t, non_blocking=True),
    "host operand": lambda t: t + torch.ones(4),
}


@pytest.mark.parametrize("how", WAITING)
def test_waiting_is_found(monkeypatch, how):
    with pretend_gpu.pretend_gpu(monkeypatch):
        values = torch.arange(4.0, device=GPU)
        with pytest.raises((pretend_gpu.Waited, RuntimeError, TypeError)) as caught:
            WAITING[how](values)
    assert how in ("numpy", "tolist") or isinstance(caught.value, pretend_gpu.Waited), caught.value


def test_asynchronous_work_is_let_through_and_computes(monkeypatch):
    with pretend_gpu.pretend_gpu(monkeypatch), torch.inference_mode():
        values = torch.arange(4.0, device=GPU)
        assert values.is_cuda and values.device.type == "cuda"
        rows = torch.repeat_interleave(values, torch.full((4,), 2, device=GPU), output_size=8)
        rows[:2].fill_(7)
        rows[torch.full((1,), 3, device=GPU)] = -1.0
        total = torch.zeros(9, device=GPU)
        torch.cumsum(rows, 0, out=total[1:])
        pinned = torch.zeros(9, pin_memory=True)
        pinned.copy_(total, non_blocking=True)
        again = total.to("cpu", non_blocking=True)
    assert pinned.tolist() == again.tolist() == [0, 7, 14, 15, 14, 16, 18, 21, 24]
