"""Acceptance estimators of ForeSpark and their file format.

Symbols: R = requests (or anchors), K = largest draft length, d_h = drafter hidden size,
d_e = target embedding size, r = estimator rank, s = selector rank.

Source: paper, Eq. (2) (pre-draft) and Eq. (5) (post-draft).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

SCHEMA = 1
WEIGHTS_FILE = "heads.safetensors"
META_FILE = "heads.json"
FORMS = ("triangle", "row")


def row_slice(length: int) -> slice:
    """Entries of triangle row ``length`` (1-based): offset d(d-1)/2, d of them."""
    start = length * (length - 1) // 2
    return slice(start, start + length)


class PreDraftEstimator(nn.Module):
    """Conditional acceptance of every candidate draft length, before drafting.

    u = SiLU(W_c c + W_e e + b), z = W_o u + b_o (Eq. 2; the paper omits the biases).

    Args:
        num_speculative_tokens: K.
        hidden_size: d_h, size of the context feature c.
        embed_size: d_e, size of the anchor embedding e.
        rank: r.
        form: ``triangle`` has K(K+1)/2 logits, row d at offset d(d-1)/2; ``row`` has the
            K logits of row K only (directional drafters, single curves).
        embed_scale: factor applied to e while training so that it enters with about unit
            variance, as the normed c does. ``folded_state`` multiplies it into W_e, so
            serving reads the raw embedding.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        hidden_size: int,
        embed_size: int,
        rank: int,
        form: str = "triangle",
        embed_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if form not in FORMS:
            raise ValueError(f"estimator form: got {form!r}, want one of {FORMS}")
        k = num_speculative_tokens
        self.num_speculative_tokens = k
        self.form = form
        self.embed_scale = float(embed_scale)
        self.w_c = nn.Linear(hidden_size, rank)  # carries b
        self.w_e = nn.Linear(embed_size, rank, bias=False)
        self.w_o = nn.Linear(rank, k * (k + 1) // 2 if form == "triangle" else k)
        # Start at the bias: every length is first predicted alike, whatever c and e are.
        nn.init.zeros_(self.w_o.weight)
        nn.init.zeros_(self.w_o.bias)

    def forward(
        self,
        context: torch.Tensor,  # [R, d_h]: c, row of the fused context at anchor - 1
        embedding: torch.Tensor,  # [R, d_e]: e, target embedding of the anchor token
    ) -> torch.Tensor:
        """Logits z, [R, T]."""
        embedding = embedding * self.embed_scale
        return self.w_o(nn.functional.silu(self.w_c(context) + self.w_e(embedding)))

    def row(
        self,
        z: torch.Tensor,  # [R, T]
        length: int,
    ) -> torch.Tensor:
        """Logits of a length-``length`` draft, [R, length]."""
        if not 1 <= length <= self.num_speculative_tokens:
            raise ValueError(f"draft length: got {length}, want 1..{self.num_speculative_tokens}")
        return z[:, row_slice(length)] if self.form == "triangle" else z[:, :length]

    def folded_state(self) -> dict[str, torch.Tensor]:
        """Weights under their file names, the embedding scale folded into W_e."""
        return {
            "pre.w_c": self.w_c.weight.detach().clone(),
            "pre.w_e": self.w_e.weight.detach() * self.embed_scale,
            "pre.bias": self.w_c.bias.detach().clone(),
            "pre.w_o": self.w_o.weight.detach().clone(),
            "pre.b_o": self.w_o.bias.detach().clone(),
        }


class PostDraftEstimator(nn.Module):
    """Acceptance of each drafted token given its predecessors, l = w.[h; s] + b (Eq. 5).

    s = (W_s h) * E_pred(x_{j-1}) with the selector's own hidden projection and
    predecessor codebook, so only w and b belong to this module.
    """

    def __init__(self, hidden_size: int, selector_rank: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(hidden_size + selector_rank))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(
        self,
        hidden: torch.Tensor,  # [*, d_h]: h, the drafter's last layer after its norm
        selector: torch.Tensor,  # [*, s]: s
    ) -> torch.Tensor:
        """Logits l, [*]."""
        split = hidden.shape[-1]
        return hidden @ self.w[:split] + selector @ self.w[split:] + self.bias

    def folded_state(self) -> dict[str, torch.Tensor]:
        return {"post.w": self.w.detach().clone(), "post.bias": self.bias.detach().clone()}


@dataclass
class HeadsMeta:
    """What ``heads.json`` says about the weights beside it."""

    target: str
    num_speculative_tokens: int
    hidden_size: int
    embed_size: int
    rank: int
    selector_rank: int
    drafter_sha256: str  # of the drafter's model.safetensors
    form: str = "triangle"
    provenance: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of ``heads.safetensors``."""
        k = self.num_speculative_tokens
        outputs = k * (k + 1) // 2 if self.form == "triangle" else k
        return {
            "pre.w_c": (self.rank, self.hidden_size),
            "pre.w_e": (self.rank, self.embed_size),
            "pre.bias": (self.rank,),
            "pre.w_o": (outputs, self.rank),
            "pre.b_o": (outputs,),
            "post.w": (self.hidden_size + self.selector_rank,),
            "post.bias": (1,),
        }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        for block in iter(lambda: source.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def save_heads(
    folder: Path,
    pre: PreDraftEstimator,
    post: PostDraftEstimator,
    meta: HeadsMeta,
) -> None:
    """Write ``heads.safetensors`` and ``heads.json``, each whole or not at all."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.float().contiguous()
        for name, tensor in {**pre.folded_state(), **post.folded_state()}.items()
    }
    got = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert got == meta.shapes(), f"heads {got} do not match their description {meta.shapes()}"
    temporary = folder / f".{WEIGHTS_FILE}.{os.getpid()}.tmp"
    save_file(state, temporary)
    temporary.replace(folder / WEIGHTS_FILE)
    temporary = folder / f".{META_FILE}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(asdict(meta), indent=2, allow_nan=False) + "\n")
    temporary.replace(folder / META_FILE)


def load_heads(
    folder: Path,
    *,
    drafter: Path | None = None,
    num_speculative_tokens: int | None = None,
    target: str | None = None,
) -> tuple[PreDraftEstimator, PostDraftEstimator, HeadsMeta]:
    """Read heads and refuse those made for something else.

    Args:
        folder: holds ``heads.safetensors`` and ``heads.json``.
        drafter: the drafter's ``model.safetensors``; its digest must be the recorded one.
        num_speculative_tokens: K the caller serves with, when it matters.
        target: target name the caller serves, when it matters.

    Raises:
        ValueError: a file is missing or corrupt, a shape is wrong, or K, target or
            drafter differ from what the heads were trained for.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    retrain = "train them with `python train.py` (or `python heads.py` for a fixed drafter)"
    try:
        raw = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        state = load_file(folder / WEIGHTS_FILE)
        meta = HeadsMeta(**raw)
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename}: no such file; {retrain}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError, TypeError) as error:
        raise ValueError(f"{folder}: heads are corrupt or truncated ({error}); {retrain}") from None
    if meta.schema != SCHEMA or meta.form not in FORMS:
        raise ValueError(
            f"{folder / META_FILE}: got schema {meta.schema} and form {meta.form!r}, want "
            f"schema {SCHEMA} and one of {FORMS}; {retrain}"
        )
    for what, got, want in (
        ("num_speculative_tokens", meta.num_speculative_tokens, num_speculative_tokens),
        ("target", meta.target, target),
    ):
        if want is not None and got != want:
            raise ValueError(f"{folder / META_FILE}: {what} is {got!r}, want {want!r}; {retrain}")
    if drafter is not None and _sha256(Path(drafter)) != meta.drafter_sha256:
        raise ValueError(
            f"{folder / META_FILE}: heads belong to another drafter than {drafter} "
            f"(recorded sha256 {meta.drafter_sha256[:12]}...); {retrain}"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if shapes != meta.shapes():
        raise ValueError(
            f"{folder / WEIGHTS_FILE}: shapes {shapes}, want {meta.shapes()}; {retrain}"
        )
    pre = PreDraftEstimator(
        meta.num_speculative_tokens, meta.hidden_size, meta.embed_size, meta.rank, meta.form
    )
    post = PostDraftEstimator(meta.hidden_size, meta.selector_rank)
    with torch.no_grad():
        pre.w_c.weight.copy_(state["pre.w_c"])
        pre.w_c.bias.copy_(state["pre.bias"])
        pre.w_e.weight.copy_(state["pre.w_e"])
        pre.w_o.weight.copy_(state["pre.w_o"])
        pre.w_o.bias.copy_(state["pre.b_o"])
        post.w.copy_(state["post.w"])
        post.bias.copy_(state["post.bias"])
    return pre, post, meta
