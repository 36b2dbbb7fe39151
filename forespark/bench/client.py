"""Streaming client of an OpenAI-compatible chat endpoint that times single tokens.

A chunk may carry several tokens (a speculative step emits up to K + 1), so tokens are
counted by the ids that vLLM adds to every chunk (``return_token_ids``); every token of a
chunk has the chunk's arrival time. TTFT counts from the moment a request was due, not
from the moment it was sent, so waiting inside the client is not hidden.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from forespark.bench.workloads import Prompt

clock = time.monotonic  # the clock of the step trace, too


@dataclass(slots=True)
class RequestResult:
    """What one request did. Times are ``clock`` seconds."""

    prompt_id: str
    due_s: float
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)  # one per output token
    token_ids: list[int] = field(default_factory=list)  # empty when the server sends none
    prompt_tokens: int = 0
    end: str = "pending"  # stop | length | error | cancelled
    error: str | None = None
    text: str = ""

    @property
    def done(self) -> bool:
        """Whether it ended by itself, well or not."""
        return self.end not in ("pending", "cancelled")

    @property
    def output_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from due to the first token; None without a token."""
        return self.token_times_s[0] - self.due_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (n - 1); undefined, so None, for fewer than two."""
        if self.output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def output_sha256(self) -> str:
        """Hash of the output token ids (of the text when the server sends no ids)."""
        content = json.dumps(self.token_ids) if self.token_ids else self.text
        return hashlib.sha256(content.encode()).hexdigest()


class Client:
    """One endpoint. Use as an asynchronous context manager."""

    def __init__(self, endpoint: str, *, timeout_s: float = 900.0) -> None:
        self.endpoint = endpoint.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self.model = ""

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # never queue inside the client
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=self.timeout_s),
        )
        try:
            async with self._session.get(f"{self.endpoint}/v1/models") as response:
                response.raise_for_status()
                self.model = (await response.json())["data"][0]["id"]
        except (TimeoutError, aiohttp.ClientError, LookupError, TypeError, ValueError) as error:
            await self._session.close()
            raise ValueError(
                f"{self.endpoint}: no OpenAI-compatible server answers there ({_cause(error)}); "
                "start one with serve.py"
            ) from None
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def chat(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        barrier: int = 0,
        into: RequestResult | None = None,
    ) -> RequestResult:
        """Stream one answer. Failures are returned in ``error``, never raised.

        Args:
            into: filled while the answer arrives, and returned; one that is due now by default.
        """
        result = RequestResult(prompt.id, clock()) if into is None else into
        body: dict[str, Any] = {
            "model": self.model,
            "messages": prompt.chat(),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if barrier > 1:
            body["vllm_xargs"] = {"forespark_barrier": barrier}
        result.sent_s = clock()
        try:
            await self._stream(body, result)
        except asyncio.CancelledError:
            result.end, result.error = "cancelled", "cancelled"
            raise
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            result.end = "error"
            result.error = result.error or str(error) or type(error).__name__
        return result

    async def _stream(self, body: dict[str, Any], result: RequestResult) -> None:
        url = f"{self.endpoint}/v1/chat/completions"
        async with self._session.post(url, json=body) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                raise ValueError(f"HTTP {response.status}: {text}")
            finish = None
            async for arrived_s, data in _events(response):
                finish = _read_chunk(data, arrived_s, result) or finish
        if finish is None:
            raise ValueError("the stream ended without a finish reason")
        result.end = finish

    async def batch(
        self, prompts: list[Prompt], *, max_tokens: int, temperature: float, seed: int
    ) -> list[RequestResult]:
        """Send all prompts at once through the decode barrier.

        One failure cancels the others: the engine would hold them for a request that
        never comes. Their results say so.

        Returns:
            One result per prompt, same order.
        """
        due_s = clock()
        tasks = [
            asyncio.create_task(
                self.chat(
                    prompt,
                    max_tokens=max_tokens,
                    temperature=temperature,
                    seed=seed,
                    barrier=len(prompts),
                    into=RequestResult(prompt.id, due_s),
                )
            )
            for prompt in prompts
        ]
        reason = "cancelled: another request of the batch failed"
        pending = set(tasks)
        try:
            while pending:
                left_s = self.timeout_s - (clock() - due_s)
                done, pending = await asyncio.wait(
                    pending, timeout=max(left_s, 0.0), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    reason = f"the batch took longer than {self.timeout_s:g} s"
                    break
                if any(task.result().error for task in done):
                    break
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return [
            RequestResult(prompt.id, due_s, end="cancelled", error=reason)
            if task.cancelled()
            else task.result()
            for prompt, task in zip(prompts, tasks, strict=True)
        ]

    async def counters(self, names: tuple[str, ...]) -> dict[str, float]:
        """Values of Prometheus counters or gauges, summed over labels; absent ones left out."""
        try:
            async with self._session.get(f"{self.endpoint}/metrics") as response:
                if response.status != 200:
                    return {}
                return parse_counters(await response.text(), names)
        except (TimeoutError, aiohttp.ClientError):
            return {}

    async def empty_prefix_cache(self) -> str | None:
        """Forget cached prefixes; returns why that failed, or None.

        vLLM offers this in its development mode only (``VLLM_SERVER_DEV_MODE=1``).
        """
        try:
            async with self._session.post(f"{self.endpoint}/reset_prefix_cache") as response:
                if response.status != 200:
                    return f"HTTP {response.status}"
                return None if (await response.json())["success"] else "blocks are still held"
        except (TimeoutError, aiohttp.ClientError) as error:
            return _cause(error)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, str]]:
    """``data:`` payloads of a server-sent event stream with their arrival times."""
    pending = b""
    async for block in response.content.iter_any():
        arrived_s = clock()
        *lines, pending = (pending + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip().decode("utf-8")
                if data != "[DONE]":
                    yield arrived_s, data


def _read_chunk(data: str, arrived_s: float, result: RequestResult) -> str | None:
    """Add one chunk to ``result``; returns the finish reason when it carries one."""
    chunk = json.loads(data)
    if "error" in chunk:
        error = chunk["error"]
        message = error.get("message") if isinstance(error, dict) else error
        raise ValueError(f"server error in the stream: {message}")
    prompt_ids = chunk.get("prompt_token_ids")
    if prompt_ids:
        result.prompt_tokens = len(prompt_ids)
    choices = chunk.get("choices") or []
    usage = chunk.get("usage")
    finish = None
    if choices:
        choice = choices[0]
        text = (choice.get("delta") or {}).get("content") or ""
        result.text += text
        ids = choice.get("token_ids")
        if ids is not None:
            result.token_ids += ids
            new = len(ids)
        else:
            new = 1 if text and not usage else 0
        result.token_times_s += [arrived_s] * new
        finish = choice.get("finish_reason")
    if usage:
        result.prompt_tokens = usage.get("prompt_tokens") or result.prompt_tokens
        if not result.token_ids:
            _reconcile(result, usage.get("completion_tokens") or 0, arrived_s, bool(choices))
    return finish


def _reconcile(result: RequestResult, total: int, arrived_s: float, has_choice: bool) -> None:
    """Bring the token count to the server's own when it sends no token ids.

    With usage in every chunk the new tokens arrived now. With usage only at the end some
    chunks held several tokens: which ones is unknown, so the surplus goes to the last.
    """
    times = result.token_times_s
    surplus = total - len(times)
    if surplus > 0 and (times or has_choice):
        times += [arrived_s if has_choice else times[-1]] * surplus
    elif surplus < 0:
        del times[total:]


def _cause(error: Exception) -> str:
    """Why the first request failed, without aiohttp's internals."""
    if isinstance(error, aiohttp.InvalidURL):
        return "not an http:// address"
    if isinstance(error, aiohttp.ClientResponseError) and error.status >= 400:
        return f"HTTP {error.status}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or "cannot connect"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectionError):
        return "connection lost"
    return "its /v1/models is not a list of models"


def parse_counters(text: str, names: tuple[str, ...]) -> dict[str, float]:
    """Sum samples of Prometheus text per metric name, for the wanted names only."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            sample = line.rsplit("}", 1)[-1] if "}" in line else line[len(name) :]
            values[name] = values.get(name, 0.0) + float(sample.split()[0])
    return values
