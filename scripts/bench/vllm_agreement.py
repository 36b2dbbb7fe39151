"""Our streaming client beside ``vllm bench serve``, on one server and the same prompts.

    python scripts/bench/vllm_agreement.py [--target smollm2] [--arm ar] [--out FILE]

Both keep CLIENTS requests in flight until all prompts are answered, and take turns; what is
compared are mean TTFT and mean TPOT over all turns. Writes a JSON record.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from forespark import cli, record  # noqa: E402

CLIENTS, PROMPTS, TOKENS, TURNS = 4, 24, 64, 3


async def ours(endpoint: str, prompts: list[Any]) -> dict[str, float]:
    """Mean TTFT and TPOT (ms) of one turn with our client."""
    from forespark.bench.client import Client, RequestResult, clock

    free = asyncio.Semaphore(CLIENTS)
    async with Client(endpoint) as client:

        async def one(prompt: Any) -> RequestResult:
            async with free:
                due = RequestResult(prompt.id, clock())
                return await client.chat(prompt, max_tokens=TOKENS, into=due)

        results = await asyncio.gather(*map(one, prompts))
    failed = [result.error for result in results if result.error]
    if failed:
        raise ValueError(f"{len(failed)} requests failed: {failed[0]}")
    tpot = [result.tpot_s for result in results if result.tpot_s is not None]
    ttft = [result.ttft_s for result in results if result.ttft_s is not None]
    return {"ttft_ms": 1000 * statistics.mean(ttft), "tpot_ms": 1000 * statistics.mean(tpot)}


def vllms(endpoint: str, model: str, data: Path, folder: Path) -> dict[str, float]:
    """The same by ``vllm bench serve``."""
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve",
        "--backend", "openai-chat", "--base-url", endpoint, "--endpoint", "/v1/chat/completions",
        "--tokenizer", model, "--dataset-name", "custom", "--dataset-path", str(data),
        "--custom-output-len", str(TOKENS), "--num-prompts", str(PROMPTS), "--disable-shuffle",
        "--skip-chat-template", "--max-concurrency", str(CLIENTS), "--temperature", "0",
        "--disable-tqdm", "--save-result", "--result-dir", str(folder),
        "--result-filename", "result.json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"vllm bench serve failed:\n{done.stderr[-2000:]}")
    found = record.read_json(folder / "result.json")
    if found["completed"] != PROMPTS:
        raise ValueError(f"vllm bench serve completed {found['completed']} of {PROMPTS} requests")
    return {"ttft_ms": found["mean_ttft_ms"], "tpot_ms": found["mean_tpot_ms"]}


def main() -> None:
    args, config = cli.stage("eval", __doc__, "target", "arm", "out")
    from forespark.bench.server import Server, serve_command
    from forespark.bench.workloads import load_prompts

    arm = args.arm or "ar"
    out = args.out or Path(config.run_dir) / "vllm_agreement.json"
    prompts = load_prompts(config.bench.prompts, seed=config.bench.seed, limit=PROMPTS)
    turns: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="forespark-agreement-") as name:
        folder = Path(name)
        for prompt in prompts:
            text = prompt.messages[-1][1]
            record.append_jsonl(folder / "prompts.jsonl", {"prompt": text})
        plain = [type(p)(p.id, (p.messages[-1],)) for p in prompts]  # no system messages there
        server = Server(
            serve_command(config, arm), host=config.serve.host, port=config.serve.port,
            log=folder / "server.log", ready_timeout_s=config.serve.ready_timeout_s, label=arm,
        )  # fmt: skip
        with server:
            asyncio.run(ours(server.endpoint, plain))  # first calls compile
            for turn in range(TURNS):
                mine = asyncio.run(ours(server.endpoint, plain))
                data = folder / "prompts.jsonl"
                theirs = vllms(server.endpoint, config.target.model, data, folder)
                turns.append({"ours": mine, "vllm": theirs})
                print(f"turn {turn + 1}: ours {mine}, vllm {theirs}", flush=True)
    means = {
        who: {key: statistics.mean(turn[who][key] for turn in turns) for key in turns[0][who]}
        for who in ("ours", "vllm")
    }
    ratio = {key: means["ours"][key] / means["vllm"][key] for key in means["ours"]}
    settings = {"clients": CLIENTS, "prompts": len(prompts), "tokens": TOKENS}
    content = {"schema": record.SCHEMA, "arm": arm, **settings, "turns": turns, "ratio": ratio}
    record.write_json(out, {**content, "provenance": record.provenance()})
    print(f"ours over vllm bench serve: TTFT {ratio['ttft_ms']:.3f}, TPOT {ratio['tpot_ms']:.3f}")
    cli.done(out)


if __name__ == "__main__":
    cli.run(main)
