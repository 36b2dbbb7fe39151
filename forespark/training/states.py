"""The target's hidden states for training rows: in process or from a server, cached.

Both sources give the same tensors: for T tokens, the residual stream after decoder layer
i for every captured id i (id 0 is the embedding, as vLLM's auxiliary layers count), and
the residual stream before the target's final norm. They are kept in bfloat16.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from forespark.models.blocks import Row
from forespark.record import file_sha256
from forespark.training.rows import CorpusRow


class StateSource(Protocol):
    """Gives the hidden states of one token sequence."""

    def fetch(self, input_ids: Sequence[int]) -> torch.Tensor:
        """[T, layers + 1, H]: the captured layers in order, then the last one."""


class LocalStates:
    """The target run in this process by transformers, float32 on the default device."""

    def __init__(self, model: str, layer_ids: Sequence[int]) -> None:
        self.model_name, self.layer_ids = model, list(layer_ids)
        self._model: torch.nn.Module | None = None
        self._seen: dict[int, torch.Tensor] = {}

    def _load(self) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        try:
            causal = AutoModelForCausalLM.from_pretrained(self.model_name, dtype=torch.float32)
        except OSError as error:
            raise ValueError(
                f"{self.model_name}: cannot load the target ({error}); run setup.sh"
            ) from error
        model = causal.model.eval().requires_grad_(False).to(torch.get_default_device())
        layers = len(model.layers)
        if max(self.layer_ids) > layers or min(self.layer_ids) < 0:
            raise ValueError(
                f"target.target_layer_ids: got {self.layer_ids}, want ids in 0..{layers}"
            )

        def keep(index: int, states: torch.Tensor) -> None:
            self._seen[index] = states

        for index, layer in enumerate(model.layers):
            # What enters layer i is what left layer i - 1, whatever the layer returns.
            layer.register_forward_pre_hook(
                lambda _m, args, kwargs, i=index: keep(
                    i, args[0] if args else kwargs["hidden_states"]
                ),
                with_kwargs=True,
            )
        model.norm.register_forward_pre_hook(lambda _m, args: keep(layers, args[0]))
        self._last = layers
        return model

    @torch.no_grad()
    def fetch(self, input_ids: Sequence[int]) -> torch.Tensor:
        if self._model is None:
            self._model = self._load()
        self._model(input_ids=torch.tensor([list(input_ids)]), use_cache=False)
        states = torch.stack([self._seen[i][0] for i in [*self.layer_ids, self._last]], dim=1)
        self._seen.clear()
        return states


class ServerStates:
    """A vLLM server that extracts hidden states to files on a shared path."""

    def __init__(self, endpoint: str, layer_ids: Sequence[int], timeout: float = 120.0) -> None:
        self.endpoint, self.layers, self.timeout = endpoint.rstrip("/"), len(layer_ids), timeout
        self._client: object | None = None
        self._name = ""

    def _connect(self) -> None:
        import openai

        base = self.endpoint if self.endpoint.endswith("/v1") else f"{self.endpoint}/v1"
        self._client = openai.OpenAI(base_url=base, api_key="EMPTY", max_retries=0)
        try:
            self._name = self._client.models.list().data[0].id
        except openai.OpenAIError as error:
            raise OSError(f"{base}: no hidden-state server answers there ({error})") from error

    def fetch(self, input_ids: Sequence[int]) -> torch.Tensor:
        import openai
        from hs_connectors.transfer import FileTransfer
        from speculators.data_generation.vllm_client import generate_hidden_states

        if self._client is None:
            self._connect()
        transfer = FileTransfer(Path(tempfile.gettempdir()))
        try:
            handle, params = generate_hidden_states(
                self._client, self._name, {"input_ids": list(input_ids)}, timeout=self.timeout
            )  # type: ignore[arg-type]
            loaded = transfer.get_generated(params)
        except openai.OpenAIError as error:
            raise OSError(
                f"{self.endpoint}: the hidden-state server failed ({error}); training stops at "
                "its last checkpoint, run the same command again to resume"
            ) from error
        if loaded is None:
            raise OSError(f"{self.endpoint}: the server's hidden-state file is missing")
        states = loaded["hidden_states"]
        transfer.delete(handle)
        if tuple(states.shape[:2]) != (len(input_ids), self.layers + 1):
            raise ValueError(
                f"{self.endpoint}: got hidden states {tuple(states.shape)} for {len(input_ids)} "
                f"tokens, want {self.layers} captured layers and the last one; start the server "
                "with the drafter's layer ids"
            )
        return states


def target_key(model: str, layer_ids: Sequence[int]) -> str:
    """Name of a target's states: digest of its weights and of the captured layers.

    Raises:
        ValueError: the checkpoint folder holds no safetensors.
    """
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    if not files:
        raise ValueError(f"{model}: no safetensors of the target there; run setup.sh")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file_sha256(file).encode())
    digest.update(repr(list(layer_ids)).encode())
    return digest.hexdigest()[:16]


class StateCache:
    """States of corpus rows, computed once and then read from ``folder/key``."""

    def __init__(self, source: StateSource, folder: Path | None) -> None:
        self.source, self.folder = source, folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, input_ids: Sequence[int]) -> torch.Tensor:
        """[T, layers + 1, H] bfloat16."""
        if self.folder is None:
            return self.source.fetch(input_ids).to(torch.bfloat16)
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save_file

        name = hashlib.sha256(repr(list(input_ids)).encode()).hexdigest()[:24]
        path = self.folder / name[:2] / f"{name}.safetensors"
        if path.exists():
            try:
                return load_file(path)["states"]
            except (SafetensorError, KeyError, OSError):
                path.unlink(missing_ok=True)  # torn by a full disk: compute it again
        states = self.source.fetch(input_ids).to(torch.bfloat16).contiguous()
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        save_file({"states": states}, temporary)
        temporary.replace(path)
        return states

    def row(self, documents: Sequence[CorpusRow], budget: int | None = None) -> Row:
        """Documents packed into one training row, each cut to ``budget`` tokens."""
        parts: list[torch.Tensor] = []
        ids: list[int] = []
        masks: list[int] = []
        lengths: list[int] = []
        for document in documents:
            kept = document.input_ids[:budget]
            parts.append(self.get(kept))
            ids.extend(kept)
            masks.extend(document.loss_mask[:budget])
            lengths.append(len(kept))
        states = torch.cat(parts).to(torch.get_default_device())
        return Row(
            input_ids=torch.tensor(ids),
            loss_mask=torch.tensor(masks, dtype=torch.bool),
            lengths=lengths,
            states=states[:, :-1].flatten(1),
            last=states[:, -1],
        )
