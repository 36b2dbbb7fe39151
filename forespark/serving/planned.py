"""Work-conserving drafting: estimate, split, draft blocks of different lengths, score them.

One ``propose`` does the first three stages of work-conserving speculation (paper,
Section 4) after a verification pass: pre-draft scores from the context feature of the
last accepted token and the anchor's embedding; the host's total split over requests; one
packed drafter pass over ``sum(d_i + 1)`` tokens with the drafter's own choice of tokens and
the post-draft confidence (``speculator.py``: DFlash 2; ``dspark.py``: DSpark). The fourth
stage, spending B, is the budget manager's.

The drafter, its context K/V and the target are vLLM's own; only the layout of the query
batch differs from stock. A prefilling request drafts nothing; a step that drafts
nothing skips the drafter's forward pass but still writes its context K/V.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d

from forespark import record
from forespark.fore_d.split import split
from forespark.fore_d.survival import post_survival
from forespark.serving import packed
from forespark.serving.blocks import PackedBlocks
from forespark.serving.conv import BlockOffsets
from forespark.serving.estimate import Estimators
from forespark.serving.exhaustive import ExhaustivePlanner
from forespark.serving.planner import Planner
from forespark.serving.proposal import Lengths, Proposal, Scored
from forespark.serving.ranks import Ranks, check_parallel

logger = init_logger(__name__)


@dataclass
class Chosen:
    """Drafts of a packed batch; M draft positions.

    Attributes:
        tokens: [M] int64 draft tokens.
        logits: [M] float32 post-draft logits.
        drawn_from: tensors that say what sampled tokens were drawn from; none when greedy.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    drawn_from: tuple[torch.Tensor, ...]


class PlannedDrafting(PackedBlocks):
    """Planned, variable draft lengths for a drafter of the DFlash family.

    A subclass also inherits from vLLM's speculator of its drafter, and chooses the tokens.

    Attributes:
        planner: host totals; also holds the forced length of calibration runs.
        manager: the budget manager, attached once vLLM has built its request states.
        ranks: the tensor-parallel ranks, which hold rank 0's scores and drafts.
        last: the newest proposal (for traces); None before the first.
        splits_on_device: tokens can be chosen by lengths that only the device knows.
    """

    splits_on_device = True

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        settings = vllm_config.additional_config["forespark"]
        check_parallel(vllm_config.parallel_config, settings["arm"])
        self.ranks = Ranks.of_engine()
        # Our own post-draft estimator grades drafts; vLLM's online one stays off.
        self.use_acceptance_estimator = False
        self.settings = settings
        self.estimators = Estimators.load(
            Path(settings["heads"]),
            settings,
            self.num_speculative_steps,
            device,
            engine_key(vllm_config),
            self.ranks,
        )
        searches = settings["search"] == "exhaustive"
        self.planner = (ExhaustivePlanner if searches else Planner)(
            self.max_num_reqs,
            self.num_speculative_steps,
            self.estimators.costs,
            settings,
            device,
            lockstep=self.ranks.size > 1,
        )
        on_gpu = device.type != "cpu"
        self.host_split = settings["split"] == "host" or searches
        self.host_split |= on_gpu and not self.splits_on_device
        self.online = self.estimators.follow(settings["recalibrate"], self.max_num_reqs)
        # Full blocks need no pre-draft estimate, unless somebody shall look at it.
        looked_at = bool(settings["trace_detail"]) or self.online is not None
        self.estimates_first = settings["draft"] == "planned" or looked_at
        self.offsets = BlockOffsets(self.max_num_tokens, device)
        self.manager: Any = None
        self.last: Proposal | None = None

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        if not self.host_split and self.device.type != "cpu" and not self.reads_device_lengths():
            self.host_split = True
            logger.info("the drafter's attention wants draft lengths on the host: split there")

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """No graphs: a packed batch has another shape in every step."""
        super().init_cudagraph_manager(CUDAGraphMode.NONE)

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        self.estimators.attach(self.model, self.dtype)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
    ) -> torch.Tensor:
        """Draft for every request that sampled. Returns tokens [R, K], 0 past each d_i."""
        if dummy_run:
            block = self.num_query_per_req
            self.offsets.set_uniform(min(input_batch.num_reqs * block, self.max_num_tokens), block)
            return super().propose(
                input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states,
                num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds,
                dp_sync=dp_sync, dummy_run=True, skip_attn_for_dummy_run=skip_attn_for_dummy_run,
                mm_inputs=mm_inputs, is_profile=is_profile,
            )  # fmt: skip
        assert aux_hidden_states, "DFlash 2 reads the target's captured layers"
        num_tokens = input_batch.num_tokens
        context = self.model.combine_hidden_states(torch.cat(aux_hidden_states, dim=-1))
        context = context[:num_tokens]
        anchors = packed.find_anchors(
            input_batch.query_start_loc[: input_batch.num_reqs + 1],
            input_batch.positions,
            input_batch.idx_mapping,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
        )
        self._store_context(input_batch, context, num_rejected)
        slots = input_batch.idx_mapping.to(torch.int64)
        if self.online is not None:
            self.online.learn(slots, num_sampled, num_rejected)
        proposal = self._plan_lengths(input_batch, context, anchors)
        if proposal.num_drafts > 0:
            self._draft(input_batch, anchors, proposal, temperature, seeds)
        self.last = proposal
        if self.online is not None:
            assert proposal.scored is not None, "a refit needs the estimate of every step"
            read = self.estimators.read(proposal.scored.logits)
            self.online.remember(slots, proposal.lengths, read, proposal.post_logits)
        self.manager.record_drafts(
            input_batch.idx_mapping,
            input_batch.idx_mapping_np,
            proposal.lengths,
            proposal.survival,
        )
        return proposal.tokens

    def _plan_lengths(
        self, input_batch: Any, context: torch.Tensor, anchors: packed.Anchors
    ) -> Proposal:
        """Score every request, publish the scores to the host, split the planned total."""
        slots = input_batch.idx_mapping_np
        count = input_batch.num_reqs
        samples = (
            input_batch.num_computed_tokens_np[:count] + input_batch.num_scheduled_tokens[:count]
            >= input_batch.prefill_len_np[:count]
        )
        scored = None
        if self.estimates_first:
            scored = self.estimators.before_draft(context[anchors.row], self._embed(anchors.token))
            self.ranks.share(scored.scores)
            self.planner.scores.send(slots, scored.scores)
            if isinstance(self.planner, ExhaustivePlanner):
                self.planner.publish(slots, scored.logits, self.estimators)
        room = self.max_model_len - 2 - input_batch.seq_lens_cpu_upper_bound[:count].numpy()
        limits = np.where(samples, np.clip(room, 0, self.num_speculative_steps), 0)
        # Requests still prefilling bring about as many prompt tokens to the next step.
        prefill = int(input_batch.num_scheduled_tokens[:count][~samples].sum())
        total = self.planner.draft_lengths_total(slots, samples, prefill)
        lengths = self._choose_lengths(slots, limits, total, scored, context.device)
        self.planner.note_drafts(slots, lengths, limits)
        proposal = Proposal.empty(
            lengths, self.num_speculative_steps, scored, self.estimators.pre.form
        )
        counters = self.planner.counters
        counters.drafted, counters.drafter_tokens = proposal.num_drafts, proposal.num_tokens
        if scored is not None:
            self._count_bad(scored.bad)
        return proposal

    def _choose_lengths(
        self,
        slots: np.ndarray,  # [R]
        limits: np.ndarray,  # [R] most that each request can draft, 0 while prefilling
        total: int,
        scored: Scored | None,
        device: torch.device,
    ) -> Lengths:
        """Lengths of the planned total: all alike, or ranked by the host or by the device.

        The host ranks the newest scores that have landed, the device those of this step.
        """
        if self.planner.same_length is not None or self.host_split:
            if self.planner.same_length is not None:
                host = np.minimum(limits, self.planner.same_length).astype(np.int64)
            else:
                host = self.planner.split_on_host(slots, limits, total).astype(np.int64)
            return Lengths.known(host, async_tensor_h2d(host, device=device))
        assert scored is not None, "a plan is made from estimates"
        scores = self.planner.floors.favour(scored.scores)
        chosen = split(scores, total, async_tensor_h2d(limits, device=device))
        if device.type == "cpu":
            return Lengths.known(chosen.numpy(), chosen)
        return Lengths.split_on_device(chosen, limits, total)

    def _count_bad(self, bad: torch.Tensor) -> None:
        if bad.device.type == "cpu":  # elsewhere counting them would wait for the device
            self.planner.counters.bad_estimates += int(bad.sum())

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Raw target embeddings e of the anchors, before any drafter input scale."""
        return self.model.model.embed_tokens(tokens)

    def _draft(
        self,
        input_batch: Any,
        anchors: packed.Anchors,
        proposal: Proposal,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
    ) -> None:
        """One packed drafter pass; fills the proposal's tokens and survival."""
        blocks, slot_mappings, metadata = self._prepare_queries(input_batch, anchors, proposal)
        self.temperature.copy_(temperature)
        self.seeds.copy_(seeds)
        hidden = self._run_model(proposal.num_tokens, metadata, slot_mappings, None)
        chosen = self.choose(
            hidden[blocks.draft_token], input_batch, anchors, blocks, proposal, temperature, seeds
        )
        proposal.post_logits[blocks.draft_request, blocks.draft_step] = chosen.logits
        proposal.survival, bad = post_survival(
            proposal.post_logits, self.estimators.theta, proposal.lengths
        )
        self._count_bad(bad)
        # Rejection sampling compares a drawn token with the distribution it came from.
        self.ranks.share(chosen.tokens, proposal.survival, *chosen.drawn_from)
        proposal.tokens[blocks.draft_request, blocks.draft_step] = chosen.tokens
        self.keep_distribution(input_batch, blocks, chosen)

    @abstractmethod
    def choose(
        self,
        hidden: torch.Tensor,  # [M, d_h] of the draft positions
        input_batch: Any,
        anchors: packed.Anchors,
        blocks: packed.Blocks,
        proposal: Proposal,
        temperature: torch.Tensor,  # by request slot
        seeds: torch.Tensor,
    ) -> Chosen:
        """Draft tokens and their post-draft logits, walked along each draft."""

    @abstractmethod
    def keep_distribution(self, input_batch: Any, blocks: packed.Blocks, chosen: Chosen) -> None:
        """Store what sampled drafts were drawn from, once all ranks have rank 0's."""


def engine_key(vllm_config: VllmConfig) -> dict[str, Any]:
    """LATENCY_KEY fields that the running engine decides."""
    key: dict[str, Any] = {
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "max_num_seqs": vllm_config.scheduler_config.max_num_seqs,
    }
    if vllm_config.device_config.device_type != "cpu":
        # On a CPU the launcher knows the cores; a worker's threads are bound to one each.
        key["device"] = record.device_name()
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    stated = (vllm_config.additional_config["forespark"]["latency_key"] or {}).get("dtype")
    return key if stated == "auto" else {**key, "dtype": dtype}
