"""The acceptance benchmark: mean acceptance length of each drafter on named sets of prompts.

Whole blocks are drafted and wholly verified, so that the length says what the drafter can
do and not what a schedule asked of it (paper, Table 2 and Table 3). It is the mean number
of tokens that one verification of K drafts yields, 1 + K · accepted / verified, by the
server's own counters. A fixed number of requests is in flight until a set is done.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm

from forespark.bench.client import Client, RequestResult
from forespark.bench.folder import drafter_weights
from forespark.bench.measure import COUNTERS
from forespark.bench.offline import append_row, open_folder
from forespark.bench.server import Server, serve_command
from forespark.bench.workloads import Prompt, load_prompts
from forespark.config import Config, load
from forespark.record import append_jsonl, file_sha256

BENCH = "acceptance"
ERRORS = "errors.jsonl"
# Drafter -> arm and overrides that serve its whole blocks, wholly verified.
SERVED = {"forespark": ("dflash2", ()), "dspark": ("dspark", ("arm.verify=full",))}


class AcceptanceBenchmark:
    """One folder of records: a row for each drafter and set.

    Args:
        config: ``bench.sets`` are measured with the drafters of ``bench.arms``.
        endpoint: a running server of the only drafter, its arm drafting and verifying whole
            blocks; None starts servers.

    Raises:
        ValueError: a set without prompts, no arm with a drafter, no such drafter, or several
            for one endpoint.
    """

    def __init__(self, config: Config, out: Path, endpoint: str | None = None) -> None:
        self.config, self.bench, self.out, self.endpoint = config, config.bench, out, endpoint
        self.drafters = drafters(config)
        if endpoint is not None and len(self.drafters) != 1:
            raise ValueError(
                f"--endpoint serves one drafter, but --arm asks for {', '.join(self.drafters)}"
            )
        missing = [d for d in self.drafters if drafter_weights(config, d) is None]
        if missing and endpoint is None:
            raise ValueError(
                f"no drafter {missing[0]}: run `python train.py --target {config.target.name} "
                f"--drafter {missing[0]}`, or name one with drafter.dir="
            )
        sources: dict[str, list[str]] = {}
        for name, _, source in (entry.partition("=") for entry in self.bench.sets):
            sources.setdefault(name, []).append(source)
        count = self.bench.set_prompts if self.bench.limit is None else self.bench.limit
        self.prompts = {
            name: load_prompts(found, seed=self.bench.seed, limit=count)
            for name, found in sources.items()
        }
        self.run_id = uuid.uuid4().hex[:12]
        self.failures = 0

    def run(self) -> Path:
        """Measure what is missing.

        Raises:
            ValueError: records of other settings, or failed requests; what was measured is
                kept.
        """
        rows = open_folder(self.config, self.out, BENCH, self._fixed(), self.run_id)
        done = {(row["drafter"], row["set"]) for row in rows}
        for drafter in self.drafters:
            missing = [name for name in self.prompts if (drafter, name) not in done]
            if missing:
                with self._server(drafter) as server:
                    asyncio.run(self._measure(drafter, missing, server.endpoint))
        if self.failures:
            raise ValueError(
                f"{self.failures} sets failed, see {self.out / ERRORS}; the same command "
                "measures what is missing"
            )
        return self.out

    def _fixed(self) -> dict[str, Any]:
        bench = self.bench
        fixed: dict[str, Any] = {
            name: getattr(bench, name)
            for name in ("sets", "set_prompts", "limit", "acceptance_load", "output_tokens",
                         "temperature", "seed")
        }  # fmt: skip
        fixed |= {"target": self.config.target.name, "model": self.config.target.model}
        fixed["K"] = self.config.drafter.num_speculative_tokens
        for drafter in SERVED:
            weights = drafter_weights(self.config, drafter)
            fixed[f"drafter_sha256.{drafter}"] = file_sha256(weights) if weights else None
        return fixed

    def _server(self, drafter: str) -> Any:
        if self.endpoint is not None:
            return nullcontext(self)
        serve = self.config.serve
        arm, overrides = SERVED[drafter]
        return Server(
            [*serve_command(self.config, arm), *overrides],
            host=serve.host,
            port=serve.port,
            log=self.out / "logs" / f"{drafter}.log",
            ready_timeout_s=serve.ready_timeout_s,
            label=f"{drafter}'s server",
        )

    async def _measure(self, drafter: str, names: list[str], endpoint: str) -> None:
        total = sum(len(self.prompts[name]) for name in names)
        async with Client(endpoint, timeout_s=self.bench.request_timeout_s) as client:
            with tqdm(total=total, desc=drafter, unit="answer") as progress:
                for name in names:
                    progress.set_postfix_str(name)
                    await self._set(client, drafter, name, progress.update)

    async def _set(
        self, client: Client, drafter: str, name: str, answered: Callable[[], Any]
    ) -> None:
        """One row, or an error that leaves the other sets their turn."""
        before = await client.counters(COUNTERS)
        results = await self._answers(client, self.prompts[name], answered)
        after = await client.counters(COUNTERS)
        errors = sorted({result.error for result in results if result.error})
        if not errors and not set(COUNTERS) <= set(after):
            errors = ["the server has no forespark: counters; serve it with serve.py"]
        verified, accepted = (
            round(after.get(key, 0.0) - before.get(key, 0.0)) for key in COUNTERS[1:]
        )
        K = self.config.drafter.num_speculative_tokens
        if not errors and (verified == 0 or verified % K):
            errors = [f"{verified} drafts were verified, which is not whole blocks of {K}"]
        if errors:
            self.failures += 1
            failed = {"drafter": drafter, "set": name, "run_id": self.run_id}
            append_jsonl(self.out / ERRORS, failed | {"error": errors[0]})
            tqdm.write(f"{drafter}, {name}: {errors[0]}")
            return
        row = {
            "drafter": drafter, "set": name, "K": K, "requests": len(results),
            "tokens": sum(result.output_tokens for result in results),
            "blocks": verified // K, "accepted": accepted,
        }  # fmt: skip
        append_row(self.out, BENCH, self.run_id, self.config.target.name, row)

    async def _answers(
        self, client: Client, prompts: list[Prompt], answered: Callable[[], Any]
    ) -> list[RequestResult]:
        """Answers in the order of the prompts, ``acceptance_load`` of them at a time."""
        free = asyncio.Semaphore(self.bench.acceptance_load)

        async def one(prompt: Prompt) -> RequestResult:
            async with free:
                result = await client.chat(
                    prompt, max_tokens=self.bench.output_tokens,
                    temperature=self.bench.temperature, seed=self.bench.seed,
                )  # fmt: skip
                answered()
                return result

        return await asyncio.gather(*map(one, prompts))


def drafters(config: Config) -> list[str]:
    """Drafters of ``bench.arms``, each once.

    Raises:
        ValueError: none of the arms has a drafter.
    """
    arms = [load([f"target={config.target.name}", f"arm={name}"]).arm for name in config.bench.arms]
    found = list(dict.fromkeys(arm.drafter for arm in arms if arm.drafter in SERVED))
    if not found:
        raise ValueError(f"bench.arms (--arm): got {config.bench.arms}, want an arm that drafts")
    return found
