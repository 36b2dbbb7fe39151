"""An engine inside this process: what calibration, profiling and the tests drive.

The same vLLM engine, model runner and plugin as behind ``serve.py``, without HTTP and
without a second process, so that a stage can change the forced draft length between runs
and read step records directly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from forespark.config import Config
from forespark.serving.artifacts import resolve
from forespark.serving.launch import engine_arguments, engine_environment


@dataclass
class Request:
    """One generation. ``prompt`` is token ids; sampling fields as in vLLM."""

    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False


@dataclass
class Engine:
    """A running engine. Built by ``open_engine``.

    Attributes:
        llm: ``vllm.LLM``.
        steps: records of the steps run since the last ``clear`` (see ``meter``).
    """

    llm: Any
    steps: list[dict[str, Any]] = field(default_factory=list)
    _next: int = 0
    _live: set[str] = field(default_factory=set)

    @property
    def runner(self) -> Any:
        """The worker's model runner (in-process engines have exactly one worker)."""
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def planner(self) -> Any:
        return self.runner.speculator.planner

    @property
    def tokenizer(self) -> Any:
        return self.llm.get_tokenizer()

    def clear(self) -> None:
        self.steps.clear()

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a chat prompt, up to where the target answers."""
        encoded = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    def start(self, requests: Sequence[Request]) -> list[str]:
        """Queue requests; returns their names in order."""
        from vllm import SamplingParams

        names = []
        for request in requests:
            name = f"r{self._next}"
            self._next += 1
            params = SamplingParams(
                temperature=request.temperature,
                max_tokens=request.max_tokens,
                seed=request.seed,
                ignore_eos=request.ignore_eos,
                detokenize=False,
            )
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": request.prompt}, params)
            names.append(name)
        self._live.update(names)
        return names

    @property
    def busy(self) -> bool:
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def advance(self) -> dict[str, list[int]]:
        """Run one engine step; answers of the requests that finished in it, by name."""
        done = {}
        for output in self.llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        self._live -= done.keys()
        return done

    def abort_all(self) -> None:
        """Drop every unfinished request."""
        self.llm.llm_engine.abort_request(sorted(self._live))
        self._live.clear()
        while self.busy:
            self.llm.llm_engine.step()
        self.runner.forespark_meter.drain()

    def run(self, requests: Sequence[Request], load: int) -> list[list[int]]:
        """Generate with at most ``load`` requests in flight; answers in request order."""
        answers: dict[str, list[int]] = {}
        names: list[str] = []
        waiting = list(requests)[::-1]
        while waiting or self.busy:
            while waiting and len(self._live) < load:
                names += self.start([waiting.pop()])
            answers |= self.advance()
        self.runner.forespark_meter.drain()
        return [answers[name] for name in names]


@contextmanager
def open_engine(
    config: Config, *, tables: bool = True, calibration: bool = True, **overrides: Any
) -> Iterator[Engine]:
    """Start the arm of ``config`` in this process and shut it down at the end.

    Args:
        tables, calibration: as in ``artifacts.resolve``.
        overrides: engine arguments that win over the configured ones.

    Raises:
        ValueError: a file the arm needs is missing or foreign.
    """
    artifacts = resolve(config, tables=tables, calibration=calibration)
    os.environ.update(engine_environment(config))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    arguments = engine_arguments(config, artifacts) | {"disable_log_stats": True} | overrides
    engine = Engine(LLM(**arguments))
    engine.runner.forespark_meter.steps = engine.steps
    try:
        yield engine
    finally:
        engine.llm.llm_engine.engine_core.shutdown()
