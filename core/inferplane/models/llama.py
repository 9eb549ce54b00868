"""Llama 2, 3.x and the models built like them."""

from __future__ import annotations

from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.ops import Attention, CausalLM, DecoderLayer, GQABlock, KVWrite, Rope
from inferplane.types import KVRequest


def llama(b: Build) -> CausalLM:
    """Llama: grouped-query attention, rotary positions (default, linear or llama3 scaling), gated MLP.

    Args:
        b: config, placement, formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2302.13971, arXiv 2407.21783.
    """
    c = b.config
    c.refuse(hidden_act=("silu",), mlp_bias=(False,))
    width, inner, vocab = c.size("hidden_size"), c.size("intermediate_size"), c.size("vocab_size")
    heads = c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{c.name}: num_attention_heads = {heads} cannot be shared equally by num_key_value_heads = {kv_heads}.",
            remedy="correct the entries, or fetch the file again",
        )
    if c.get("head_dim") is None and width % heads:
        raise CheckpointError(
            f"{c.name}: hidden_size = {width} cannot be divided into num_attention_heads = {heads} equal heads.",
            remedy="correct the entries, or add head_dim",
        )
    dim = c.size("head_dim", width // heads)
    h, g = b.share("num_attention_heads", heads), b.share("num_key_value_heads", kv_heads)
    bias = bool(c.get("attention_bias", False))
    request = KVRequest("gqa", g, dim, dim)
    rope = Rope(b.rope(dim))

    def attention(name: str) -> GQABlock:
        return GQABlock(
            qkv=b.linear(
                f"{name}.q_proj",
                f"{name}.k_proj",
                f"{name}.v_proj",
                rows=(h + 2 * g) * dim,
                columns=width,
                axis=0,
                bias=bias,
            ),
            o=b.linear(f"{name}.o_proj", rows=width, columns=h * dim, axis=1, bias=bias),
            rope=rope,
            few=Attention(h, dim**-0.5, request, "few"),
            many=Attention(h, dim**-0.5, request, "many"),
            write=KVWrite(request),
            heads=(h, g),
            head_dim=dim,
            reduce=b.reduce(),
        )

    def layer(i: int) -> DecoderLayer:
        p = f"model.layers.{i}"
        return DecoderLayer(
            attn_norm=b.add_rms(f"{p}.input_layernorm", width),
            attn=attention(f"{p}.self_attn"),
            mlp_norm=b.add_rms(f"{p}.post_attention_layernorm", width),
            mlp=b.mlp(f"{p}.mlp", inner, width),
        )

    b.ignore("model.layers.*.self_attn.rotary_emb.inv_freq")  # older exports wrote this table, which the config implies
    embed = b.embedding("model.embed_tokens", vocab, width)
    return CausalLM(
        embed=embed,
        layers=tuple(layer(i) for i in range(c.size("num_hidden_layers"))),
        norm=b.add_rms("model.norm", width),
        head=b.head(embed, vocab, width),
    )
