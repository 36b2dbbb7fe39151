"""A tiny target, byte tokenizer and chat template only, and the fake server that serves it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from data_cases import FakeServer

from forespark.config import Config, load

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a byte-level tokenizer with a chat template; it has no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("target")
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def configure(target: str, tmp_path: Path) -> Any:
    """``configure("data.limit=3", ...)``: a configuration of the tiny target."""

    def make(*overrides: str) -> Config:
        base = [
            "target=smollm2",
            f"target.model={target}",
            "target.max_model_len=2000",
            "data.max_tokens=200",
            "data.max_prompt_tokens=400",
            "data.concurrency=4",
            "data.magpie_rows=0",
            "data.exclude=[]",
            "calibrate.sources=[]",
            "bench.prompts=[]",
            f"run_dir={tmp_path}/run",
        ]
        return load([*base, *overrides])

    return make


@pytest.fixture
def server(target: str) -> Iterator[FakeServer]:
    fake = FakeServer(target)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": fake.name or fake.model}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.requests.append(body)
            self.answer(*(fake.chat(body) if "chat" in self.path else fake.complete(body)))

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{http.server_port}"
    threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True).start()
    yield fake
    http.shutdown()
    http.server_close()
