"""A streaming chat server with known delays, run as a thread or as ``serve.py`` would be.

What a prompt does is written in the prompt itself, as JSON:

    {"first": seconds before the first token, "chunks": [[gap seconds, tokens], ...],
     "finish": "length" | "stop" | null, "fail": "http" | "stream" | "drop" | null,
     "ids": bool, "usage": "end" | "every" | "none"}

The barrier of the real engine is imitated: with ``forespark_barrier`` C, the chunks after
the first token wait until C requests have theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

from aiohttp import web


class MockEngine:
    """State of one mock server."""

    def __init__(self) -> None:
        self.ready: list[asyncio.Event] = []
        self.requests: list[dict[str, Any]] = []
        self.counters = {"drafted": 0, "verified": 0, "accepted": 0}
        self.export = True
        self.active = self.most_active = 0
        self.resets = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", lambda request: web.Response())
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/reset_prefix_cache", self.reset)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "mock"}]})

    async def metrics(self, request: web.Request) -> web.Response:
        lines = [
            f'forespark:{name}_tokens_total{{engine="0",model_name="a b"}} {value}.0'
            for name, value in self.counters.items()
            if self.export
        ]
        lines.append(f'vllm:num_requests_running{{engine="0"}} {self.active}')
        return web.Response(text="\n".join(["# HELP x y", *lines, ""]))

    async def reset(self, request: web.Request) -> web.Response:
        self.resets += 1
        return web.json_response({"success": self.active == 0})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        script = parse_script(body["messages"][-1]["content"], body["max_tokens"])
        if script["fail"] == "http":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._send(
            response,
            {
                "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
                "prompt_token_ids": [1, 2, 3],
            },
        )
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            with contextlib.suppress(ConnectionResetError):
                await self._answer(response, body, script)
        finally:
            self.active -= 1
        return response

    async def _answer(self, response, body, script) -> None:
        sent = 0
        await asyncio.sleep(script["first"])
        for index, (gap, tokens) in enumerate(script["chunks"]):
            if index == 1:
                await self._barrier((body.get("vllm_xargs") or {}).get("forespark_barrier", 0))
            await asyncio.sleep(gap)
            if script["fail"] == "stream" and index == 1:
                await self._send(response, {"error": {"message": "engine died", "code": 500}})
                return
            if script["fail"] == "drop" and index == 1:
                return
            last = index == len(script["chunks"]) - 1
            choice = {
                "index": 0,
                "delta": {"content": "x" * tokens},
                "finish_reason": script["finish"] if last else None,
            }
            if script["ids"]:
                choice["token_ids"] = list(range(sent, sent + tokens))
            sent += tokens
            self.counters["drafted"] += tokens
            self.counters["verified"] += tokens
            self.counters["accepted"] += max(tokens - 1, 0)
            chunk = {"choices": [choice]}
            if script["usage"] == "every":
                chunk["usage"] = {"prompt_tokens": 3, "completion_tokens": sent}
            await self._send(response, chunk)
        if not script["chunks"]:
            await self._send(
                response,
                {
                    "choices": [
                        {"index": 0, "delta": {"content": ""}, "finish_reason": script["finish"]}
                    ]
                },
            )
        if script["usage"] != "none":
            usage = {"prompt_tokens": 3, "completion_tokens": sent}
            await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    async def _barrier(self, size: int) -> None:
        if size <= 1:
            return
        event = asyncio.Event()
        self.ready.append(event)
        if len(self.ready) >= size:
            for waiting in self.ready:
                waiting.set()
            self.ready.clear()
        await event.wait()

    @staticmethod
    async def _send(response: web.StreamResponse, data: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(data)}\n\n".encode())


def parse_script(content: str, max_tokens: int) -> dict[str, Any]:
    """The prompt's script; any other text answers ``max_tokens`` tokens, 2 ms each."""
    default = {
        "first": 0.01,
        "chunks": None,
        "finish": "length",
        "fail": None,
        "ids": True,
        "usage": "end",
    }
    with contextlib.suppress(json.JSONDecodeError, TypeError):
        default |= json.loads(content)
    if default["chunks"] is None:
        default["chunks"] = [[0.002, 1]] * max_tokens
    return default


@contextlib.contextmanager
def running(engine: MockEngine) -> Iterator[str]:
    """Serve on a free port in a thread; yields the endpoint."""
    loop = asyncio.new_event_loop()
    started: list[int] = []
    up = threading.Event()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(engine.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        started.append(site._server.sockets[0].getsockname()[1])
        up.set()
        return runner

    def serve() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert up.wait(10)
    try:
        yield f"http://127.0.0.1:{started[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


if __name__ == "__main__":  # stands in for serve.py: flags are read, most are ignored
    mode = next((a.partition("=")[2] for a in sys.argv if a.startswith("mock.mode=")), "serve")
    if mode == "die":
        print("could not load the drafter")
        sys.exit(3)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    if mode == "stubborn":
        import signal
        import subprocess

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(f"child {child.pid}", flush=True)
    web.run_app(
        MockEngine().app(),
        host="127.0.0.1",
        port=port,
        print=None,
        handle_signals=mode != "stubborn",
    )
