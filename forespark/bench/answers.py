"""Which prompts are timed: those whose greedy AR answer is long enough (Appendix C).

The AR arm answers the candidates once; answers.jsonl keeps every answer, so a second run
continues where the first stopped and every arm times the same prompts.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from forespark.bench.client import Client
from forespark.bench.workloads import Prompt
from forespark.config import BenchConfig
from forespark.record import append_jsonl, read_jsonl

logger = logging.getLogger(__name__)

ANSWERS = "answers.jsonl"
_CONCURRENCY = 32  # requests in flight; does not change which prompts are chosen


@dataclass(frozen=True, slots=True)
class Answer:
    """The AR answer to one candidate prompt."""

    prompt_id: str
    prompt_tokens: int
    answer_tokens: int  # cut at what the benchmark needs
    end: str
    token_ids: list[int]
    error: str | None = None

    def usable(self, bench: BenchConfig) -> bool:
        """Long enough to be timed in full, and within the prompt limit."""
        return (
            self.error is None
            and self.answer_tokens >= needed_tokens(bench)
            and self.prompt_tokens <= bench.max_prompt_tokens
        )


def needed_tokens(bench: BenchConfig) -> int:
    """Answer tokens that a usable prompt reaches: the first one and all timed ones."""
    return max(bench.min_answer_tokens, bench.output_tokens + 1)


def read_answers(path: Path) -> dict[str, Answer]:
    """Answers known so far, by prompt id.

    Raises:
        ValueError: a row with other fields; names file and line.
    """
    answers: dict[str, Answer] = {}
    if not path.exists():
        return answers
    for number, row in enumerate(read_jsonl(path), start=1):
        try:
            answer = Answer(**row)
        except TypeError as error:
            raise ValueError(f"{path}, line {number}: not an AR answer ({error})") from None
        answers[answer.prompt_id] = answer
    return answers


def pool(
    prompts: list[Prompt], answers: dict[str, Answer], bench: BenchConfig, wanted: int
) -> list[Prompt] | None:
    """First ``wanted`` usable prompts in order, or None while some answer is unknown.

    Fewer come back when all prompts are answered and not enough are usable.
    """
    usable: list[Prompt] = []
    for prompt in prompts:
        if len(usable) >= wanted:
            break
        answer = answers.get(prompt.id)
        if answer is None:
            return None
        if answer.usable(bench):
            usable.append(prompt)
    return usable


async def determine(
    endpoint: str, prompts: list[Prompt], bench: BenchConfig, wanted: int, path: Path
) -> list[Prompt]:
    """Answer candidates with the AR arm at ``endpoint`` until ``wanted`` are usable.

    Raises:
        ValueError: no prompt is usable, or the server stopped answering.
    """
    answers = read_answers(path)
    async with Client(endpoint, timeout_s=bench.request_timeout_s) as client:
        with tqdm(desc="AR answers", total=wanted, unit="usable", leave=False) as progress:
            while (chosen := pool(prompts, answers, bench, wanted)) is None:
                todo = [p for p in prompts if p.id not in answers][:_CONCURRENCY]
                results = await asyncio.gather(
                    *(client.chat(p, max_tokens=needed_tokens(bench)) for p in todo)
                )
                for result in results:
                    # A refused prompt (too long) is an answer of its own; a server that
                    # is gone is not, or every prompt would be written off.
                    if result.error and not result.error.startswith("HTTP 4"):
                        raise ValueError(f"AR answer to prompt {result.prompt_id}: {result.error}")
                    answer = Answer(
                        result.prompt_id,
                        result.prompt_tokens,
                        result.output_tokens,
                        result.end,
                        result.token_ids,
                        result.error,
                    )
                    answers[answer.prompt_id] = answer
                    append_jsonl(path, asdict(answer))
                progress.n = sum(a.usable(bench) for a in answers.values())
                progress.refresh()
    return chosen


def require_pool(chosen: list[Prompt], answered: int, bench: BenchConfig) -> None:
    """Refuse an empty pool.

    Raises:
        ValueError: none of the answered prompts is usable.
    """
    if not chosen:
        raise ValueError(
            f"none of {answered} prompts has an AR answer of {needed_tokens(bench)} tokens and "
            f"at most {bench.max_prompt_tokens} prompt tokens: add sources (bench.prompts), "
            "raise --limit, or lower bench.output_tokens and bench.min_answer_tokens"
        )
