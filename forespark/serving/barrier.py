"""Engine-side decode barrier: prefill a whole batch, then release its decoding at once.

The decode benchmark (paper, Appendix C) prefills C requests, holds every one at its
first token until all C have theirs, and times what follows. A client cannot do that, so
a vLLM scheduler does: start the engine with

    --scheduler-cls forespark.serving.barrier.BarrierScheduler

and send ``"vllm_xargs": {"forespark_barrier": C}`` with each request, so that one server
serves every load; ``additional_config["forespark"]["barrier"]`` is the value for requests
that name none. Requests without a barrier, or with C = 1, are never held.

A batch is every barrier request that arrives before the release; those that come after
it run freely, and the next batch begins once the engine has no request left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.forespark.barrier")

REQUEST_KEY = "forespark_barrier"


class DecodeBarrier:
    """Who is held, and when the batch goes. Knows ids only, so it needs no engine."""

    def __init__(self) -> None:
        self.members: set[str] = set()
        self.size = 0  # C: the largest value that a member asked for
        self.released = False

    def reset(self) -> None:
        """Begin a new batch."""
        self.members.clear()
        self.size = 0
        self.released = False

    def join(self, request_id: str, size: int) -> None:
        """Add an arriving request to the open batch; after the release it runs freely."""
        if self.released or size <= 1:
            return
        self.members.add(request_id)
        self.size = max(self.size, size)

    def holds(self, request_id: str) -> bool:
        return not self.released and request_id in self.members

    def update(self, has_first_token: Callable[[str], bool]) -> None:
        """Release when C members arrived and none still waits for its first token.

        ``has_first_token`` must also be true for a member that is gone: one that ended at
        its first token or was aborted will never have another, so it must not block.
        """
        if self.released or not self.members or len(self.members) < self.size:
            return
        self.released = all(has_first_token(member) for member in self.members)


class _BarrierMixin:
    """Scheduler methods that put ``DecodeBarrier`` in front of vLLM's own schedule."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        additional = getattr(self.vllm_config, "additional_config", None)  # type: ignore[attr-defined]
        options = (additional or {}).get("forespark", {})
        self._default_barrier = options.get("barrier") or 0
        self.barrier = DecodeBarrier()

    def add_request(self, request: Request) -> None:
        if self.get_num_unfinished_requests() == 0:  # type: ignore[attr-defined]
            self.barrier.reset()
        params = request.sampling_params
        asked = (params.extra_args or {}).get(REQUEST_KEY) if params is not None else None
        self.barrier.join(request.request_id, _barrier_size(asked, self._default_barrier))
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.barrier.update(self._has_first_token)
        held = [r for r in self.running if self._is_held(r)]  # type: ignore[attr-defined]
        for request in held:
            # vLLM skips a running request whose next decode lies at a later step (its
            # pipeline-parallel cadence). It adds one to ``current_step`` first, so this
            # skips exactly the coming step and leaves nothing to undo.
            request.next_decode_eligible_step = max(
                request.next_decode_eligible_step,
                self.current_step + 2,  # type: ignore[attr-defined]
            )
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if held and output.total_num_scheduled_tokens == 0 and self._is_stuck():
            logger.warning(
                "decode barrier released early: %d of %d requests hold all of the KV cache or "
                "max_num_seqs, so the others cannot be prefilled beside them. Lower the load, "
                "or raise --max-num-seqs or the KV cache.",
                len(held),
                self.barrier.size,
            )
            self.barrier.released = True
        return output

    def _is_held(self, request: Request) -> bool:
        # Only decoding is held: a prompt still being prefilled in chunks must go on.
        prefilled = request.num_computed_tokens >= request.num_prompt_tokens
        return prefilled and self.barrier.holds(request.request_id)

    def _has_first_token(self, request_id: str) -> bool:
        request = self.requests.get(request_id)  # type: ignore[attr-defined]
        return request is None or request.num_output_tokens > 0

    def _is_stuck(self) -> bool:
        """True when an empty step will be followed by nothing but empty steps.

        Tokens still in flight (asynchronous scheduling) may change things when they
        arrive, and requests that the client has yet to send may too; a request that waits
        or is only partly prefilled while the engine idles cannot help itself.
        """
        running = self.running  # type: ignore[attr-defined]
        if any(r.num_in_flight_tokens > 0 for r in running):
            return False
        unfinished = self.get_num_unfinished_requests()  # type: ignore[attr-defined]
        return unfinished > sum(self._is_held(r) for r in running)


def _barrier_size(asked: Any, default: int) -> int:
    """C of one request; a value that is no whole number is ignored with a warning."""
    value = default if asked is None else asked
    try:
        return int(value)
    except (TypeError, ValueError):
        logger.warning("%s: got %r, want a whole number of requests; ignored", REQUEST_KEY, value)
        return 0


class SyncBarrierScheduler(_BarrierMixin, Scheduler):
    """The barrier on the scheduler that vLLM uses without asynchronous scheduling."""


class AsyncBarrierScheduler(_BarrierMixin, AsyncScheduler):
    """The barrier on the scheduler that vLLM uses with asynchronous scheduling."""


class BarrierScheduler:
    """Name for ``--scheduler-cls``: builds the class that fits the engine's setting.

    vLLM would use ``AsyncScheduler`` exactly when ``async_scheduling`` is on (never on a
    CPU), and the two differ in how they count tokens in flight.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        asynchronous = vllm_config.scheduler_config.async_scheduling
        chosen = AsyncBarrierScheduler if asynchronous else SyncBarrierScheduler
        return chosen(vllm_config, *args, **kwargs)
