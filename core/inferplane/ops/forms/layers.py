"""Decoder layers of other forms than the pre-norm layer: norms after a block, factors, blocks side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from inferplane.ops.attention import GQABlock
from inferplane.ops.basic import AddRMSNorm, RMSNorm, Rope, rope_table
from inferplane.ops.clamped_experts import ClampedExperts
from inferplane.ops.draw import Draw
from inferplane.ops.forms.activation import ActivationMul
from inferplane.ops.forms.hybrid import HybridBlock
from inferplane.ops.forms.mlp import MLP
from inferplane.ops.forms.norms import AddNorm, LayerNorm, Norm
from inferplane.ops.forms.rotation import PartialRope, PrepareAttention
from inferplane.ops.linear import GatedMLP
from inferplane.ops.mla import MLABlock
from inferplane.ops.moe import MoE
from inferplane.ops.op import BLOCK, Op, Sample, placeholder
from inferplane.ops.recurrent.block import RecurrentBlock, quantize_mixer
from inferplane.ops.recurrent.ragged import draw_batch
from inferplane.ops.sparse.attention import SparseMLABlock
from inferplane.types import Batch

NormBefore = AddRMSNorm | AddNorm
Attention = GQABlock | MLABlock | SparseMLABlock | RecurrentBlock | HybridBlock
FeedForward = GatedMLP | MLP | MoE


class ResidualLayer(Op, name="residual_layer", extension=True):
    """A transformer layer on the pair (x, residual), whose sum is the hidden state, with norms before and after each
    block, each of which may be left out, and a factor on what a block adds.

    `h = x + residual; a = attn_after(attn(attn_norm(h))) * factor; h = h + a;
    m = mlp_after(mlp(mlp_norm(h))) * factor; return m, h`. A norm that is None is the identity.

    Args of the call:
        x: `[T, D]`. residual: `[T, D]` or None in the first layer. batch: the step. kv: the layer's cache, changed.

    Returns:
        x and residual, each `[T, D]`.

    Fields: `attn_norm` and `mlp_norm` add and norm; `attn_after` and `mlp_after` norm what the blocks return; `factor`.

    Source: norms after the blocks as in OLMo 2, arXiv 2501.00656; on both sides as in Gemma 2, arXiv 2408.00118; the
    factor as in Granite (transformers' GraniteConfig).
    """

    tolerance = BLOCK

    attn_norm: NormBefore | None
    attn: Attention
    attn_after: Norm | None
    mlp_norm: NormBefore | None
    mlp: FeedForward
    mlp_after: Norm | None
    factor: float = 1.0

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.attn_norm is None:
            h = residual = x if residual is None else x + residual
        else:
            h, residual = self.attn_norm(x, residual)
        h = self.attn(h, batch, kv)
        if self.attn_after is not None:
            h = self.attn_after(h)
        if self.factor != 1:
            h = h * self.factor
        if self.mlp_norm is None:
            h = residual = h + residual
        else:
            h, residual = self.mlp_norm(h, residual)
        h = self.mlp(h)
        if self.mlp_after is not None:
            h = self.mlp_after(h)
        return (h if self.factor == 1 else h * self.factor), residual

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Norms before, after and on both sides; offsets, a factor; the first layer; other MLPs; 8 bits; soft caps."""
        add = lambda: AddRMSNorm(_rms())  # noqa: E731
        gated: Any = GatedMLP.samples()[0].op
        gelu = replace(gated, act=ActivationMul("gelu_tanh"))
        four = (AddRMSNorm(_rms(1.0)), _rms(1.0)) * 2
        decode = _sample("offsets", "decode", *four, mlp=gelu)
        mixed = _sample("offsets_mixed", "mixed", *four, mlp=gelu)
        quantized = [
            replace(sample, label=f"{sample.label}_int8", op=quantize_layer(sample.op, "int8_group"))
            for sample in (decode, mixed)
        ]
        return [
            decode,
            mixed,
            *quantized,
            *(replace(sample, label=f"{sample.label}_capped", op=_cap_scores(sample.op)) for sample in (decode, mixed)),
            _sample("offsets_first", "decode", *four, mlp=gelu, first=True),
            _sample("after", "decode", None, _rms(), None, _rms()),
            _sample("both", "mixed", add(), _rms(), add(), _rms()),
            _sample("factor", "decode", add(), None, add(), None, factor=0.22),
            _sample("first", "decode", None, _rms(), None, _rms(), first=True),
            _sample("plain_mlp", "mixed", add(), None, add(), None, mlp=MLP.samples()[0].op, factor=0.5),
        ]


class ParallelLayer(Op, name="parallel_layer", extension=True):
    """A transformer layer whose two blocks read the same normed state:
    `h, r = norm(x, residual); return attn(h) + mlp(h), r`.

    Args of the call:
        x: `[T, D]`. residual: `[T, D]` or None in the first layer. batch: the step. kv: the layer's cache, changed.

    Returns:
        x and residual, each `[T, D]`.

    Source: the parallel form of GPT-J, as in PaLM, arXiv 2204.02311.
    """

    tolerance = BLOCK

    norm: NormBefore
    attn: Attention
    mlp: FeedForward

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h, residual = self.norm(x, residual)
        return self.attn(h, batch, kv) + self.mlp(h), residual

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode and mixed steps, with both kinds of norm."""
        out = []
        for like, norm in (("decode", AddNorm(LayerNorm(placeholder(64), 1e-5))), ("mixed", AddRMSNorm(_rms()))):
            block = next(s for s in GQABlock.samples() if s.label == like)
            op = ParallelLayer(norm, block.op, GatedMLP.samples()[0].op)  # type: ignore[arg-type]
            out.append(Sample(like, op, _with_residual(block, first=False), block.step_kind))
        return out


class BlockLayer(Op, name="block_layer", extension=True):
    """A layer of one block: `h, r = norm(x, residual); return block(h), r`.

    Args of the call:
        x: `[T, D]`. residual: `[T, D]` or None in the first layer. batch: the step.
        kv: the layer's cache, changed; None where it has none.

    Returns:
        x and residual, each `[T, D]`.

    Fields: `mixes` whether the block mixes tokens, so that it reads the step and the cache: `block(h, batch, kv)`.

    Source: Nemotron-H, arXiv 2504.03624.
    """

    tolerance = BLOCK

    norm: NormBefore
    block: Attention | FeedForward
    mixes: bool

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h, residual = self.norm(x, residual)
        return self.block(h, batch, kv) if self.mixes else self.block(h), residual  # type: ignore[call-arg]

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """A recurrence and an MLP in a step that decodes, the first layer, attention in a mixed step."""
        attention = next(s for s in GQABlock.samples() if s.label == "mixed")
        recurrence = next(s for s in RecurrentBlock.samples() if s.label == "mamba2_mixer_bias_decode")
        rows = MLP.samples()[0]
        rows = replace(rows, inputs=lambda d: (d.normal(4, 64), draw_batch(d, [(1, 9), (3, 70)]), None))
        width = recurrence.op.mixer.width  # type: ignore[attr-defined]

        def layer(block: Any, width: int, *, mixes: bool = True) -> BlockLayer:
            return BlockLayer(AddRMSNorm(RMSNorm(placeholder(width), 1e-6)), block, mixes)

        mlp = layer(rows.op, 64, mixes=False)
        return [
            Sample("recurrence", layer(recurrence.op, width), _with_residual(recurrence, first=False), "decode"),
            Sample("mlp", mlp, _with_residual(rows, first=False), "decode"),
            Sample("mlp_first", mlp, _with_residual(rows, first=True), "decode"),
            Sample("mixed", layer(attention.op, 64), _with_residual(attention, first=False), "mixed"),
        ]


def _rms(offset: float = 0.0) -> RMSNorm:
    return RMSNorm(placeholder(64), 1e-6, offset)


def _with_residual(block: Sample, *, first: bool) -> Any:
    """Inputs of a layer around a sample of its attention."""

    def inputs(d: Draw) -> tuple[Any, ...]:
        x, batch, kv = block.inputs(d)
        return x, None if first else d.normal(*x.shape), batch, kv

    return inputs


def _cap_scores(layer: Any) -> ResidualLayer:
    """A sample's layer whose attention has a soft cap and sinks."""
    sinks, attn = placeholder(layer.attn.heads[0]), layer.attn
    few, many = (replace(x, softcap=2.0, sinks=sinks) for x in (attn.few, attn.many))
    return replace(layer, attn=replace(attn, few=few, many=many))


def _sample(
    label: str,
    like: str,
    attn_norm: Any,
    attn_after: Any,
    mlp_norm: Any,
    mlp_after: Any,
    *,
    mlp: Any = None,
    factor: float = 1.0,
    first: bool = False,
) -> Sample:
    """A sample around the sample `like` of grouped-query attention."""
    block = next(s for s in GQABlock.samples() if s.label == like)
    mlp = GatedMLP.samples()[0].op if mlp is None else mlp
    op = ResidualLayer(attn_norm, block.op, attn_after, mlp_norm, mlp, mlp_after, factor)  # type: ignore[arg-type]
    return Sample(label, op, _with_residual(block, first=first), block.step_kind)


def quantize_layer(layer: Any, format: str) -> Any:
    """A sample's layer with its linear layers in another format; both forms of latent attention still share kv_b."""

    def linears(op: Any, *names: str) -> Any:
        found = {name: getattr(op, name) for name in names}
        return replace(
            op, **{name: replace(x, weight=replace(x.weight, format=format)) for name, x in found.items() if x}
        )

    attn = layer.attn
    if isinstance(attn, MLABlock):
        expanded = linears(attn.expanded, "kv_b")
        absorbed = replace(attn.absorbed, kv_b=expanded.kv_b.weight)
        attn = replace(linears(attn, "q_a", "q_b", "kv_a", "o"), expanded=expanded, absorbed=absorbed)
    elif isinstance(attn, RecurrentBlock):
        attn = replace(attn, mixer=quantize_mixer(attn.mixer, format))
    else:
        attn = linears(attn, "qkv", "o")
    return replace(layer, attn=attn, mlp=linears(layer.mlp, "gate_up", "down"))


def rotate_partially(attn: Any) -> GQABlock:
    """A sample's attention that rotates the first half of its heads."""
    enter, size = attn.enter, attn.head_dim // 2
    rope = PartialRope(Rope(rope_table(size)), size)
    made: GQABlock = replace(attn, enter=PrepareAttention(enter.write, rope, enter.q_norm, enter.k_norm))
    return made


def clamp_experts(sample: Sample, format: str) -> Sample:
    """A sample's layer with experts as in gpt-oss: biases everywhere, sinks, a clamped gate."""
    layer: Any = sample.op
    attn, mlp = layer.attn, layer.mlp
    sinks = placeholder(attn.heads[0])
    few, many = (replace(x, sinks=sinks) for x in (attn.few, attn.many))
    qkv, o = (replace(x, bias=placeholder(x.weight.shape[0])) for x in (attn.qkv, attn.o))
    attn = replace(attn, qkv=qkv, o=o, few=few, many=many)
    stack = lambda rows, columns: placeholder(8, rows, columns, format=format)  # noqa: E731
    experts = ClampedExperts(stack(64, 64), placeholder(8, 64), stack(64, 32), placeholder(8, 64), 1.702, 0.8)
    router = replace(mlp.router, bias=placeholder(8))
    op = replace(layer, attn=attn, mlp=replace(mlp, router=router, experts=experts, shared=None))
    if format == "int8_group":  # which an online scheme gives to all linear layers
        op = replace(op, attn=quantize_layer(replace(op, mlp=GatedMLP.samples()[0].op), format).attn)
    return replace(sample, label="gqa_clamped" if format == "plain" else f"gqa_clamped_{format}", op=op)
