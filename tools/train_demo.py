#!/usr/bin/env python3
"""Train, export and check the small demo model that ships with Inferplane.

The model has DeepSeek-V3's architecture (multi-head latent attention with V3's own head sizes, a mixture of
experts with sigmoid scores and a correction bias, one multi-token-prediction layer) at a size that fits in
16 MB, and is exported in DeepSeek-V3's own checkpoint format: float8 e4m3 weights with one float32 scale for
each 128 x 128 block.  It is trained on the standard library of the Python that runs this tool, on a CPU.

    python tools/train_demo.py selftest                 # our model against transformers' DeepseekV3ForCausalLM
    python tools/train_demo.py data                     # what would be trained on
    python tools/train_demo.py train --minutes 75       # train (resumable), then export
    python tools/train_demo.py export                   # export the latest checkpoint of the work folder
    python tools/train_demo.py eval                     # recompute the held-out loss from the shipped folder

Sources: DeepSeek-V3 technical report (arXiv:2412.19437) for the architecture, the bias update of section 2.1.2
and the MTP module of section 2.2; the published checkpoints for tensor names and the FP8 block format; Muon as
described by Keller Jordan (https://kellerjordan.github.io/posts/muon/).

Shapes in the docstrings: B sequences, T positions, N = B * T rows, D hidden size, E experts, V vocabulary.
Losses are in nats for each predicted token unless said otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

REPO = Path(__file__).resolve().parent.parent
DEFAULT_OUT = REPO / "core" / "inferplane" / "models" / "demo"
DEFAULT_WORK = Path(tempfile.gettempdir()) / "demo-train"
SIZE_LIMIT = 16_000_000  # bytes, the whole exported folder
FP8_MAX = 448.0  # largest finite float8_e4m3fn
PAD_ROWS = 128  # an expert's rows are padded to a multiple of this
BLOCK = 128  # rows and columns of one scale block
SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")  # ids 0, 1, 2
BOS, EOS, PAD = range(3)
EMBED_STD, HEAD_NORM = 0.5, 0.06  # initial scale of the embedding, initial weight of the norms before the head
HELD_OUT_PART = 25  # one file in this many is held out (4 %)


class UsageError(Exception):
    """A request this tool cannot serve; the message says what was asked and what to do."""


# ---------------------------------------------------------------------------------------------- configuration


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model; field names are those of DeepSeek-V3's config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 8
    first_k_dense_replace: int = 1
    num_attention_heads: int = 2
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 1.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048

    def to_hf(self, fp8: bool) -> dict[str, Any]:
        """The config.json: the published checkpoints' fields and the names transformers 5 adds to them."""
        hf: dict[str, Any] = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "aux_loss_alpha": 0.0,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "ep_size": 1,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 1,
            "pretraining_tp": 1,
            "rope_interleave": True,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_scaling": None,
            "scoring_func": "sigmoid",
            "seq_aux": True,
            "tie_word_embeddings": True,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
        hf.update(dataclasses.asdict(self))
        if fp8:
            hf["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
            }
        return hf

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> Config:
        """The sizes of a config.json written by `to_hf`."""
        return cls(**{f.name: hf[f.name] for f in dataclasses.fields(cls)})


TINY = Config(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=64,
    moe_intermediate_size=24,
    num_hidden_layers=3,
    q_lora_rank=40,
    kv_lora_rank=56,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=20,
    routed_scaling_factor=1.7,
    max_position_embeddings=64,
)


# --------------------------------------------------------------------------------------------------- the model


def rope_table(cfg: Config, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 .. length - 1, each pair's angle twice: [length, qk_rope_head_dim], float32."""
    half = cfg.qk_rope_head_dim // 2
    inv = 1.0 / cfg.rope_theta ** (torch.arange(half, dtype=torch.float64) / half)
    angle = (torch.arange(length, dtype=torch.float64)[:, None] * inv).repeat_interleave(2, dim=1)
    return angle.cos().float(), angle.sin().float()


def quarter_turn(width: int) -> Tensor:
    """The matrix that maps every neighbouring pair (a, b) of a row to (-b, a), [width, width] float32."""
    turn = torch.zeros(width, width)
    even = torch.arange(0, width, 2)
    turn[even, even + 1] = 1.0
    turn[even + 1, even] = -1.0
    return turn


def rotate(x: Tensor, cos: Tensor, sin: Tensor, turn: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, heads, rope_dim]; pairs are neighbours (2i, 2i + 1), as in DeepSeek's code.

    The turn of each pair is a product with a constant matrix: that is exact, and much faster on a CPU than
    strided slices.
    """
    turned = (x.reshape(-1, x.shape[-1]) @ turn.to(x.dtype)).view_as(x)  # two-dimensional: a batched one is slow
    return x * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)


class Matrix(nn.Module):
    """A bias-free linear layer, weight [out, in]."""

    def __init__(self, n_in: int, n_out: int, gain: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * (gain / math.sqrt(n_in)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Norm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class _CausalAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(width), causal) v for q, k [G, T, width] and v [G, T, v_width].

    At training's short contexts plain products are several times faster on a CPU than torch's fused attention,
    above all backwards; the backward is written out to keep every gradient in the layout of its tensor.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = q.shape[1]
        mask = torch.full((t, t), -math.inf, dtype=q.dtype).triu(1)
        p = torch.baddbmm(mask, q, k.mT, alpha=q.shape[-1] ** -0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return torch.bmm(p, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, p = ctx.saved_tensors
        d_p = torch.bmm(grad, v.mT)
        d_s = torch.ops.aten._softmax_backward_data(d_p, p, -1, p.dtype) * q.shape[-1] ** -0.5
        return torch.bmm(d_s, k), torch.bmm(d_s.mT, q), torch.bmm(p.mT, grad)


@torch.compiler.disable
def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See `_CausalAttention`; the scale is 1 / sqrt(width of a key), as there is no YaRN."""
    out: Tensor = _CausalAttention.apply(q, k, v)
    return out


class Attention(nn.Module):
    """Multi-head latent attention, expanded: the latent is up-projected to keys and values for every position."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        heads, eps = cfg.num_attention_heads, cfg.rms_norm_eps
        self.q_a_proj = Matrix(cfg.hidden_size, cfg.q_lora_rank)
        self.q_a_layernorm = Norm(cfg.q_lora_rank, eps)
        self.q_b_proj = Matrix(cfg.q_lora_rank, heads * (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim))
        self.kv_a_proj_with_mqa = Matrix(cfg.hidden_size, cfg.kv_lora_rank + cfg.qk_rope_head_dim)
        self.kv_a_layernorm = Norm(cfg.kv_lora_rank, eps)
        self.kv_b_proj = Matrix(cfg.kv_lora_rank, heads * (cfg.qk_nope_head_dim + cfg.v_head_dim))
        self.o_proj = Matrix(heads * cfg.v_head_dim, cfg.hidden_size, gain=0.1)
        self.register_buffer("turn", quarter_turn(cfg.qk_rope_head_dim), persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]; causal within each of the B sequences."""
        cfg, (b, t, _) = self.cfg, x.shape
        heads, nope, rope, v_dim = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(b, t, heads, nope + rope)
        q_nope, q_rope = q.split((nope, rope), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((cfg.kv_lora_rank, rope), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, t, heads, nope + v_dim)
        k_nope, v = kv.split((nope, v_dim), dim=-1)
        k_rope = rotate(k_rope.unsqueeze(2), cos, sin, self.turn).expand(-1, -1, heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin, self.turn)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        q, k, v = (x.transpose(1, 2).reshape(b * heads, t, -1) for x in (q, k, v))
        out = causal_attention(q, k, v).view(b, heads, t, v_dim)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, heads * v_dim))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = Matrix(width, inner)
        self.up_proj = Matrix(width, inner)
        self.down_proj = Matrix(inner, width, gain=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Gather(torch.autograd.Function):
    """Rows of x [N, D] -> [P, D], each row k times, in expert order; the backward is a gather too, not a scatter.

    `source` [P] is the row of x at each place (padding places repeat row 0), `place` [N * k] where row n's j-th
    copy went.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.k = place.numel() // x.shape[0]
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place).view(-1, ctx.k, grad.shape[-1]).sum(1), None, None


class _Pick(torch.autograd.Function):
    """Rows `place` [M] of x [P, D], each at most once; the backward leaves zeros at the padding places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = x.shape[0]
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, grad.shape[-1]).index_copy_(0, place, grad), None


class _HeadLoss(torch.autograd.Function):
    """Mean cross entropy of states [N, D] under the tied head [V, D], in row chunks; gradients made on the way.

    Never holds more than one chunk of logits, and these in bfloat16: on a CPU that is what training is bound by.
    """

    CHUNK = 512

    @staticmethod
    def forward(ctx: Any, states: Tensor, embed: Tensor, targets: Tensor) -> Tensor:
        head = embed.to(states.dtype)
        d_states, d_embed = torch.empty_like(states), torch.zeros_like(embed)
        total = torch.zeros(())
        for first in range(0, states.shape[0], _HeadLoss.CHUNK):
            rows = states[first : first + _HeadLoss.CHUNK]
            p = (rows @ head.t()).softmax(-1)
            flat = torch.arange(rows.shape[0]) * p.shape[1] + targets[first : first + _HeadLoss.CHUNK]
            hit = p.view(-1)[flat]
            total -= hit.float().clamp_min(1e-30).log().sum()
            p.view(-1)[flat] = hit - 1
            d_states[first : first + _HeadLoss.CHUNK] = p @ head
            d_embed += p.t() @ rows
        ctx.save_for_backward(d_states, d_embed)
        return total / states.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        d_states, d_embed = ctx.saved_tensors
        grad = grad / d_states.shape[0]
        return d_states * grad.to(d_states.dtype), d_embed * grad, None


class MoE(nn.Module):
    """Routed experts beside a shared one: sigmoid scores, group-limited choice, a bias that only steers the choice."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        e, d, inner = cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size
        self.gate = nn.Parameter(torch.randn(e, d) * 0.02)
        self.register_buffer("bias", torch.zeros(e))
        self.register_buffer("load", torch.zeros(e), persistent=False)  # rows each expert saw since the last update
        self.w13 = nn.Parameter(torch.randn(e, 2, inner, d) / math.sqrt(d))  # gate_proj and up_proj
        self.w2 = nn.Parameter(torch.randn(e, d, inner) * (0.1 / math.sqrt(inner)))  # down_proj
        self.shared_experts = GatedMLP(d, cfg.n_shared_experts * inner)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, D] -> chosen experts [N, k] and their weights [N, k] (report, equations 12 to 16)."""
        cfg = self.cfg
        scores = F.linear(x.float(), self.gate).sigmoid()
        with torch.no_grad():
            choice = scores + self.bias
            groups = choice.view(x.shape[0], cfg.n_group, -1)
            best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1).topk(cfg.topk_group, dim=-1).indices
            open_groups = torch.zeros(x.shape[0], cfg.n_group, dtype=torch.bool).scatter_(1, best, True)
            choice = groups.masked_fill(~open_groups[:, :, None], -math.inf).flatten(1)
            chosen = choice.topk(cfg.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * cfg.routed_scaling_factor
        return chosen, weights

    def routed(self, x: Tensor) -> Tensor:
        """x [N, D] -> the weighted sum of the chosen experts [N, D]."""
        chosen, weights = self.route(x)
        k = chosen.shape[1]
        out = self.apply_experts(x, chosen).view(-1, k, x.shape[-1])
        return (out * weights.to(out.dtype).unsqueeze(-1)).sum(1)

    @torch.compiler.disable
    def apply_experts(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x [N, D], chosen [N, k] -> every chosen expert's output [N * k, D], not yet weighted.

        Each expert's rows are padded to a multiple of `PAD_ROWS`: the CPU matmul library compiles a kernel for
        each new shape it meets, which costs more than the padding by far.
        """
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.cfg.n_routed_experts)
        if self.training:
            self.load += counts
        padded = (counts + PAD_ROWS - 1) // PAD_ROWS * PAD_ROWS
        shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
        at = torch.arange(flat.numel()) + shift[flat[order]]  # padded place of each row in expert order
        place = torch.empty_like(order).scatter_(0, order, at)
        sizes = padded.tolist()
        source = torch.zeros(sum(sizes), dtype=torch.int64).scatter_(0, at, order // chosen.shape[1])
        parts = []
        for rows, w13, w2 in zip(
            _Gather.apply(x, source, place).split(sizes), self.w13.flatten(1, 2), self.w2, strict=True
        ):
            gate, up = F.linear(rows, w13).chunk(2, dim=-1)
            parts.append(F.linear(F.silu(gate) * up, w2))
        return _Pick.apply(torch.cat(parts), place)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        return self.routed(x.flatten(0, -2)).view_as(x) + self.shared_experts(x)

    @torch.no_grad()
    def update_bias(self, speed: float) -> None:
        """Raise the bias of experts below the mean load and lower the others by `speed` (report, section 2.1.2).

        The choice depends on differences only, so the biases are kept non-negative: then every score + bias is
        positive, and implementations that mask closed groups with 0 choose as those that mask with -inf do.
        """
        if self.load.sum() > 0:
            self.bias += speed * torch.sign(self.load.mean() - self.load)
            self.bias -= self.bias.min()
            self.load.zero_()


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, cfg: Config, dense: bool):
        super().__init__()
        self.input_layernorm = Norm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = Norm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp: nn.Module = GatedMLP(cfg.hidden_size, cfg.intermediate_size) if dense else MoE(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class MTPLayer(DecoderLayer):
    """The multi-token-prediction layer: a decoder layer over eh_proj([enorm(next token's embedding); hnorm(h)]).

    Row i takes the embedding of token i + 1 and the main model's state h_i *after* its final norm (what the
    published checkpoints expect), and predicts token i + 2.  Rows keep the main model's position i in the rotary
    embedding; attention sees rows 0 .. i.
    """

    def __init__(self, cfg: Config):
        super().__init__(cfg, dense=False)
        self.enorm = Norm(cfg.hidden_size, cfg.rms_norm_eps)
        self.hnorm = Norm(cfg.hidden_size, cfg.rms_norm_eps)
        self.eh_proj = Matrix(2 * cfg.hidden_size, cfg.hidden_size)
        self.shared_head_norm = Norm(cfg.hidden_size, cfg.rms_norm_eps)

    def predict(self, next_embedding: Tensor, state: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Both [B, T, D] -> [B, T, D], ready for the shared output head."""
        x = self.eh_proj(torch.cat((self.enorm(next_embedding), self.hnorm(state)), dim=-1))
        return self.shared_head_norm(self(x, cos, sin))


class Model(nn.Module):
    """The whole model; the output head is the embedding (tied)."""

    def __init__(self, cfg: Config, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.cfg = cfg
        # A wide embedding keeps a token's identity visible in the residual stream beside what the layers add; as
        # the head shares it, the last norm starts small, so that the first logits are near zero.
        self.embed = nn.Parameter(torch.randn(cfg.vocab_size, cfg.hidden_size) * EMBED_STD)
        self.layers = nn.ModuleList(
            DecoderLayer(cfg, dense=i < cfg.first_k_dense_replace) for i in range(cfg.num_hidden_layers)
        )
        self.norm = Norm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mtp = MTPLayer(cfg)
        cos, sin = rope_table(cfg, cfg.max_position_embeddings)
        with torch.no_grad():
            for norm in (self.norm, self.mtp.shared_head_norm):
                norm.weight.fill_(HEAD_NORM)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def states(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """tokens [B, T] -> the state after the final norm [B, T, D], activations in `dtype`."""
        t = tokens.shape[1]
        x = F.embedding(tokens, self.embed).to(dtype)
        for layer in self.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        return self.norm(x)

    def mtp_states(self, next_tokens: Tensor, states: Tensor) -> Tensor:
        """Tokens 1 .. T [B, T] and the main states of rows 0 .. T - 1 [B, T, D] -> MTP states [B, T, D]."""
        t = next_tokens.shape[1]
        return self.mtp.predict(F.embedding(next_tokens, self.embed).to(states.dtype), states, self.cos[:t], self.sin[:t])

    def logits(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return F.linear(states, self.embed.to(states.dtype))

    def losses(self, window: Tensor, dtype: torch.dtype, with_mtp: bool = True) -> tuple[Tensor, Tensor]:
        """window [B, T + 2] -> mean loss of tokens 1 .. T and of MTP for tokens 2 .. T + 1."""
        states = self.states(window[:, :-2], dtype)
        main = self.head_loss(states, window[:, 1:-1])
        if not with_mtp:
            return main, torch.zeros(())
        return main, self.head_loss(self.mtp_states(window[:, 1:-1], states), window[:, 2:])

    @torch.compiler.disable
    def head_loss(self, states: Tensor, targets: Tensor) -> Tensor:
        """states [B, T, D], targets [B, T] -> mean loss."""
        loss: Tensor = _HeadLoss.apply(states.flatten(0, 1), self.embed, targets.flatten())
        return loss


# ------------------------------------------------------------------------------------- checkpoint tensors (HF)


def quantize_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [n, k] -> float8_e4m3fn [n, k] and float32 scale_inv [ceil(n / 128), ceil(k / 128)]; w = q * scale_inv."""
    n, k = w.shape
    padded = F.pad(w.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp_min(1e-12) / FP8_MAX
    q = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).view_as(padded)[:n, :k]
    return q.to(torch.float8_e4m3fn).contiguous(), scale


def dequantize_blocks(q: Tensor, scale: Tensor) -> Tensor:
    """The inverse of `quantize_blocks`, float32 [n, k]."""
    n, k = q.shape
    wide = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return q.float() * wide


def hf_name(name: str, cfg: Config) -> str:
    """Our parameter's name -> DeepSeek-V3's; experts and the gate are handled by `to_hf_state`."""
    if name == "embed":
        return "model.embed_tokens.weight"
    name = name.replace("mtp.", f"layers.{cfg.num_hidden_layers}.").replace("shared_head_norm", "shared_head.norm")
    return "model." + name


def to_hf_state(model: Model) -> dict[str, Tensor]:
    """The model's weights under DeepSeek-V3's tensor names, float32."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value, full = value.detach().float(), hf_name(name, model.cfg)
        stem, _, leaf = full.rpartition(".")
        if leaf == "gate":
            state[f"{stem}.gate.weight"] = value
        elif leaf == "bias":
            state[f"{stem}.gate.e_score_correction_bias"] = value
        elif leaf == "w13":
            for e in range(value.shape[0]):
                state[f"{stem}.experts.{e}.gate_proj.weight"] = value[e, 0]
                state[f"{stem}.experts.{e}.up_proj.weight"] = value[e, 1]
        elif leaf == "w2":
            for e in range(value.shape[0]):
                state[f"{stem}.experts.{e}.down_proj.weight"] = value[e]
        else:
            state[full] = value
    return state


def from_hf_state(cfg: Config, state: dict[str, Tensor]) -> Model:
    """A float32 model from the tensors of `to_hf_state` (or of an exported, dequantized file)."""
    model = Model(cfg)
    ours: dict[str, Tensor] = {}
    for name in model.state_dict():
        full = hf_name(name, cfg)
        stem, _, leaf = full.rpartition(".")
        experts = range(cfg.n_routed_experts)
        if leaf == "gate":
            ours[name] = state[f"{stem}.gate.weight"]
        elif leaf == "bias":
            ours[name] = state[f"{stem}.gate.e_score_correction_bias"]
        elif leaf == "w13":
            pairs = [[state[f"{stem}.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")] for e in experts]
            ours[name] = torch.stack([torch.stack(pair) for pair in pairs])
        elif leaf == "w2":
            ours[name] = torch.stack([state[f"{stem}.experts.{e}.down_proj.weight"] for e in experts])
        else:
            ours[name] = state[full]
    model.load_state_dict({name: value.float() for name, value in ours.items()})
    return model.eval()


def is_fp8(name: str, value: Tensor) -> bool:
    """Whether a tensor is stored in FP8: every matrix but the embedding and the router's gate."""
    return value.dim() == 2 and name.endswith("_proj.weight") or name.endswith("_proj_with_mqa.weight")


# ------------------------------------------------------------------------------------------------- the dataset

SKIP_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Generated tables, not code: they would spend capacity on numbers and names that nothing predicts.  The
# _sysconfigdata module is also written for one machine by its build.
SKIP_FILES = ("pydoc_data/topics.py", "html/entities.py")


def stdlib_files() -> list[tuple[str, str]]:
    """(path relative to the standard library, text) of every source file used, sorted by path."""
    root = Path(os.__file__).resolve().parent
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(d for d in folders if d not in SKIP_DIRS)
        for name in names:
            path = (Path(folder) / name).relative_to(root).as_posix()
            if not name.endswith(".py") or path in SKIP_FILES or name.startswith("_sysconfigdata"):
                continue
            try:
                text = (root / path).read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue  # a handful of files declare another encoding
            if path.startswith("encodings/") and ("decoding_table" in text or "decoding_map" in text):
                continue  # character maps: tables again
            if text.strip():
                files.append((path, text))
    if not files:
        raise UsageError(f"no Python sources under {root}: run this tool with a Python that has its standard library")
    return sorted(files)


def is_held_out(path: str) -> bool:
    """Whether a file is kept for evaluation: by a hash of its relative path, so the split never moves."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % HELD_OUT_PART == 0


def data_hash(files: list[tuple[str, str]]) -> str:
    """sha256 over the sorted paths and contents."""
    digest = hashlib.sha256()
    for path, text in files:
        digest.update(path.encode() + b"\0" + hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


# White space stands apart from words, newlines apart from indentation, and digits come one at a time: with a
# vocabulary this small, merges are better spent on words, and a small model predicts such tokens well.
SPLIT = r"_?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|[\r\n]+|[^\S\r\n]+"


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer (`tokenizers.Tokenizer`) of exactly `vocab_size` entries."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    if tok.get_vocab_size() != vocab_size:
        raise UsageError(f"the texts gave {tok.get_vocab_size()} tokens, {vocab_size} are needed: use more text")
    return tok


@dataclasses.dataclass
class Dataset:
    """Tokens of every file, each ended by eos."""

    files: list[tuple[str, str]]
    tokenizer: Any
    train: list[np.ndarray]
    held: list[np.ndarray]
    held_bytes: int

    @classmethod
    def build(cls, vocab_size: int, tokenizer: Any = None) -> Dataset:
        """Read the standard library; train a tokenizer on the training part unless one is given."""
        files = stdlib_files()
        train = [text for path, text in files if not is_held_out(path)]
        held = [text for path, text in files if is_held_out(path)]
        tok = tokenizer or train_tokenizer(train, vocab_size)

        def encode(texts: list[str]) -> list[np.ndarray]:
            return [np.array([*e.ids, EOS], dtype=np.int32) for e in tok.encode_batch_fast(texts)]

        return cls(files, tok, encode(train), encode(held), sum(len(t.encode()) for t in held))

    def batches(self, seed: int, cursor: list[int]) -> Iterator[Any]:
        """A generator taking (rows, width) by send() and giving windows [rows, width] int64.

        `cursor` is [epoch, offset] and is kept up to date: a new generator with the same cursor goes on from
        there.  Each epoch puts the files in another order and cuts the stream elsewhere.
        """
        rows, width = yield
        while True:
            epoch, offset = cursor
            rng = np.random.default_rng((seed, epoch))
            order = rng.permutation(len(self.train))
            stream = np.concatenate([self.train[i] for i in order])
            stream = np.roll(stream, -int(rng.integers(len(stream))))
            while offset + rows * width <= len(stream):
                window = torch.from_numpy(stream[offset : offset + rows * width].astype(np.int64)).view(rows, width)
                offset += rows * (width - 2)  # neighbouring windows share the two look-ahead tokens
                cursor[:] = [epoch, offset]
                rows, width = yield window
            cursor[:] = [epoch + 1, 0]


# -------------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(
    model: Model, held: list[np.ndarray], context: int, dtype: torch.dtype, rows: int = 8, limit: int | None = None
) -> dict[str, float]:
    """Held-out loss: the files as one stream cut in windows of `context` predicted tokens, nothing carried over.

    Gives `loss` (main model), `mtp_loss` (its prediction two ahead), `mtp_acceptance` (how often MTP's best
    token for t + 2 is the main model's best token there, given the true text) and `tokens`.
    """
    stream = np.concatenate(held).astype(np.int64)
    count = (len(stream) - 2) // context
    if limit is not None:
        count = min(count, limit // context)
    if count == 0:
        raise UsageError(f"the held-out part has {len(stream)} tokens, too few for a context of {context}")
    starts = np.linspace(0, len(stream) - 2 - context, count).astype(np.int64) if limit else np.arange(count) * context
    was_training = model.training
    model.eval()
    total = ahead_total = 0.0
    agree = compared = 0
    for first in range(0, count, rows):
        window = torch.from_numpy(np.stack([stream[s : s + context + 2] for s in starts[first : first + rows]]))
        states = model.states(window[:, :-2], dtype)
        logits = model.logits(states).float()
        total += F.cross_entropy(logits.flatten(0, 1), window[:, 1:-1].flatten(), reduction="sum").item()
        ahead = model.logits(model.mtp_states(window[:, 1:-1], states)).float()
        ahead_total += F.cross_entropy(ahead.flatten(0, 1), window[:, 2:].flatten(), reduction="sum").item()
        # Row i of MTP and row i + 1 of the main model both predict token i + 2.
        agree += (ahead[:, :-1].argmax(-1) == logits[:, 1:].argmax(-1)).sum().item()
        compared += ahead[:, :-1].shape[0] * (context - 1)
    model.train(was_training)
    tokens = count * context
    return {
        "loss": total / tokens,
        "mtp_loss": ahead_total / tokens,
        "mtp_acceptance": agree / compared,
        "tokens": tokens,
    }


# -------------------------------------------------------------------------------------------------- optimizers


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """g [..., n, k] -> a matrix near U V^T of each g = U S V^T, by a quintic Newton-Schulz iteration in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalized, for stacks of matrices; float32 masters of bfloat16 parameters [..., n, k]."""

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95):
        self.params, self.momentum = params, momentum
        self.masters = [p.detach().float().clone() for p in params]
        self.buffers = [torch.zeros_like(m) for m in self.masters]
        self.groups: dict[tuple[int, ...], list[int]] = {}
        for i, p in enumerate(params):
            self.groups.setdefault(tuple(p.shape[-2:]), []).append(i)

    @torch.no_grad()
    def step(self, lr: float, decay: float) -> None:
        """One update of the masters; `publish` hands them to the parameters."""
        for (n, k), members in self.groups.items():
            updates = []
            for i in members:
                grad = self.params[i].grad
                assert grad is not None
                g = grad.float()
                self.buffers[i].lerp_(g, 1 - self.momentum)
                updates.append(g.lerp(self.buffers[i], self.momentum).reshape(-1, n, k))
                self.params[i].grad = None
            directions = orthogonalize(torch.cat(updates)).split([u.shape[0] for u in updates])
            scale = lr * math.sqrt(max(1.0, n / k))
            for i, direction in zip(members, directions, strict=True):
                master = self.masters[i]
                master.mul_(1 - lr * decay).sub_(direction.float().view_as(master), alpha=scale)

    @torch.no_grad()
    def publish(self, fp8: bool) -> None:
        """Copy the masters to the parameters, rounded through FP8 first if asked (straight-through training)."""
        for param, master in zip(self.params, self.masters, strict=True):
            if not fp8:
                param.copy_(master)
                continue
            for p, m in zip(
                param.view(-1, *param.shape[-2:]), master.view(-1, *master.shape[-2:]), strict=True
            ):
                p.copy_(dequantize_blocks(*quantize_blocks(m)))

    def state(self) -> dict[str, Any]:
        return {"masters": self.masters, "buffers": self.buffers}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        for mine, theirs in zip(self.masters + self.buffers, state["masters"] + state["buffers"], strict=True):
            mine.copy_(theirs)


def is_muon(name: str) -> bool:
    """Whether a parameter is a hidden matrix (trained by Muon in bfloat16); the rest is AdamW's, in float32."""
    return name.endswith((".w13", ".w2", "_proj.weight", "_proj_with_mqa.weight"))


# ---------------------------------------------------------------------------------------------------- training


@dataclasses.dataclass
class Options:
    """Training options, see `--help`."""

    minutes: float | None = 10.0
    steps: int | None = None
    tokens_per_step: str = "0:4096,0.25:8192"
    micro_rows: int = 4096
    context: str = "0:256,0.35:512,0.75:1024,0.93:2048"
    muon_lr: float = 0.025
    adam_lr: float = 0.006
    embed_lr: float = 0.03
    weight_decay: float = 0.1
    warmup: float = 0.02
    cooldown: float = 0.7
    mtp_weight: float = 0.3
    bias_speed: float = 0.002
    fp8_from: float = 0.93
    seed: int = 1234
    threads: int = 1
    compile: bool = False
    checkpoint_minutes: float = 4.0
    eval_minutes: float = 5.0

    @staticmethod
    def at(schedule: str, progress: float) -> int:
        """The value in force at a progress of 0 .. 1 by a schedule like "0:256,0.5:512"."""
        current = 0
        for item in schedule.split(","):
            start, _, value = item.partition(":")
            if float(start) <= progress:
                current = int(value)
        return current

    def lr_factor(self, progress: float) -> float:
        """Warm-up, plateau, then linearly to zero over the last `cooldown` of the budget."""
        if progress < self.warmup:
            return max(progress / self.warmup, 0.02)
        return min(1.0, max(0.0, (1.0 - progress) / self.cooldown))


def float_copy(model: Model, muon: Muon) -> Model:
    """A float32 evaluation copy made of the optimizer's masters."""
    copy = Model(model.cfg)
    copy.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    names = {id(p): name for name, p in model.named_parameters()}
    mine = dict(copy.named_parameters())
    with torch.no_grad():
        for param, master in zip(muon.params, muon.masters, strict=True):
            mine[names[id(param)]].copy_(master)
    return copy.eval()


def save_atomically(obj: Any, path: Path) -> None:
    """torch.save that never leaves half a file."""
    part = path.with_suffix(".part")
    torch.save(obj, part)
    part.replace(path)


def train(cfg: Config, opt: Options, work: Path, resume: bool) -> None:
    """Train to the end of the budget; writes work/last.pt (resumable), work/final.pt and work/log.jsonl."""
    torch.set_num_threads(opt.threads)
    work.mkdir(parents=True, exist_ok=True)
    data = Dataset.build(cfg.vocab_size)
    (work / "tokenizer.json").write_text(data.tokenizer.to_str(), encoding="utf-8")
    model = Model(cfg, opt.seed)
    for name, param in model.named_parameters():
        if is_muon(name):
            param.data = param.data.bfloat16()
    muon_params = [p for n, p in model.named_parameters() if is_muon(n)]
    small = [p for n, p in model.named_parameters() if not is_muon(n) and n != "embed"]
    other = [model.embed, *small]
    muon = Muon(muon_params)
    groups = [{"params": [model.embed], "peak": opt.embed_lr}, {"params": small, "peak": opt.adam_lr}]
    adam = torch.optim.AdamW(groups, lr=opt.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    step, seen, elapsed, cursor = 0, 0, 0.0, [0, 0]
    last = work / "last.pt"
    if resume and last.exists():
        saved = torch.load(last, weights_only=False)
        if saved["config"] != dataclasses.asdict(cfg):
            raise UsageError(f"{last} is of another model size: use another --work folder or leave out --resume")
        model.load_state_dict(saved["model"])
        muon.load(saved["muon"])
        adam.load_state_dict(saved["adam"])
        step, seen, elapsed, cursor = saved["step"], saved["seen"], saved["elapsed"], saved["cursor"]
    stream = data.batches(opt.seed, cursor)
    next(stream)
    moes = [m for m in model.modules() if isinstance(m, MoE)]
    started = time.monotonic() - elapsed
    next_eval, next_save, mean, logged = elapsed, elapsed + 60 * opt.checkpoint_minutes, 0.0, (seen, elapsed)
    if opt.compile:  # one graph for each kind of layer and context; the default limit would fall back silently
        torch._dynamo.config.recompile_limit = 64
    losses = torch.compile(model.losses, dynamic=False) if opt.compile else model.losses
    log = (work / "log.jsonl").open("a", encoding="utf-8")

    def note(**what: Any) -> None:
        line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in what.items()})
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    def snapshot() -> dict[str, Any]:
        return {
            "config": dataclasses.asdict(cfg),
            "options": dataclasses.asdict(opt),
            "model": model.state_dict(),
            "muon": muon.state(),
            "adam": adam.state_dict(),
            "step": step,
            "seen": seen,
            "elapsed": time.monotonic() - started,
            "cursor": list(cursor),
        }

    total_params = sum(p.numel() for p in model.parameters())
    note(event="start", parameters=total_params, train_tokens=sum(map(len, data.train)), step=step)
    model.train()
    while True:
        elapsed = time.monotonic() - started
        progress = step / opt.steps if opt.steps else elapsed / (60 * opt.minutes)
        if progress >= 1:
            break
        context = Options.at(opt.context, progress)
        micros = max(1, round(Options.at(opt.tokens_per_step, progress) / opt.micro_rows))
        for _ in range(micros):
            window = stream.send((opt.micro_rows // context, context + 2))
            main, ahead = losses(window, torch.bfloat16, opt.mtp_weight > 0)
            ((main + opt.mtp_weight * ahead) / micros).backward()
            mean = 0.98 * mean + 0.02 * main.item() if mean else main.item()
            seen += opt.micro_rows // context * context
        factor = opt.lr_factor(progress)
        for group in adam.param_groups:
            group["lr"] = group["peak"] * factor
        muon.step(opt.muon_lr * factor, opt.weight_decay)
        torch.nn.utils.clip_grad_norm_(other, 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        muon.publish(fp8=progress >= opt.fp8_from)
        for moe in moes:
            moe.update_bias(opt.bias_speed * factor)
        step += 1
        now = time.monotonic() - started
        if step % 50 == 0:
            speed = (seen - logged[0]) / (now - logged[1])
            logged = (seen, now)
            note(
                step=step,
                seconds=round(now),
                loss=mean,
                mtp=ahead.item(),
                lr=factor,
                tokens_per_second=round(speed),
                context=context,
                epoch=cursor[0],
            )
        if now >= next_eval + 60 * opt.eval_minutes:
            result = evaluate(model, data.held, context, torch.bfloat16, limit=20_000)
            note(event="held-out", step=step, seen=seen, **result)
            next_eval = now
        if now >= next_save:
            save_atomically(snapshot(), last)
            next_save = now + 60 * opt.checkpoint_minutes
    save_atomically(snapshot(), last)
    final = float_copy(model, muon)
    save_atomically(
        {
            "config": dataclasses.asdict(cfg),
            "options": dataclasses.asdict(opt),
            "state": final.state_dict(),
            "step": step,
            "seen": seen,
            "elapsed": time.monotonic() - started,
        },
        work / "final.pt",
    )
    result = evaluate(final, data.held, Options.at(opt.context, 1.0), torch.float32, limit=40_000)
    note(event="end", step=step, seen=seen, minutes=(time.monotonic() - started) / 60, **result)


# ------------------------------------------------------------------------------------------------------- export

README = """# Inferplane demo model

A {params:.1f}-million-parameter language model with DeepSeek-V3's architecture (multi-head latent attention with V3's
head sizes, 8 routed experts and a shared one, one multi-token-prediction layer) in DeepSeek-V3's FP8 checkpoint format
(float8 e4m3 weights, one float32 scale for each 128 x 128 block). It exists so that the platform can be tried, tested
and measured without a download: it exercises the code paths of the large model at a size that runs on any CPU.

It was trained for {minutes:.0f} minutes on a CPU, on the source code of Python's standard library and nothing else,
so it continues Python code, loosely. It is a plain completion model and **not a chat model**: the chat template only
joins the contents of the messages by newlines, without roles or markers.

Held-out loss (files of the standard library kept out of training): {loss:.3f} nats/token, {byte:.3f} nats/byte,
measured on this folder's weights; `training.json` has all measurements and what they were made with. Trained at contexts
of up to {context} tokens.

Layout notes: the output head is tied to the embedding; layer {mtp} is the multi-token-prediction layer, whose embedding
and head are the main model's and are not repeated in the file. Its row i takes the embedding of token i + 1 and the main
model's state i after the final norm, at rotary position i.

Made by `tools/train_demo.py` of the project (`train`, then `export`); `tools/train_demo.py eval` recomputes the loss.
The training text is Python's own source, which is under the PSF License Agreement
(https://docs.python.org/3/license.html).
"""

# No trailing newline after the last message: completion goes on right where the text ends.
CHAT_TEMPLATE = "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ message['content'] }}{% endfor %}"


def export(work: Path, out: Path) -> None:
    """Write the Hugging Face folder from work/final.pt (or last.pt), measure it and describe it in training.json."""
    from safetensors.torch import save_file

    source = work / "final.pt"
    if not source.exists():
        raise UsageError(f"{source} does not exist: run `train` with the same --work folder first")
    saved = torch.load(source, weights_only=False)
    cfg, opt = Config(**saved["config"]), Options(**saved["options"])
    model = Model(cfg)
    model.load_state_dict(saved["state"])
    model.eval()
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(work / "tokenizer.json"))
    data = Dataset.build(cfg.vocab_size, tok)
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, value in to_hf_state(model).items():
        if is_fp8(name, value):
            tensors[name], tensors[name + "_scale_inv"] = quantize_blocks(value)
        elif name.endswith("e_score_correction_bias"):
            tensors[name] = value.float().contiguous()
        else:
            tensors[name] = value.bfloat16().contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tok.save(str(out / "tokenizer.json"), pretty=False)

    def write(name: str, content: Any) -> None:
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    write("config.json", cfg.to_hf(fp8=True))
    write("generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False})
    write(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIALS[BOS],
            "eos_token": SPECIALS[EOS],
            "pad_token": SPECIALS[PAD],
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": cfg.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    context = Options.at(opt.context, 1.0)
    measured = {
        "float32_in_memory": evaluate(model, data.held, context, torch.float32),
        "exported_fp8_dequantized_float32": evaluate(load_folder(out)[1], data.held, context, torch.float32),
    }
    per_token = data.held_bytes / sum(map(len, data.held))
    for result in measured.values():
        result["loss_per_byte"] = result["loss"] / per_token
    write(
        "training.json",
        {
            "what": "Inferplane demo model: DeepSeek-V3 architecture, trained on Python's standard library",
            "loss_unit": "nats; mean over held-out tokens, windows of `context` tokens with nothing carried over",
            "context": context,
            "held_out": measured,
            "held_out_bytes_per_token": per_token,
            "parameters": sum(p.numel() for p in model.parameters()),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "files": len(data.files),
            "files_held_out": sum(is_held_out(path) for path, _ in data.files),
            "files_sha256": data_hash(data.files),
            "train_tokens": sum(map(len, data.train)),
            "tokens_seen": saved["seen"],
            "steps": saved["step"],
            "wall_minutes": round(saved["elapsed"] / 60, 1),
            "seed": opt.seed,
            "tokenizer": {
                "kind": "byte-level BPE",
                "vocab_size": cfg.vocab_size,
                "split": SPLIT,
                "sha256": hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest(),
            },
            "options": dataclasses.asdict(opt),
        },
    )
    result = measured["exported_fp8_dequantized_float32"]
    text = README.format(
        params=sum(p.numel() for p in model.parameters()) / 1e6,
        minutes=saved["elapsed"] / 60,
        loss=result["loss"],
        byte=result["loss_per_byte"],
        context=context,
        mtp=cfg.num_hidden_layers,
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    size = sum(p.stat().st_size for p in out.iterdir() if p.is_file())
    print(json.dumps({"folder": str(out), "bytes": size, "held_out": measured}, indent=2))
    if size > SIZE_LIMIT:
        raise UsageError(f"{out} has {size} bytes, the limit is {SIZE_LIMIT}: lower the sizes in Config")


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the dequantized float32 tensors of an exported folder."""
    from safetensors.torch import load_file

    for name in ("config.json", "model.safetensors"):
        if not (folder / name).exists():
            raise UsageError(f"{folder / name} does not exist: give --model the exported folder")
    raw = load_file(folder / "model.safetensors")
    state = {}
    for name, value in raw.items():
        if not name.endswith("_scale_inv"):
            scale = raw.get(name + "_scale_inv")
            state[name] = value.float() if scale is None else dequantize_blocks(value, scale)
    return json.loads((folder / "config.json").read_text(encoding="utf-8")), state


def load_folder(folder: Path) -> tuple[Config, Model]:
    """A float32 `Model` from an exported folder."""
    hf, state = read_folder(folder)
    cfg = Config.from_hf(hf)
    return cfg, from_hf_state(cfg, state)


def transformers_model(hf: dict[str, Any], state: dict[str, Tensor]) -> Any:
    """transformers' DeepseekV3ForCausalLM with these float32 weights, by way of its own loader."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    hf = {k: v for k, v in hf.items() if k != "quantization_config"} | {"torch_dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf), encoding="utf-8")
        extra = f"model.layers.{hf['num_hidden_layers']}."  # transformers has no MTP layer in this class
        main = {k: v.contiguous() for k, v in state.items() if not k.startswith(extra)}
        save_file(main, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def check_folder(folder: Path, with_transformers: bool) -> None:
    """Recompute the held-out loss of an exported folder; compare with its training.json."""
    from tokenizers import Tokenizer

    cfg, model = load_folder(folder)
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    data = Dataset.build(cfg.vocab_size, Tokenizer.from_file(str(folder / "tokenizer.json")))
    if data_hash(data.files) != record["files_sha256"]:
        print(
            f"note: this Python ({platform.python_version()}) has another standard library than the one the model "
            f"was trained on ({record['python']}): the held-out files differ, and so will the loss",
            file=sys.stderr,
        )
    context = record["context"]
    result = evaluate(model, data.held, context, torch.float32)
    result["loss_per_byte"] = result["loss"] * sum(map(len, data.held)) / data.held_bytes
    result["recorded_loss"] = record["held_out"]["exported_fp8_dequantized_float32"]["loss"]
    if with_transformers:
        theirs = transformers_model(*read_folder(folder))
        stream = np.concatenate(data.held).astype(np.int64)
        count, total = (len(stream) - 2) // context, 0.0
        with torch.no_grad():
            for i in range(count):
                window = torch.from_numpy(stream[i * context : i * context + context + 1])
                logits = theirs(window[None, :-1], use_cache=False).logits[0]
                total += F.cross_entropy(logits.float(), window[1:], reduction="sum").item()
        result["loss_transformers"] = total / (count * context)
    print(json.dumps(result, indent=2))


# ----------------------------------------------------------------------------------------------------- selftest


def selftest() -> None:
    """Check the model, its gradients' plumbing and the formats at a tiny size, against transformers."""
    torch.manual_seed(0)
    model = Model(TINY).eval()
    with torch.no_grad():
        for param in model.parameters():  # nothing at its initial value, norms included
            param.copy_(torch.randn_like(param) * 0.3 + (1.0 if param.dim() == 1 else 0.0))
        for module in model.modules():
            if isinstance(module, MoE):
                module.bias.copy_(torch.rand_like(module.bias) * 0.5)
    state = to_hf_state(model)
    again = from_hf_state(TINY, state)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items()), "names do not round-trip"
    tokens = torch.randint(0, TINY.vocab_size, (3, 33))
    with torch.no_grad():
        ours = model.logits(model.states(tokens, torch.float32))
        theirs = transformers_model(TINY.to_hf(fp8=False), state)(tokens, use_cache=False).logits
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    print(f"logits against transformers' DeepseekV3ForCausalLM: relative error {error:.1e}")
    assert error < 1e-5, "our model and transformers' differ"

    moe = next(m for m in model.modules() if isinstance(m, MoE))
    x = torch.randn(17, TINY.hidden_size, requires_grad=True)
    probe = torch.randn(17, TINY.hidden_size)
    (moe.routed(x) * probe).sum().backward()
    fast = x.grad
    y = x.detach().requires_grad_()
    chosen, weights = moe.route(y)
    plain = torch.zeros(17, TINY.hidden_size)
    for n in range(17):
        for e, weight in zip(chosen[n].tolist(), weights[n], strict=True):
            hidden = F.silu(moe.w13[e, 0] @ y[n]) * (moe.w13[e, 1] @ y[n])
            plain = plain.index_add(0, torch.tensor([n]), (weight * (moe.w2[e] @ hidden))[None])
    (plain * probe).sum().backward()
    error = ((fast - y.grad).abs().max() / y.grad.abs().max()).item()
    print(f"gradient through the experts against a loop over tokens: relative error {error:.1e}")
    assert error < 1e-5, "the grouped experts' gradient is wrong"

    w = torch.randn(300, 200)
    q, scale = quantize_blocks(w)
    error = ((dequantize_blocks(q, scale) - w).abs().max() / w.abs().max()).item()
    print(f"FP8 blocks {tuple(scale.shape)}: relative error {error:.1e}")
    assert scale.shape == (3, 2) and error < 2**-4, "FP8 blocks are wrong"

    g = torch.randn(4, 64, 96)
    s = torch.linalg.svdvals(orthogonalize(g).float())
    print(f"Newton-Schulz: singular values {s.min().item():.2f} to {s.max().item():.2f}")
    assert 0.3 < s.min().item() and s.max().item() < 1.6, "the Newton-Schulz iteration is wrong"

    window = torch.randint(0, TINY.vocab_size, (2, 12))
    with torch.no_grad():
        _, ahead = model.losses(window, torch.float32)
        changed = window.clone()
        changed[:, -1] = (changed[:, -1] + 1) % TINY.vocab_size  # the last target only
        a = model.mtp_states(window[:, 1:-1], model.states(window[:, :-2], torch.float32))
        b = model.mtp_states(changed[:, 1:-1], model.states(changed[:, :-2], torch.float32))
    assert torch.equal(a, b) and ahead.isfinite(), "the MTP layer sees its own target"

    texts = ["def f(x):\n\treturn x  # naïve — 你好 🙂\r\n", " \n\n  \x00\x7f\u200b e\u0301", "1234567 a_b.c(*d) != \\'x\\'\n" * 9]
    tok = train_tokenizer(texts, 280)
    assert all(tok.decode(tok.encode(t).ids, skip_special_tokens=False) == t for t in texts), "text does not round-trip"
    print("tokenizer round-trips; all checks passed")


# --------------------------------------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run; 0 done, 1 failed with one line of why, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, formatter_class=parser.formatter_class)

    command("selftest", "check the model against transformers at a tiny size")
    command("data", "show what would be trained on")
    fit = command("train", "train within a budget, then export")
    fit.add_argument("--minutes", type=float, default=10.0, help="wall-clock budget; the learning rate follows it")
    fit.add_argument("--steps", type=int, help="a budget in steps instead: repeatable whatever the machine's speed")
    fit.add_argument("--resume", action="store_true", help="go on from the work folder's last checkpoint")
    fit.add_argument("--no-export", action="store_true", help="train only")
    for field, text in {
        "tokens_per_step": "progress:tokens pairs, tokens in one optimizer step by progress (0 to 1)",
        "micro_rows": "tokens in one forward and backward pass",
        "context": "progress:length pairs, training windows by progress (0 to 1)",
        "muon_lr": "peak learning rate of the hidden matrices (Muon)",
        "adam_lr": "peak learning rate of norms and router gates (AdamW)",
        "embed_lr": "peak learning rate of the embedding (AdamW)",
        "weight_decay": "decoupled decay of the hidden matrices, times the learning rate",
        "warmup": "part of the budget in which the learning rate rises",
        "cooldown": "part of the budget in which it falls to zero",
        "mtp_weight": "weight of the multi-token-prediction loss",
        "bias_speed": "step of the experts' correction bias",
        "fp8_from": "progress from which the forward pass uses FP8-rounded weights",
        "seed": "seed of weights and data order",
        "threads": "torch threads",
        "checkpoint_minutes": "minutes between checkpoints",
        "eval_minutes": "minutes between held-out measurements",
    }.items():
        default = getattr(Options, field)
        fit.add_argument("--" + field.replace("_", "-"), type=type(default), default=default, help=text)
    fit.add_argument("--compile", action="store_true", help="use torch.compile (needs a C++ compiler)")
    ship = command("export", "export the finished run of the work folder")
    check = command("eval", "recompute the held-out loss of an exported folder")
    check.add_argument("--model", type=Path, default=DEFAULT_OUT, help="the exported folder")
    check.add_argument("--transformers", action="store_true", help="measure with transformers' model class as well")
    for sub in (fit, ship):
        sub.add_argument("--work", type=Path, default=DEFAULT_WORK, help="checkpoints and logs")
        sub.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the exported folder")
    args = parser.parse_args(argv)
    try:
        if args.command == "selftest":
            selftest()
        elif args.command == "data":
            data = Dataset.build(Config().vocab_size)
            train_tokens, held_tokens = sum(map(len, data.train)), sum(map(len, data.held))
            print(f"{len(data.files)} files, sha256 {data_hash(data.files)}")
            print(f"training: {len(data.train)} files, {train_tokens} tokens")
            print(f"held out: {len(data.held)} files, {held_tokens} tokens, {data.held_bytes} bytes")
        elif args.command == "train":
            names = {f.name for f in dataclasses.fields(Options)}
            opt = Options(**{k: v for k, v in vars(args).items() if k in names})
            for value in (opt.minutes, opt.steps):
                if value is not None and value <= 0:
                    raise UsageError("--minutes and --steps must be above zero")
            train(Config(), opt, args.work, args.resume)
            if not args.no_export:
                export(args.work, args.out)
        elif args.command == "export":
            export(args.work, args.out)
        else:
            check_folder(args.model, args.transformers)
    except (UsageError, OSError) as error:
        print(f"train_demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
