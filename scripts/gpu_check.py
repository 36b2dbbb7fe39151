"""Kernels against their plain forms at real sizes, with times; called by gpu_check.sh.

One drafting step is put together from the kernels alone: scores, split, input preparation,
convolution, selector walk, survival, distribution of B. It is run for several totals in one
set of buffers, large before small, on a GPU by replaying one captured graph; after each run
every stage's result is compared with what its plain form makes, on the CPU, of the same
arguments. Then each kernel is timed alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forespark import record
from forespark.fore_d import envelope, kernels, split, survival
from forespark.serving import conv, packed, selector
from forespark.serving.kernels import conv as conv_kernels
from forespark.serving.kernels import queries as queries_kernels
from forespark.serving.kernels import walk as walk_kernels

REAL = {"requests": [1, 192, 512, 2048], "K": 15, "D": 5120, "groups": 40, "taps": 4, "C": 16,
        "rank": 256, "V": 151_936, "blocks": 64}  # fmt: skip
TINY = {"requests": [1, 5], "K": 3, "D": 12, "groups": 3, "taps": 2, "C": 4, "rank": 5, "V": 40,
        "blocks": 8}  # fmt: skip
BLOCK, MAX_LEN = 16, 900
# Positions whose candidates tie within rounding may be chosen otherwise, and then the rest of
# that draft differs. Everything else must agree everywhere.
ALLOWED = {"walk": 1e-3}
TOLERANCE = {"conv": (0.2, 0.02), "walk": (2e-3, 1e-4)}  # bfloat16 rounding; sums of `rank` terms
JITTED = [
    (kernels, "_scores_kernel"), (kernels, "_top_prefix_kernel"),
    (kernels, "_post_survival_kernel"), (queries_kernels, "_queries_kernel"),
    (conv_kernels, "_grouped_conv_kernel"), (walk_kernels, "_walk_kernel"),
]  # fmt: skip


def filled(prepare: Callable[..., packed.Blocks]) -> Callable[..., dict[str, torch.Tensor]]:
    """Input preparation as a function that hands back all it wrote."""

    def call(lengths, anchors, tokens, drafts, K, buffers, groups):
        blocks = prepare(lengths, anchors, tokens, drafts, K, buffers, groups)
        return {
            **vars(blocks),
            "input_ids": buffers.input_ids[:tokens],
            "positions": buffers.positions[:tokens],
            "query_start_loc": buffers.query_start_loc,
            "seq_lens": buffers.seq_lens,
            "slots": groups[0].slots[:tokens],
        }

    return call


def plain_walk(inputs, linear, bias, seeds, position):
    step = torch.arange(len(linear))
    request = torch.repeat_interleave(torch.arange(len(inputs.lengths)), inputs.lengths)
    request = torch.nn.functional.pad(request, (0, len(linear) - len(request)))
    at = position[request] + 1 + step - inputs.first[request]
    inputs.noise = selector.draft_noise(seeds[request], at, inputs.candidate_ids)
    out = selector.walk(inputs, int(inputs.lengths.max()))
    count = int(inputs.lengths.sum())  # rows after it are padding, which the kernel leaves 0
    logits = torch.where(torch.arange(len(linear)) < count, linear + out.confidence + bias, 0.0)
    return out, logits


KERNELS: dict[str, Callable[..., Any]] = {
    "scores": kernels.scores_kernel,
    "split": kernels.top_prefix_kernel,
    "queries": filled(queries_kernels.prepare_queries_kernel),
    "conv": conv_kernels.grouped_conv_kernel,
    "walk": walk_kernels.walk_kernel,
    "survival": kernels.post_survival_kernel,
    "distribute": kernels.top_prefix_kernel,
}
PLAIN: dict[str, Callable[..., Any]] = {
    "scores": envelope.scores_from_logits,
    "split": lambda g, limits, total: split.top_prefix(g, limits, int(total)),
    "queries": filled(packed.prepare_queries),
    "conv": conv.grouped_conv,
    "walk": plain_walk,
    "survival": survival.post_survival,
    "distribute": lambda s, limits, total: split.top_prefix(s, limits, int(total)),
}


class Step:
    """One drafting step of ``n`` requests over persistent buffers.

    Attributes:
        total, budget: [1], what the host planned; read by the kernels.
        calls: stage -> arguments of its last call; results: stage -> what it returned.
    """

    def __init__(self, n: int, size: dict[str, Any], device: str) -> None:
        rng = torch.Generator().manual_seed(n)
        K, D, rank = size["K"], size["D"], size["rank"]

        def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*shape, generator=rng).to(device, dtype)

        def integers(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(1, high, shape, generator=rng).to(device)

        def empty(length: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(length, dtype=dtype, device=device)

        self.n, self.size, self.device = n, size, device
        self.tokens, self.drafts = n * (K // 2 + 2), n * (K // 2 + 1)  # bounds for all totals
        T = K * (K + 1) // 2
        self.z, self.scale, self.bias = normal(n, T) + 1, normal(T).abs() + 0.5, normal(T) / 4
        self.limits = integers(K + 1, n)
        self.total, self.budget = empty(1), empty(1)
        self.anchors = packed.Anchors(empty(n), integers(MAX_LEN, n), integers(size["V"], n))
        self.buffers = packed.QueryBuffers(
            empty(self.tokens, torch.int32), empty(self.tokens), empty(n + 1, torch.int32),
            empty(n, torch.int32), empty(self.tokens), 0, MAX_LEN,
        )  # fmt: skip
        table = integers(1000, n, size["blocks"]).to(torch.int32)
        self.groups = [packed.CacheGroup(table, BLOCK, empty(self.tokens))]
        half = torch.bfloat16
        self.embedding = normal(size["V"] if D < 64 else 1024, D, dtype=half)
        self.delta = normal(self.tokens, size["taps"], size["groups"], dtype=half)
        self.base = normal(size["taps"], D, dtype=half)
        self.candidates = integers(size["V"], self.drafts, size["C"])
        self.unary = normal(self.drafts, size["C"])
        self.codebooks = [normal(size["V"], rank, dtype=half) for _ in range(2)]
        self.weight, self.post_bias = normal(rank) / 16, normal(1)
        self.theta = normal(K).abs() + 0.5
        self.temperature = torch.arange(n, device=device) % 2 * 0.7  # every other one is greedy
        self.seeds = integers(2**40, n)
        self.calls: dict[str, tuple[Any, ...]] = {}
        self.results: dict[str, Any] = {}

    def stage(self, forms: dict[str, Callable[..., Any]], name: str, *arguments: Any) -> Any:
        self.calls[name] = arguments
        self.results[name] = forms[name](*arguments)
        return self.results[name]

    def run(self, forms: dict[str, Callable[..., Any]]) -> None:
        """All stages; waits for nothing, so it may be captured."""
        K, rank = self.size["K"], self.size["rank"]
        g, _ = self.stage(forms, "scores", self.z, self.scale, self.bias, K)
        lengths = self.stage(forms, "split", g, self.limits, self.total)
        made = self.stage(
            forms, "queries", lengths, self.anchors, self.tokens, self.drafts, K, self.buffers,
            self.groups,
        )  # fmt: skip
        embedded = self.embedding[made["input_ids"] % self.embedding.shape[0]]
        hidden = self.stage(forms, "conv", embedded, self.delta, self.base, made["offset"])
        rows = hidden[made["draft_token"]].float()
        inputs = selector.WalkInputs(
            candidate_ids=self.candidates, unary=self.unary,
            hidden=rows.repeat(1, -(-rank // rows.shape[1]))[:, :rank].contiguous(),
            first=torch.cumsum(lengths, 0) - lengths, lengths=lengths,
            anchor=self.anchors.token, predecessor=self.codebooks[0],
            successor=self.codebooks[1], weight=self.weight, temperature=self.temperature,
        )  # fmt: skip
        linear = rows.mean(dim=1)
        _, logits = self.stage(
            forms, "walk", inputs, linear, self.post_bias, self.seeds, self.anchors.position
        )
        # Draft entries past the sum of lengths go to a place of their own.
        entry = torch.arange(self.drafts, device=self.device)
        place = made["draft_request"] * K + made["draft_step"]
        place = torch.where(entry < lengths.sum(), place, self.n * K)
        flat = torch.zeros(self.n * K + 1, device=self.device).scatter_(0, place, logits)
        alive, _ = self.stage(forms, "survival", flat[:-1].view(self.n, K), self.theta, lengths)
        self.stage(forms, "distribute", alive, lengths, self.budget)

    def plan(self, total: int) -> None:
        self.total.fill_(total)
        self.budget.fill_(total // 2)

    def totals(self) -> list[int]:
        """Large before small, none, then large again: what is left behind would show."""
        most = min(int(self.limits.sum()), self.drafts)
        return [most, most // 3, 1, 0, most - 1]


def on_cpu(value: Any) -> Any:
    """A copy whose tensors are on the CPU, through containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, list | tuple):
        return type(value)(on_cpu(part) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: on_cpu(getattr(value, part.name)) for part in dataclasses.fields(value)}
        return type(value)(**parts)
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return tensors(list(vars(value).values()))
    if isinstance(value, dict):
        return tensors(list(value.values()))
    return [found for part in value for found in tensors(part)]


def compare(step: Step, total: int) -> list[dict[str, Any]]:
    """One row per stage: share of entries that differ from the plain form, largest error."""
    rows = []
    for name, arguments in step.calls.items():
        got = [part.cpu() for part in tensors(step.results[name])]
        want = tensors(PLAIN[name](*on_cpu(arguments)))
        differ, entries, largest = 0, 0, 0.0
        atol, rtol = TOLERANCE.get(name, (2e-6, 2e-5))
        for ours, plain in zip(got, want, strict=True):
            if plain.is_floating_point():
                error = (ours.double() - plain.double()).abs()
                wrong = ~(error <= atol + rtol * plain.double().abs())
                largest = max(largest, float(error.max()) if error.numel() else 0.0)
            else:
                wrong = ours != plain
            differ, entries = differ + int(wrong.sum()), entries + wrong.numel()
        share = differ / max(entries, 1)
        rows.append({
            "stage": name, "requests": step.n, "total": total, "entries": entries,
            "differing": share, "largest_error": largest, "ok": share <= ALLOWED.get(name, 0.0),
        })  # fmt: skip
    return rows


def microseconds(call: Callable[[], Any], device: str, repeats: int = 20) -> list[float]:
    """Sorted times of one call: inside a replayed graph on a GPU, by the clock elsewhere."""
    call()
    if device == "cpu":
        began = time.perf_counter()
        call()
        return [(time.perf_counter() - began) * 1e6]
    graph, inner = captured(lambda: [call() for _ in range(10)]), 10
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / inner)
    return sorted(times)


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of ``call``, whose kernels are compiled before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def measure(size: dict[str, Any], device: str) -> dict[str, Any]:
    """Comparisons and times of every batch size."""
    compared, times = [], []
    for n in size["requests"]:
        step = Step(n, size, device)
        step.plan(step.totals()[0])
        graph = None if device == "cpu" else captured(lambda step=step: step.run(KERNELS))
        for total in step.totals():
            step.plan(total)
            step.run(KERNELS) if graph is None else graph.replay()
            compared.extend(compare(step, total))
        step.plan(4 * n)
        step.run(KERNELS)
        for name, arguments in step.calls.items():
            found = microseconds(lambda f=KERNELS[name], a=arguments: f(*a), device)
            times.append({
                "stage": name, "requests": n, "median_us": statistics.median(found),
                "least_us": found[0], "samples": len(found),
            })  # fmt: skip
        print(f"{n} requests: {sum(row['ok'] for row in compared)} of {len(compared)} agree")
    return {"size": size, "compared": compared, "times": times}


def tested(report: Path | None) -> dict[str, Any] | None:
    """Counts of a pytest report in JUnit's XML, and the names of what failed."""
    if report is None:
        return None
    suite = next(ElementTree.parse(report).iter("testsuite"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return {**counts, "failed": failed}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="tiny sizes, in Triton's interpreter")
    parser.add_argument("--compile", action="store_true", help="compile only; needs no GPU")
    parser.add_argument("--tests", type=Path, help="pytest's JUnit report, to be summed up")
    parser.add_argument("--out", type=Path, required=True, help="the record to write")
    args = parser.parse_args(argv)
    if args.compile:
        from gpu_compile import compile_all

        size, targets = (TINY, (90,)) if args.dry else (REAL, (80, 90))
        rows = compile_all(targets, size, JITTED, Step, KERNELS, PLAIN)
        found: dict[str, Any] = {"compiled": rows}
        good = all(row["ok"] for row in found["compiled"])
    else:
        if not args.dry and not torch.cuda.is_available():
            print("gpu_check: no CUDA device found; try --dry or --compile", file=sys.stderr)
            return 2
        device = "cpu" if args.dry else "cuda"
        found = {"tests": tested(args.tests), **measure(TINY if args.dry else REAL, device)}
        passed = found["tests"] is None or not found["tests"]["failed"]
        good = passed and all(row["ok"] for row in found["compared"])
    mode = "compile" if args.compile else "interpreter" if args.dry else "gpu"
    written = {"schema": record.SCHEMA, "mode": mode, "ok": good, **found}
    record.write_json(args.out, {**written, "provenance": record.provenance()})
    summary = {"ok": good, "record": str(args.out)}
    print(json.dumps(summary))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
