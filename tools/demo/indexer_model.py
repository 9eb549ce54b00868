"""DeepSeek-V3.2's form of the demo model: a lightning indexer in each layer chooses the tokens that attention reads.

Sources: the DeepSeek-V3.2 technical report (arXiv:2512.02556), section 2.1, for the indexer and its two stages of
training; its published inference code for the order of the entries that are rotated.

Shapes: B sequences, T positions, D hidden size, J heads of the indexer, E entries of such a head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from demo_format import from_hf_state, to_hf_state
from demo_model import Attention, Config, DecoderLayer, Matrix, Model
from torch import Tensor, nn

KEY_EPS = 1e-6  # of the norm of the indexer's keys, as in the published code
NO_LOSS = torch.zeros(())


@dataclasses.dataclass(frozen=True)
class IndexConfig:
    """Sizes of the indexers; field names are those of DeepSeek-V3.2's config.json."""

    index_n_heads: int = 4
    index_head_dim: int = 128
    index_topk: int = 256


def to_hf(cfg: Config, index: IndexConfig, fp8: bool) -> dict[str, Any]:
    """The config.json."""
    own = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **dataclasses.asdict(index)}
    return cfg.to_hf(fp8) | own


class Indexer(nn.Module):
    """Scores of all earlier tokens for each query: `sum_j w_j relu(q_j . k)`."""

    def __init__(self, cfg: Config, index: IndexConfig):
        super().__init__()
        self.index, self.rope = index, cfg.qk_rope_head_dim
        heads, dim = index.index_n_heads, index.index_head_dim
        self.wq_b = Matrix(cfg.q_lora_rank, heads * dim)
        self.wk = Matrix(cfg.hidden_size, dim)
        self.k_norm = nn.LayerNorm(dim, eps=KEY_EPS)
        self.weights_proj = Matrix(cfg.hidden_size, heads)

    def forward(self, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D], q_latent [B, T, q_lora_rank] -> float32 scores [B, T, T]; later tokens have -inf."""
        (b, t, _), index = x.shape, self.index
        q = self._rotate(self.wq_b(q_latent).view(b, t, index.index_n_heads, index.index_head_dim), cos, sin)
        k = self._rotate(self.k_norm(self.wk(x)).unsqueeze(2), cos, sin).squeeze(2)
        weights = self.weights_proj(x).float() * (index.index_n_heads * index.index_head_dim) ** -0.5
        scores = torch.zeros(b, t, t)
        for j in range(index.index_n_heads):
            scores = scores + (q[:, :, j] @ k.mT).relu().float() * weights[:, :, j, None]
        return scores.masked_fill(later_tokens(t), -math.inf)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first entries of x [B, T, heads, E]; pairs are half of them apart, unlike in attention."""
        turned, rest = x.split((self.rope, x.shape[-1] - self.rope), dim=-1)
        first, second = turned.chunk(2, dim=-1)
        c, s = (table[:, None, ::2].to(x.dtype) for table in (cos, sin))
        return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1)


class IndexedAttention(nn.Module):
    """Attention of the demo model with an indexer.

    Attributes: `top`, tokens that a query reads, None: all; `loss`, of the indexer in the last forward pass with
    `learns`: the divergence of its distribution from that of attention, over the tokens that are read, in nats.
    """

    def __init__(self, attention: Attention, index: IndexConfig):
        super().__init__()
        self.attention, self.indexer = attention, Indexer(attention.cfg, index)
        self.top: int | None = None
        self.learns = False
        self.loss = NO_LOSS

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]. The indexer's gradients end at its inputs, as the report says."""
        b, t, _ = x.shape
        q, k, v, q_latent = self.attention.project(x, cos, sin)
        scores = self.indexer(x.detach(), q_latent.detach(), cos, sin)
        hidden = later_tokens(t)
        if self.top is not None and self.top < t:
            hidden = hidden | ~mark_largest(scores.detach(), self.top)
        heads = q.shape[0] // b
        logits = (q @ k.mT).float() * q.shape[-1] ** -0.5
        wide = hidden if hidden.dim() == 2 else hidden.repeat_interleave(heads, 0)
        p = logits.masked_fill(wide, -math.inf).softmax(-1)
        if self.learns:
            target = p.detach().view(b, heads, t, t).mean(1)
            guess = scores.masked_fill(hidden, -math.inf).log_softmax(-1).masked_fill(hidden, 0.0)
            self.loss = F.kl_div(guess, target, reduction="sum") / (b * t)
        return self.attention.join(p.to(v.dtype) @ v, b)


def later_tokens(t: int) -> Tensor:
    """Which tokens come after each position: bool [T, T]."""
    return torch.ones(t, t, dtype=torch.bool).triu(1)


def mark_largest(scores: Tensor, top: int) -> Tensor:
    """The `top` largest of each row of scores [B, T, T], the lower position of equal ones: bool [B, T, T]."""
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :top]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


class SparseModel(nn.Module):
    """The demo model with an indexer in each layer, that of multi-token prediction too."""

    def __init__(self, model: Model, index: IndexConfig, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.model, self.index = model, index
        for layer in _layers(model):
            layer.self_attn = IndexedAttention(layer.self_attn, index)

    def attentions(self) -> list[IndexedAttention]:
        """Of the layers in order, the prediction layer's last."""
        return [layer.self_attn for layer in _layers(self.model)]  # type: ignore[misc]

    def indexers(self) -> Iterator[nn.Parameter]:
        """The parameters of all indexers."""
        return (param for attention in self.attentions() for param in attention.indexer.parameters())

    def set_mode(self, *, top: int | None, learns: bool) -> None:
        """How many tokens a query reads (None: all), and whether the indexers' losses are computed."""
        for attention in self.attentions():
            attention.top, attention.learns, attention.loss = top, learns, NO_LOSS

    def to_hf_state(self) -> dict[str, Tensor]:
        """The weights under DeepSeek-V3.2's tensor names, float32."""
        return {_published(name): value for name, value in to_hf_state(self.model).items()}

    @classmethod
    def from_hf_state(cls, cfg: Config, index: IndexConfig, state: dict[str, Tensor]) -> SparseModel:
        """A model from the tensors of `to_hf_state`."""
        found = cls(from_hf_state(cfg, {k: v for k, v in state.items() if ".indexer." not in k}), index)
        names = {_published(f"model.layers.{i}.self_attn.indexer."): a for i, a in enumerate(found.attentions())}
        for prefix, attention in names.items():
            own = {k.removeprefix(prefix): v.float() for k, v in state.items() if k.startswith(prefix)}
            attention.indexer.load_state_dict(own)
        return found.eval()


def _published(name: str) -> str:
    return name.replace(".self_attn.attention.", ".self_attn.")


def _layers(model: Model) -> list[DecoderLayer]:
    return [*model.layers, model.mtp]  # type: ignore[list-item]


Stage = Callable[[SparseModel, Tensor], tuple[Tensor, Tensor]]
"""A stage of training: window [B, T + 2] -> the loss to descend on, and the mean divergence of an indexer."""


def warm_up(sparse: SparseModel, window: Tensor) -> tuple[Tensor, Tensor]:
    """Every query reads all tokens; the indexers learn from attention's distributions, and nothing else learns."""
    sparse.set_mode(top=None, learns=True)
    states = sparse.model.states(window[:, :-2], torch.float32)
    sparse.model.mtp_states(window[:, 1:-1], states)
    mean = torch.stack([attention.loss for attention in sparse.attentions()]).mean()
    return mean, mean.detach()


def go_sparse(sparse: SparseModel, window: Tensor) -> tuple[Tensor, Tensor]:
    """Queries read what the indexers choose; the model learns the text, the indexers attention over what was chosen."""
    sparse.set_mode(top=sparse.index.index_topk, learns=True)
    main, ahead = sparse.model.losses(window, torch.float32)
    mean = torch.stack([attention.loss for attention in sparse.attentions()]).mean()
    return main + 0.3 * ahead + mean, mean.detach()
