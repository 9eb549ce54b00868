"""What drafts for the demo model, in plain torch: a small Llama and an EAGLE head, and the losses they learn by.

Sources: Llama (arXiv:2302.13971) for the layer; EAGLE (arXiv:2401.15077) for the head and its losses; training later
draft positions on the head's own features follows HASS (arXiv:2408.15766).

Shapes: B sequences, T positions, N = B * T rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from demo_model import HEAD_NORM, Matrix, Model, Norm
from demo_ops import causal_attention
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """Sizes of a draft model or head; field names are those of Llama's config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def rope_table(cfg: DraftConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 .. length - 1, the half's angles twice: [length, head_dim], float32."""
    half = cfg.head_dim // 2
    inv = 1.0 / cfg.rope_theta ** (torch.arange(half, dtype=torch.float64) / half)
    angle = (torch.arange(length, dtype=torch.float64)[:, None] * inv).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, heads, head_dim]; pairs are (i, i + half), as in Llama's Hugging Face layout."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, cfg: DraftConfig):
        super().__init__()
        self.cfg = cfg
        width = cfg.hidden_size
        self.q_proj, self.k_proj, self.v_proj = (Matrix(width, width) for _ in range(3))
        self.o_proj = Matrix(width, width, gain=0.1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        (b, t, _), heads = x.shape, self.cfg.num_attention_heads
        q, k, v = (p(x).view(b, t, heads, -1) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
        q, k, v = (y.transpose(1, 2).reshape(b * heads, t, -1) for y in (q, k, v))
        out = causal_attention(q, k, v).view(b, heads, t, -1)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, cfg: DraftConfig):
        super().__init__()
        self.gate_proj = Matrix(cfg.hidden_size, cfg.intermediate_size)
        self.up_proj = Matrix(cfg.hidden_size, cfg.intermediate_size)
        self.down_proj = Matrix(cfg.intermediate_size, cfg.hidden_size, gain=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward with residuals; EAGLE's first layer has no norm before its attention."""

    def __init__(self, cfg: DraftConfig, first_norm: bool = True):
        super().__init__()
        self.input_layernorm: nn.Module = Norm(cfg.hidden_size, cfg.rms_norm_eps) if first_norm else nn.Identity()
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = Norm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """What both have: sizes, and rotary tables."""

    cos: Tensor
    sin: Tensor

    def __init__(self, cfg: DraftConfig, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.cfg = cfg
        cos, sin = rope_table(cfg, cfg.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def run(self, layers: nn.ModuleList, x: Tensor) -> Tensor:
        """x [B, T, D] through the layers."""
        t = x.shape[1]
        for layer in layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        return x


class DraftLM(Drafter):
    """A Llama with a tied head; `losses` teaches it the demo model's distributions."""

    def __init__(self, cfg: DraftConfig, seed: int = 0):
        super().__init__(cfg, seed)
        self.embed = nn.Parameter(torch.randn(cfg.vocab_size, cfg.hidden_size) * 0.5)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.num_hidden_layers))
        self.norm = Norm(cfg.hidden_size, cfg.rms_norm_eps)
        with torch.no_grad():
            self.norm.weight.fill_(HEAD_NORM)

    @torch.no_grad()
    def start_from(self, teacher: Model) -> None:
        """Take over the demo model's embedding and last norm: most of what a short run would have to learn."""
        if self.embed.shape == teacher.embed.shape:
            self.embed.copy_(teacher.embed)
            self.norm.weight.copy_(teacher.norm.weight)

    def states(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """tokens [B, T] -> the state after the final norm [B, T, D]."""
        return self.norm(self.run(self.layers, F.embedding(tokens, self.embed).to(dtype)))

    def logits(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return F.linear(states, self.embed.to(states.dtype))

    def losses(self, teacher: Model, window: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """window [B, T + 2] -> mean cross entropy under the teacher's distributions, and 0."""
        with torch.no_grad():
            target = teacher.states(window[:, :-2], dtype)
        mine = self.states(window[:, :-2], dtype)
        loss = soft_loss(mine.flatten(0, 1), self.embed, target.flatten(0, 1), teacher.embed)
        return loss, torch.zeros(())


class EagleHead(Drafter):
    """EAGLE-1: `fc([embedding of token i + 1 | feature i])`, one layer, and out comes feature i + 1.

    A feature is the demo model's state after its final norm, which is small; inside, features are divided by `scale`,
    so that training starts with entries near 1. `draft_format.eagle_tensors` multiplies that into the weights: what is
    shipped takes and gives features as they are.

    The published heads have a bias in `fc` or none; this one has none.
    """

    scale: Tensor

    def __init__(self, cfg: DraftConfig, seed: int = 0):
        super().__init__(cfg, seed)
        self.fc = Matrix(2 * cfg.hidden_size, cfg.hidden_size)
        self.layers = nn.ModuleList([Layer(cfg, first_norm=False)])
        self.register_buffer("scale", torch.ones(()))

    @torch.no_grad()
    def start_from(self, teacher: Model) -> None:
        """Measure the features' scale, on weights alone: the last norm makes rows of length 1 times its weight."""
        self.scale.copy_(teacher.norm.weight.float().pow(2).mean().sqrt())

    def predict(self, next_embedding: Tensor, features: Tensor) -> Tensor:
        """Both [B, T, D], features divided by `scale` -> the next features [B, T, D], divided by it too."""
        return self.run(self.layers, self.fc(torch.cat((next_embedding, features), dim=-1)))

    def unroll(self, teacher: Model, tokens: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """Features [B, T, D] for each draft position: for the first made from true features, then from its own.

        Row i of step k stands for the draft made at i + k - 1 whose feature is the head's own: made in step k - 1 at
        row i - 1. Keys are those of the same step, which differs from what happens in use by where the true features
        end.

        Args:
            tokens: tokens 1 .. T of the window [B, T]. states: the teacher's at rows 0 .. T - 1 [B, T, D].
        """
        embedded = F.embedding(tokens, teacher.embed).to(states.dtype)
        features, out = states / self.scale.to(states.dtype), []
        for _ in range(steps):
            out.append(self.predict(embedded, features))
            features = torch.cat((features[:, :1], out[-1][:, :-1]), dim=1)
        return out

    def losses(
        self, teacher: Model, window: Tensor, dtype: torch.dtype, steps: int = 2, feature_weight: float = 0.5
    ) -> tuple[Tensor, Tensor]:
        """window [B, T + 2] -> the token loss (soft cross entropy) and the weighted feature loss (smooth L1), means
        over the unrolled steps.
        """
        with torch.no_grad():
            true = teacher.states(window[:, :-1], dtype)
        states, target = true[:, :-1], true[:, 1:]
        scale = self.scale.to(dtype)
        token, feature = torch.zeros(()), torch.zeros(())
        for made in self.unroll(teacher, window[:, 1:-1], states, steps):
            rows = (made * scale).flatten(0, 1)
            token = token + soft_loss(rows, teacher.embed, target.flatten(0, 1), teacher.embed) / steps
            feature = feature + F.smooth_l1_loss(made.float(), target.float() / self.scale) / steps
        return token, feature_weight * feature


class _SoftLoss(torch.autograd.Function):
    """See `soft_loss`; the gradients are made on the way forward."""

    CHUNK = 512

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, target: Tensor, target_head: Tensor) -> Tensor:
        weight, target_weight = head.to(states.dtype), target_head.to(states.dtype)
        d_states = torch.empty_like(states)
        d_head = torch.zeros_like(head) if head.requires_grad else None
        total = torch.zeros(())
        for first in range(0, states.shape[0], _SoftLoss.CHUNK):
            rows = states[first : first + _SoftLoss.CHUNK]
            log_p = (rows @ weight.t()).log_softmax(-1)
            q = (target[first : first + _SoftLoss.CHUNK] @ target_weight.t()).softmax(-1)
            total -= (q * log_p).sum(-1).float().sum()
            off = log_p.exp() - q
            d_states[first : first + _SoftLoss.CHUNK] = off @ weight
            if d_head is not None:
                d_head += off.t() @ rows
        ctx.save_for_backward(d_states, d_head)
        return total / states.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        d_states, d_head = ctx.saved_tensors
        grad = grad / d_states.shape[0]
        return d_states * grad.to(d_states.dtype), None if d_head is None else d_head * grad, None, None


@torch.compiler.disable
def soft_loss(states: Tensor, head: Tensor, target: Tensor, target_head: Tensor) -> Tensor:
    """Mean cross entropy of states [N, D] under `head` [V, D] for the distributions of `target` [N, D'] under its own
    head [V, D']: what distilling minimizes. Gradients go to `states` and, if it wants one, to `head`.

    Never holds more than one chunk of logits, and these in the dtype of the states.
    """
    return _SoftLoss.apply(states, head, target, target_head)


@torch.no_grad()
def agreement(
    drafter: DraftLM | EagleHead, teacher: Model, held: Tensor, context: int, steps: int = 1, limit: int | None = None
) -> dict[str, Any]:
    """How often a drafter's best token is the demo model's, over windows of `context` of the held-out stream [tokens];
    about `limit` tokens of it, or all.

    `agreement[k]` is of draft position k + 1 given that the text before it is true and, of an EAGLE head, that the last
    k features are its own. `loss` is the cross entropy of draft position 1 for the true tokens, in nats.
    """
    steps = steps if isinstance(drafter, EagleHead) else 1
    windows = list(range((len(held) - 2) // context))
    if limit is not None:  # spread evenly over the text
        windows = windows[:: max(1, len(windows) * context // limit)]
    hits, total, loss, rows = [0.0] * steps, 0, 0.0, max(1, 2048 // context)
    for first in range(0, len(windows), rows):
        each = windows[first : first + rows]
        window = torch.stack([held[i * context : i * context + context + 2] for i in each])
        true = teacher.states(window[:, :-1], torch.float32)
        best = teacher.logits(true[:, 1:]).argmax(-1)
        if isinstance(drafter, EagleHead):
            made = drafter.unroll(teacher, window[:, 1:-1], true[:, :-1], steps)
            each_logits = [teacher.logits(m * drafter.scale) for m in made]
        else:
            each_logits = [drafter.logits(drafter.states(window[:, :-1], torch.float32))[:, 1:]]
        for k, logits in enumerate(each_logits):
            hits[k] += (logits.argmax(-1) == best).sum().item()
        loss += F.cross_entropy(each_logits[0].flatten(0, 1), window[:, 2:].flatten(), reduction="sum").item()
        total += best.numel()
    return {"agreement": [h / total for h in hits], "loss": loss / total, "tokens": total}


def sizes(drafter: nn.Module) -> int:
    """Number of parameters."""
    return sum(math.prod(p.shape) for p in drafter.parameters())
