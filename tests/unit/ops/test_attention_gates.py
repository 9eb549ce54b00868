"""Gates on what attention returns, against transformers' module with the same weights."""

from __future__ import annotations

import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

from inferplane.kvcache import paged_layout
from inferplane.ops import (
    Attention,
    Draw,
    GQABlock,
    KVWrite,
    Linear,
    PartialRope,
    PrepareAttention,
    RMSNorm,
    Rope,
    placeholder,
)
from inferplane.ops.basic import rope_table
from inferplane.types import KVRequest
from tests.unit.support.small import F32, bound, w

HEADS, KV_HEADS, DIM, WIDTH = 6, 2, 32, 40


def test_a_gate_of_each_head():
    """Over a prompt, with a rotation of a quarter of each head and norms whose weights lack their 1."""
    config = Qwen3NextConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        attn_implementation="eager",
    )
    module, generator = Qwen3NextAttention(config, 0).eval(), torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    x = torch.randn(19, WIDTH, generator=generator)
    mask = torch.full((19, 19), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        angles = Qwen3NextRotaryEmbedding(config)(x[None], torch.arange(19)[None])
        want = module(x[None], angles, mask)[0][0]

    request = KVRequest("gqa", KV_HEADS, DIM, DIM)
    norm = lambda name: RMSNorm(w(name, DIM), config.rms_norm_eps, 1.0)  # noqa: E731
    op = GQABlock(
        qkv=Linear(w("qkv", (2 * HEADS + 2 * KV_HEADS) * DIM, WIDTH)),
        o=Linear(w("o", WIDTH, HEADS * DIM)),
        enter=PrepareAttention(
            KVWrite(request), PartialRope(Rope(rope_table(DIM // 4)), DIM // 4), norm("q"), norm("k")
        ),
        few=Attention(HEADS, DIM**-0.5, request, "few"),
        many=Attention(HEADS, DIM**-0.5, request, "many"),
        heads=(HEADS, KV_HEADS),
        head_dim=DIM,
        output_gate=True,
    )
    assert op.extensions() >= {"gqa_block.output_gate"} and replaced(op).own_extensions() == frozenset()
    tensors = {
        "qkv": torch.cat([part.weight.data for part in (module.q_proj, module.k_proj, module.v_proj)]),
        "o": module.o_proj.weight.data,
        "q": module.q_norm.weight.data,
        "k": module.k_norm.weight.data,
    }
    block = bound(op, tensors)
    layout = paged_layout(16)
    draw = Draw(0, F32, build_kv=lambda r, n: layout.build(r, n, F32, torch.device("cpu")))
    batch, kv = draw.step(request, [(19, 0)])
    near(block(x, batch, kv), want)


def replaced(op):
    """The block without its gates."""
    return GQABlock(Linear(placeholder(320, WIDTH)), op.o, op.enter, op.few, op.many, op.heads, op.head_dim)


def near(got, want):
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
