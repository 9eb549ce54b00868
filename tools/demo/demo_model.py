"""The demo model: DeepSeek-V3's architecture in plain torch, small enough to train on a CPU.

Sources: the DeepSeek-V3 technical report (arXiv:2412.19437) for the architecture, the bias update of section 2.1.2
and the multi-token-prediction module of section 2.2.

Shapes: B sequences, T positions, N = B * T rows, D hidden size, E experts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from demo_ops import causal_attention, gather_rows, head_loss, pick_rows, quarter_turn, rotate
from torch import Tensor, nn

BLOCK = 128  # rows and columns of one FP8 scale block
PAD_ROWS = 128  # an expert's rows are padded to a multiple of this
BOS, EOS, PAD = range(3)  # ids of the special tokens
EMBED_STD, HEAD_NORM = 0.5, 0.06  # initial scale of the embedding, initial weight of the norms before the head


class UsageError(Exception):
    """A request this tool cannot serve; the message says what was asked and what to do."""


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
            "torch_dtype": "bfloat16",  # transformers 4
            "dtype": "bfloat16",  # transformers 5
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


def rope_table(cfg: Config, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 .. length - 1, each pair's angle twice: [length, qk_rope_head_dim], float32."""
    half = cfg.qk_rope_head_dim // 2
    inv = 1.0 / cfg.rope_theta ** (torch.arange(half, dtype=torch.float64) / half)
    angle = (torch.arange(length, dtype=torch.float64)[:, None] * inv).repeat_interleave(2, dim=1)
    return angle.cos().float(), angle.sin().float()


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


class Attention(nn.Module):
    """Multi-head latent attention, expanded: the latent is up-projected to keys and values for every position."""

    turn: Tensor

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

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, T, D] -> queries and keys [B * heads, T, width], values [B * heads, T, v_head_dim], and the latent
        of the queries [B, T, q_lora_rank]."""
        cfg, (b, t, _) = self.cfg, x.shape
        heads, nope, rope, v_dim = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).view(b, t, heads, nope + rope)
        q_nope, q_rope = q.split((nope, rope), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((cfg.kv_lora_rank, rope), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, t, heads, nope + v_dim)
        k_nope, v = kv.split((nope, v_dim), dim=-1)
        k_rope = rotate(k_rope.unsqueeze(2), cos, sin, self.turn).expand(-1, -1, heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin, self.turn)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        q, k, v = (x.transpose(1, 2).reshape(b * heads, t, -1) for x in (q, k, v))
        return q, k, v, q_latent

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]; causal within each of the B sequences."""
        q, k, v, _ = self.project(x, cos, sin)
        return self.join(causal_attention(q, k, v), x.shape[0])

    def join(self, out: Tensor, sequences: int) -> Tensor:
        """The heads' results [B * heads, T, v_head_dim] -> [B, T, D]."""
        heads, width = self.cfg.num_attention_heads, self.cfg.v_head_dim
        out = out.view(sequences, heads, -1, width).transpose(1, 2)
        return self.o_proj(out.reshape(sequences, -1, heads * width))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = Matrix(width, inner)
        self.up_proj = Matrix(width, inner)
        self.down_proj = Matrix(inner, width, gain=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Routed experts beside a shared one: sigmoid scores, group-limited choice, a bias that only steers the choice."""

    bias: Tensor
    load: Tensor

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
            gather_rows(x, source, place).split(sizes), self.w13.flatten(1, 2), self.w2, strict=True
        ):
            gate, up = F.linear(rows, w13).chunk(2, dim=-1)
            parts.append(F.linear(F.silu(gate) * up, w2))
        return pick_rows(torch.cat(parts), place)

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
    published checkpoints expect), and predicts token i + 2.  Row i has position i in the rotary embedding; attention
    sees rows 0 .. i, so implementations that number the rows from 1 compute the same.
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

    cos: Tensor
    sin: Tensor

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
        t, embedded = next_tokens.shape[1], F.embedding(next_tokens, self.embed)
        return self.mtp.predict(embedded.to(states.dtype), states, self.cos[:t], self.sin[:t])

    def logits(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return F.linear(states, self.embed.to(states.dtype))

    def losses(self, window: Tensor, dtype: torch.dtype, with_mtp: bool = True) -> tuple[Tensor, Tensor]:
        """window [B, T + 2] -> mean loss of tokens 1 .. T and of MTP for tokens 2 .. T + 1."""
        states = self.states(window[:, :-2], dtype)
        main = head_loss(states.flatten(0, 1), self.embed, window[:, 1:-1].flatten())
        if not with_mtp:
            return main, torch.zeros(())
        ahead = self.mtp_states(window[:, 1:-1], states)
        return main, head_loss(ahead.flatten(0, 1), self.embed, window[:, 2:].flatten())
