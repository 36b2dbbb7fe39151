"""Scheduling and drafting of an engine, without vLLM's engine: real code, tiny made-up model.

``SmallEngine`` holds a real speculator, planner, budget manager and step meter, on a CPU or
on a pretended GPU, and stands in for the rest of a step: which requests are in the batch,
the target's hidden states, and how many drafts are accepted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pretend_gpu
import torch

from forespark.fore_d.costs import CostTables
from forespark.fore_d.survival import entries
from forespark.models.estimators import PostDraftEstimator, PreDraftEstimator
from forespark.serving.conv import BlockOffsets
from forespark.serving.estimate import Estimators
from forespark.serving.planner import Planner
from forespark.serving.ranks import Ranks

K, SLOTS, WIDTH, RANK, CANDIDATES, VOCAB = 4, 8, 16, 8, 4, 32
TOKENS, CONTEXT, BLOCK, MASK = 128, 256, 16, 31
SETTINGS = {
    "arm": "forespark", "draft": "planned", "verify": "adaptive", "price_other": True,
    "force_length": None, "prior_acceptance": 0.6, "split": "host", "trace": None,
    "trace_detail": False,
}  # fmt: skip


def prices() -> CostTables:
    return CostTables(
        [1, 16, 64], [0.2, 0.6, 2.0], [1, SLOTS], [0, K], [[8.0, 8.4], [9.0, 13.0]],
        [1, SLOTS], [0.3, 0.5],
    )  # fmt: skip


class SmallEngine:
    """See the module docstring.

    Args:
        device: ``cpu`` or ``cuda`` (inside ``pretend_gpu``).
        ranks: the speculator's ranks.
        noise: added to every weight of the estimators and the drafter, as another rank's
            rounding would.
        drawn: drafts are sampled, and their distribution kept for rejection sampling.
        split: where a planned total becomes lengths, ``host`` or ``device``.
    """

    def __init__(
        self,
        device: str,
        ranks: Ranks | None = None,
        noise: float = 0.0,
        drawn: bool = False,
        split: str = "host",
    ) -> None:
        self.split = split
        self.device = pretend_gpu.DEVICE if device == "cuda" else torch.device("cpu")
        self.rng = torch.Generator().manual_seed(5)
        self.other = torch.Generator().manual_seed(99)
        self.noise = noise
        self.live: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.log: list[dict[str, Any]] = []
        self.states = self._states()
        self.speculator = self._speculator(ranks or Ranks(), drawn)
        self.manager = self._manager()
        self.speculator.manager = self.manager
        self.meter = self._meter()

    @property
    def planner(self) -> Planner:
        return self.speculator.planner

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` on the engine's device, without anybody waiting."""
        return pretend_gpu.OnGpu(values) if self.device.type == "cuda" else values

    def _weights(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=self.rng) * scale
        return self.put(values + self.noise * torch.randn(*shape, generator=self.other))

    def _states(self) -> SimpleNamespace:
        return SimpleNamespace(
            max_num_reqs=SLOTS, num_speculative_steps=K, device=self.device,
            max_num_batched_tokens=TOKENS, req_id_to_index=self.live,
            num_computed_tokens_np=np.zeros(SLOTS, np.int64),
            prefill_len=SimpleNamespace(np=np.zeros(SLOTS, np.int64)),
        )  # fmt: skip

    def _estimators(self) -> Estimators:
        pre, post = PreDraftEstimator(K, WIDTH, WIDTH, RANK), PostDraftEstimator(WIDTH, RANK)
        for module in (*pre.modules(), *post.modules()):
            for name, value in module._parameters.items():
                if value is not None:
                    module._parameters[name] = self._weights(*value.shape, scale=0.7)
        size = entries(K, "triangle")
        made = Estimators(
            pre, post, K, "triangle", self.put(torch.ones(size)), self.put(torch.zeros(size)),
            self.put(torch.ones(K)), prices(),
        )  # fmt: skip
        made._norm = (self.put(torch.ones(WIDTH)), 1e-6)
        projection = self._weights(WIDTH, RANK)
        made._selector = SimpleNamespace(
            hidden_projection=lambda hidden: hidden @ projection,
            predecessor_codebook=self._weights(VOCAB, RANK),
            successor_codebook=self._weights(VOCAB, RANK),
        )
        return made

    def _model(self) -> SimpleNamespace:
        embedding, head = self._weights(VOCAB, WIDTH), self._weights(WIDTH, VOCAB)

        def candidates(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            unary, ids = (hidden @ head).topk(CANDIDATES, dim=-1)
            return ids, unary

        return SimpleNamespace(
            combine_hidden_states=lambda states: states,
            precompute_and_store_context_kv=lambda *_: None,
            compute_candidates=candidates,
            model=SimpleNamespace(embed_tokens=lambda tokens: embedding[tokens]),
        )

    def _speculator(self, ranks: Ranks, drawn: bool) -> Any:
        from forespark.serving.speculator import ForeSparkSpeculator

        made = object.__new__(ForeSparkSpeculator)
        device, zeros = self.device, self._zeros
        estimators = self._estimators()
        model = self._model()
        places = self._weights(K + 1, WIDTH)
        offsets = BlockOffsets(TOKENS, device)
        buffers = SimpleNamespace(
            input_ids=zeros(TOKENS, dtype=torch.int32), positions=zeros(TOKENS),
            query_start_loc=zeros(SLOTS + 1, dtype=torch.int32),
            seq_lens=zeros(SLOTS, dtype=torch.int32),
        )  # fmt: skip

        def run_model(num_tokens: int, *_: Any) -> torch.Tensor:
            ids = buffers.input_ids[:num_tokens].to(torch.int64)
            return model.model.embed_tokens(ids) + places[offsets.rows[:num_tokens]]

        table = torch.arange(1, 1 + SLOTS * CONTEXT // BLOCK, dtype=torch.int32).view(SLOTS, -1)
        attributes = SimpleNamespace(
            ranks=ranks, estimators=estimators, model=model, offsets=offsets,
            planner=Planner(
                SLOTS, K, estimators.costs, SETTINGS, device, lockstep=ranks.size > 1
            ),
            host_split=self.split == "host", estimates_first=True, last=None,
            online=None, max_model_len=CONTEXT,
            num_speculative_steps=K, num_query_per_req=K + 1, parallel_drafting_token_id=MASK,
            draft_kv_cache_group_ids=[0], _layer_group_idx=None, _group_causal=None,
            block_tables=SimpleNamespace(
                input_block_tables=[self.put(table)], kernel_block_sizes=[BLOCK],
                slot_mappings=zeros(1, TOKENS),
            ),
            input_buffers=buffers, temperature=zeros(SLOTS, dtype=torch.float32),
            seeds=zeros(SLOTS), draft_logits=None, dtype=torch.float32,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[]),
            _build_attn_metadata=lambda **_: {}, _run_model=run_model,
        )  # fmt: skip
        if drawn:
            attributes.draft_logits = zeros(SLOTS, K, VOCAB, dtype=torch.float32)
            attributes._cached_candidate_ids = zeros(SLOTS, K, CANDIDATES)
        for name, value in vars(attributes).items():
            setattr(made, name, value)
        return made

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def _manager(self) -> Any:
        from forespark.serving.manager import BudgetManager

        start = self.speculator.input_buffers.query_start_loc.clone()
        return BudgetManager(self.planner, self.states, start, 1, 10_000)

    def _meter(self) -> Any:
        from forespark.serving.meter import StepMeter

        runner = SimpleNamespace(
            num_speculative_steps=K, device=self.device, speculator=self.speculator,
            adaptive_verification=self.manager, req_states=self.states,
            draft_tokens_handler=SimpleNamespace(req_ids=[]),
        )  # fmt: skip
        made = StepMeter(runner, SETTINGS)
        made.steps = []
        return made

    def add(self, name: str, slot: int, prompt: int = 6) -> None:
        """Admit a request."""
        assert slot not in self.live.values()
        self.live[name], self.computed[name] = slot, 0
        self.states.prefill_len.np[slot] = prompt
        self.manager.add_request(slot)

    def remove(self, name: str) -> None:
        """Finish, abort or preempt a request; its slot is free."""
        del self.live[name], self.computed[name]

    @torch.inference_mode()
    def step(self, chunk: int = 6, offered: int = K) -> dict[str, Any]:
        """One engine step over every live request.

        Args:
            chunk: prompt tokens of a request in one step.
            offered: drafts of a decoding request that the scheduler counts on.
        """
        self.meter.step_starts()
        names = list(self.live)
        slots = np.array([self.live[name] for name in names])
        prefill = self.states.prefill_len.np[slots]
        computed = np.array([self.computed[name] for name in names])
        plain = np.where(computed < prefill, np.minimum(prefill - computed, chunk), 1)
        scheduled = np.where(computed >= prefill, offered, 0)
        drafts = {n: [0] * int(s) for n, s in zip(names, scheduled, strict=True) if s}
        self.states.num_computed_tokens_np[slots] = computed
        mapping = self.put(torch.from_numpy(slots.astype(np.int32)))
        per_request = dict(zip(names, (plain + scheduled).tolist(), strict=True))
        budget, verified = 0, self._zeros(len(names))
        start = self._zeros(len(names) + 1, dtype=torch.int32)
        if drafts:
            self.manager.get_num_tokens(per_request, drafts)
            _, start, budget = self.manager.reallocate_drafts(names, mapping)
            start, verified = start[: len(names) + 1], self.manager.verified
        else:
            torch.cumsum(self.put(torch.from_numpy(plain)), 0, out=start[1:])
        tokens = int(plain.sum()) + budget
        batch = self._batch(names, slots, plain, scheduled, prefill, computed, tokens, start)
        batch.idx_mapping, batch.num_draft_tokens = mapping, budget
        luck = self.put(torch.rand(len(names), generator=self.rng))
        done = computed + plain >= prefill
        accepted = (verified * luck).floor().to(torch.int64)
        sampled = torch.where(self.put(torch.from_numpy(done)), accepted + 1, 0)
        rejected = (verified - accepted).to(torch.int32)
        self.meter.sampled(batch, sampled, rejected)
        self.meter.draft_starts()
        drafted = self._propose(batch, sampled, rejected)
        self.meter.draft_ends()
        self.meter.runner.draft_tokens_handler.req_ids = names
        self.meter.step_ends()
        for name, count in zip(names, plain, strict=True):
            self.computed[name] += int(count)
        last = self.speculator.last
        self.log.append(
            {"B": budget, "lengths": held(last.lengths).tolist(), "verified": verified,
             "tokens": drafted, "survival": last.survival}
        )  # fmt: skip
        return self.log[-1]

    def _batch(
        self, names, slots, plain, scheduled, prefill, computed, tokens, start
    ) -> SimpleNamespace:
        return SimpleNamespace(
            req_ids=names, num_reqs=len(names), idx_mapping_np=slots, num_tokens=tokens,
            num_scheduled_tokens=(plain + scheduled).astype(np.int32),
            num_draft_tokens_per_req=scheduled, prefill_len_np=prefill,
            num_computed_tokens_np=computed, is_prefilling_np=computed < prefill,
            seq_lens_cpu_upper_bound=torch.from_numpy(computed + plain + scheduled + 8),
            query_start_loc=start, positions=self.put(torch.arange(tokens) + 3),
        )  # fmt: skip

    def _propose(self, batch: Any, sampled: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        states = torch.randn(batch.num_tokens, WIDTH, generator=self.rng)
        anchors = torch.randint(0, VOCAB - 1, (SLOTS, 1), generator=self.rng)
        heat = torch.tensor([0.0, 1.0] * (SLOTS // 2))
        return self.speculator.propose(
            batch, None, None, None, [self.put(states)], sampled, rejected, self.put(anchors),
            self.put(anchors.view(1, -1)), self.put(heat), self.put(torch.arange(SLOTS)),
        )  # fmt: skip


def held(values: torch.Tensor) -> torch.Tensor:
    """Values of a tensor, also of one on a pretended GPU."""
    return values.held if isinstance(values, pretend_gpu.OnGpu) else values


def life(engine: SmallEngine, steps: int = 8) -> list[dict[str, Any]]:
    """Requests come in chunks, decode, finish, and leave slots to others."""
    engine.add("a", 3)
    engine.add("b", 1, prompt=14)
    for index in range(steps):
        engine.step()
        if index == 2:
            engine.add("c", 0)
            engine.remove("a")
        if index == 3:
            engine.add("d", 3)  # a's old slot
    engine.meter.drain()
    return engine.log
