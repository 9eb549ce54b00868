"""Whole models and their layers: decoder layer, decoder stack, multi-token prediction, causal language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from inferplane.ops.attention import GQABlock
from inferplane.ops.basic import AddRMSNorm, Embedding, RMSNorm
from inferplane.ops.collective import AllGather
from inferplane.ops.draw import Draw
from inferplane.ops.eagle import Eagle3Layer, EagleLayer, run_with_taps
from inferplane.ops.forms.hybrid import HybridBlock
from inferplane.ops.forms.layers import (
    BlockLayer,
    NormBefore,
    ParallelLayer,
    ResidualLayer,
    clamp_experts,
    quantize_layer,
    rotate_partially,
)
from inferplane.ops.forms.scaled import ScaledEmbedding, ScaledHead
from inferplane.ops.forms.shortcut import ShortcutLayer
from inferplane.ops.hyper.layer import HyperLayer, HyperNorm, StreamEmbedding
from inferplane.ops.hyper.prediction import HyperMTPLayer
from inferplane.ops.linear import GatedMLP, Linear, LMHead
from inferplane.ops.mla import MLABlock
from inferplane.ops.moe import MoE
from inferplane.ops.op import BLOCK, EXTENSIONS, Cost, Op, Sample, Workload, extension, placeholder
from inferplane.ops.recurrent.block import RecurrentBlock
from inferplane.ops.sampling import SampleTokens
from inferplane.ops.sparse.attention import SparseMLABlock
from inferplane.types import Batch, KVCache, LayerKV, LayerPlace, Weight
from inferplane.types.batch import TableRows

SEVERAL_TABLES = "decoder_stack.several_tables"
"""The extension of stacks whose layers attend to different numbers of tokens: layers read different block tables."""
EXTENSIONS.add(SEVERAL_TABLES)


class DecoderLayer(Op, name="decoder_layer"):
    """A pre-norm transformer layer on the pair (x, residual), whose sum is the hidden state.

    `h, r = attn_norm(x, residual); h, r = mlp_norm(attn(h), r); return mlp(h), r`.

    Args of the call:
        x: `[T, D]`. residual: `[T, D]` or None in the first layer. batch: the step. kv: the layer's cache, changed: a
            `LayerKV`, a `StateCache` where the block is recurrent, both as a `HybridCache`, or an `IndexedCache` where
            it reads chosen tokens alone.

    Returns:
        x and residual, each `[T, D]`; with `taps` also the hidden states before these layers, `[T, len(taps) D]`.

    Source: pre-norm transformer, arXiv 2002.04745.
    """

    tolerance = BLOCK

    attn_norm: AddRMSNorm
    attn: GQABlock | MLABlock | SparseMLABlock | RecurrentBlock | HybridBlock
    mlp_norm: AddRMSNorm
    mlp: GatedMLP | MoE

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.attn_norm(x, residual)
        x, residual = self.mlp_norm(self.attn(x, batch, kv), residual)
        return self.mlp(x), residual

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Each pair of attention and MLP that the model families use, built from the samples of these blocks; clamped
        experts in three formats; a recurrence; attention that rotates a part of its heads."""

        def layer(attn: Op, mlp: Op, width: int) -> DecoderLayer:
            norm = lambda: AddRMSNorm(RMSNorm(placeholder(width), 1e-6))  # noqa: E731
            return DecoderLayer(norm(), attn, norm(), mlp)  # type: ignore[arg-type]

        out: list[Sample] = []
        mlp, moe = GatedMLP.samples()[0].op, MoE.samples()[0].op
        # The bias alone selects experts: if rounding changed an expert, no tolerance could cover the difference.
        decided = Weight((), (8,), torch.float32, make=lambda: torch.arange(8.0) * 10)
        assert isinstance(moe, MoE)
        moe = replace(moe, route=replace(moe.route, bias=decided))

        def add(label: str, sample: Sample, other: Op, width: int = 64) -> None:
            def inputs(d: Draw) -> tuple[Any, ...]:
                x, batch, kv = sample.inputs(d)
                return x, d.normal(*x.shape), batch, kv

            out.append(Sample(label, layer(sample.op, other, width), inputs, sample.step_kind))

        for block, label in ((GQABlock, "gqa"), (MLABlock, "mla")):
            for sample in block.samples():
                if sample.label != "prefill":
                    add(f"{label}_mlp_{sample.label}", sample, mlp)
                    add(f"{label}_moe_{sample.label}", sample, moe)
        recurrent = {sample.label: sample for sample in RecurrentBlock.samples()}
        narrow = GatedMLP(Linear(placeholder(64, 48)), Linear(placeholder(48, 32)))
        add("conv_mlp_decode", recurrent["short_conv_decode"], narrow, 48)
        add("delta_mlp_decode", recurrent["gated_delta_net_decode"], mlp)
        add("delta_moe_decode", recurrent["gated_delta_net_grouped_decode"], moe)
        add("kimi_mlp_decode", recurrent["kimi_delta_attention_decode"], mlp)
        gated = next(sample for sample in GQABlock.samples() if sample.label == "gate_decode")
        add("gqa_mlp_partial", replace(gated, op=rotate_partially(gated.op)), mlp)
        by_label = {sample.label: sample for sample in out}
        for like, format, label in (
            ("gqa_mlp_decode", "int8_group", "gqa_mlp_int8"),
            ("gqa_mlp_mixed", "int8_group", "gqa_mlp_int8_mixed"),
            ("gqa_mlp_decode", "int8_row", "gqa_mlp_int8_row"),
            ("gqa_mlp_mixed", "int8_row", "gqa_mlp_int8_row_mixed"),
            *(
                (f"gqa_mlp_{kind}", f, f"gqa_mlp_{f}_{kind}")
                for f in ("int4_group32", "mxfp4")
                for kind in ("decode", "mixed")
            ),
            ("mla_mlp_decode", "int8_group", "mla_mlp_int8"),
            ("delta_mlp_decode", "int8_group", "delta_mlp_int8"),
        ):
            sample = by_label[like]
            out.append(replace(sample, label=label, op=quantize_layer(sample.op, format)))
        sparse = by_label["gqa_moe_decode"]
        return [*out, *(clamp_experts(sparse, format) for format in ("plain", "mxfp4", "int8_group"))]


AnyLayer = DecoderLayer | ResidualLayer | ParallelLayer | BlockLayer | ShortcutLayer | HyperLayer
"""A layer of a stack: called with `(x, residual, batch, kv)`, it returns x and residual. Between the halves of a layer
with a shortcut the residual is `[T, 2 D]`. With hyper-connections x is `[T, N, D]` and the residual None."""


def _set_window(layer: Any, window: int) -> DecoderLayer:
    """A sample's layer whose attention reads this many last tokens."""
    attn = layer.attn
    request = replace(attn.few.kv, window=window)
    enter = replace(attn.enter, write=replace(attn.enter.write, kv=request))
    few, many = replace(attn.few, kv=request), replace(attn.many, kv=request)
    return replace(layer, attn=replace(attn, enter=enter, few=few, many=many))


class DecoderStack(Op, name="decoder_stack"):
    """Decoder layers in order. At site `layers` of a model, their sites are `layers.0`, `layers.1`, ...

    Args of the call:
        x: `[T, D]`. residual: `[T, D]`, or None before the first layer. batch: the step.
        cache: layer i's cache is `cache.layers[i]`, changed; further caches are not used. Where the cache has several
            block tables, layer i sees the step as `batch.for_table(cache.tables[i])`. Where layers keep states of
            sequences, layer i has the cache and the table of `cache.by_layer[i]`.

    Returns:
        x and residual, each `[T, D]`.

    Source: pre-norm transformer, arXiv 2002.04745.
    """

    tolerance = BLOCK
    numbered = "layers"

    layers: tuple[AnyLayer, ...]
    taps: tuple[int, ...] = extension(())

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, cache: KVCache) -> Any:
        if self.taps:
            return run_with_taps(self.layers, self.taps, x, residual, batch, cache)
        if cache.by_layer:
            for layer, (held, table) in zip(self.layers, cache.by_layer):
                x, residual = layer(x, residual, batch.for_table(table), held)
            return x, residual
        if cache.tables:
            for layer, kv, table in zip(self.layers, cache.layers, cache.tables):
                x, residual = layer(x, residual, batch.for_table(table), kv)
            return x, residual
        for layer, kv in zip(self.layers, cache.layers):
            x, residual = layer(x, residual, batch, kv)
        return x, residual

    def own_extensions(self) -> frozenset[str]:
        """See `Op.own_extensions`; with `SEVERAL_TABLES` where layers attend to different numbers of tokens."""
        windows = {request.window for layer in self.layers for request in layer.kv_requests()}
        return super().own_extensions() | ({SEVERAL_TABLES} if len(windows) > 1 else set())

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[AnyLayer]:
        return iter(self.layers)

    def __getitem__(self, index: Any) -> Any:
        return self.layers[index]

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Stacks of two and three layers: dense, experts, latent attention, 8-bit weights, several block tables,
        recurrent layers around one with attention."""
        by_label = {sample.label: sample for sample in DecoderLayer.samples()}

        def stack(label: str, *names: str) -> Sample:
            first = by_label[names[0]]

            def inputs(d: Draw) -> tuple[Any, ...]:
                x, residual, batch, kv = first.inputs(d)
                blocks = int(batch.block_tables.max()) + 1
                caches = kv, *(d.fill_kv(kv.request, blocks) for _ in names[1:])
                return x, residual, batch, KVCache(caches, blocks, kv.block_tokens)

            op = DecoderStack(tuple(by_label[name].op for name in names))  # type: ignore[misc]
            return Sample(label, op, inputs, first.step_kind)

        def stack_of_tables(label: str, name: str) -> Sample:
            """Layers with all tokens, with a window of 20 in another block table, and with all tokens again."""
            first = by_label[name]
            whole: Any = first.op
            windowed = _set_window(whole, 20)

            def inputs(d: Draw) -> tuple[Any, ...]:
                x, residual, batch, kv = first.inputs(d)
                blocks = int(batch.block_tables.max()) + 2  # one more than the batch uses
                number = torch.tensor(d.permutation(blocks)).to(batch.block_tables)
                n = kv.block_tokens
                slots = number[batch.slots // n].long() * n + batch.slots % n
                rows = TableRows(slots, number[batch.block_tables.long()])
                (request,) = windowed.kv_requests()
                caches = kv, d.fill_kv(request, blocks), d.fill_kv(kv.request, blocks)
                return x, residual, replace(batch, more_tables=(rows,)), KVCache(caches, blocks, n, tables=(0, 1, 0))

            return Sample(label, DecoderStack((whole, windowed, whole)), inputs, first.step_kind)

        def stack_with_states(label: str, name: str) -> Sample:
            """Layers with attention after one with a recurrence, and before another one."""
            first = by_label[name]
            attending: Any = first.op
            block = next(s.op for s in RecurrentBlock.samples() if s.label.startswith("gated_delta_net"))
            recurrent: Any = replace(attending, attn=block)

            def inputs(d: Draw) -> tuple[Any, ...]:
                x, residual, batch, kv = first.inputs(d)
                n, (request,) = batch.seq_lens.shape[0], block.state_requests()
                slots = d.state_slots(n)
                states = d.fill_states(request, n), d.fill_states(request, n)
                blocks = int(batch.block_tables.max()) + 1
                places = LayerPlace(states[0]), LayerPlace(kv), LayerPlace(states[1])
                cache = KVCache((kv,), blocks, kv.block_tokens, by_layer=places)
                return x, residual, batch.with_states(slots), cache

            return Sample(label, DecoderStack((recurrent, attending, recurrent)), inputs, first.step_kind)

        return [
            stack("decode", "gqa_mlp_decode", "gqa_mlp_decode"),
            stack("mixed", "gqa_mlp_mixed", "gqa_mlp_mixed"),
            stack("experts", "gqa_mlp_decode", "gqa_moe_decode", "gqa_mlp_decode"),
            stack("latents", "mla_mlp_decode", "mla_moe_decode"),
            stack("int8", "gqa_mlp_int8", "gqa_mlp_int8"),
            stack_of_tables("tables", "gqa_mlp_decode"),
            stack_of_tables("tables_mixed", "gqa_mlp_mixed"),
            stack_with_states("states", "gqa_mlp_decode"),
            stack_with_states("states_mixed", "gqa_mlp_mixed"),
        ]


class MTPLayer(Op, name="mtp_layer"):
    """Multi-token prediction: from the hidden state at i and token i+1, the hidden state that predicts token i+2.

    `x = eh_proj([enorm(embed(ids)) | hnorm(hidden)]); x = layer(x); h = norm(x); logits = head(h)`. Row i has the
    id of token i+1, the main model's hidden state of token i, and position i.

    The hidden state is the main model's *after* its final norm: published checkpoints were trained with it (their
    modeling file passes `self.norm(hidden_states)`), and a state from before the norm lowers the acceptance rate.

    Args of the call:
        hidden: `[T, D]`, the main model's (or the previous MTP step's) normed hidden states.
        batch: the step; `ids` are shifted by one. kv: this layer's own cache, changed.

    Returns:
        logits float32 `[R, V]` and the normed hidden states `[T, D]`.

    Fields: `gather` joins the ranks' columns of the logits under vocabulary sharding.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; which state is passed: docs/decisions/0004-mtp-hidden-state.md.
    """

    tolerance = BLOCK

    embed: Embedding | ScaledEmbedding
    enorm: RMSNorm
    hnorm: RMSNorm
    eh_proj: Linear
    layer: DecoderLayer
    norm: AddRMSNorm
    head: LMHead
    gather: AllGather | None = extension(None)

    def __call__(self, hidden: torch.Tensor, batch: Batch, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.cat((self.enorm(self.embed(batch.ids)), self.hnorm(hidden)), -1)
        x, residual = self.layer(self.eh_proj(x), None, batch, kv)
        x, _ = self.norm(x, residual)
        logits = self.head(x, batch)
        return logits if self.gather is None else self.gather(logits), x

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One sample around the smallest decoder layer."""
        block, layer = GQABlock.samples()[0], DecoderLayer.samples()[0].op
        rms = lambda: RMSNorm(placeholder(64), 1e-6)  # noqa: E731
        vocab = placeholder(97, 64)
        op = MTPLayer(
            Embedding(vocab),
            rms(),
            rms(),
            Linear(placeholder(64, 128)),
            layer,  # type: ignore[arg-type]
            AddRMSNorm(rms()),
            LMHead(vocab),
        )
        return [replace(block, label="gqa", op=op)]


class CausalLM(Op, name="causal_lm"):
    """A causal language model: embed, layers, final norm, head.

    Args of the call:
        batch: the step. cache: as of the stack; changed.

    Returns:
        logits float32 `[R, V]` of the requested rows, and the hidden states after the final norm `[T, D]`; with `fuse`
        in their place what an EAGLE-3 head reads, `fuse` of the stack's taps, `[T, D]`; with `returns_streams` the
        streams behind the last layer, `[T, N D]`.

    Fields: `layers` may be given as a tuple; `mtp` has the draft layers, which the engine calls, not the body (their
    caches follow those of the layers); `sample` turns logits into tokens; `gather` joins the ranks' columns of the
    logits under vocabulary sharding.

    Source: Llama, arXiv 2302.13971; DeepSeek-V3, arXiv 2412.19437.
    """

    tolerance = BLOCK
    called_by_engine = ("mtp", "sample")

    embed: Embedding | ScaledEmbedding | StreamEmbedding
    layers: DecoderStack
    norm: NormBefore | HyperNorm
    head: LMHead | ScaledHead
    sample: SampleTokens = SampleTokens()
    mtp: tuple[MTPLayer | HyperMTPLayer | EagleLayer | Eagle3Layer, ...] = ()
    gather: AllGather | None = None
    fuse: Linear | None = extension(None)
    returns_streams: bool = extension(False)

    def __post_init__(self) -> None:
        if isinstance(self.layers, tuple):
            object.__setattr__(self, "layers", DecoderStack(self.layers))

    @property
    def embed_once(self) -> Embedding | ScaledEmbedding:
        """The embedding `[T, D]`, also where the layers read it in several streams."""
        return self.embed.embed if isinstance(self.embed, StreamEmbedding) else self.embed

    @property
    def vocab(self) -> int:
        """Token ids over all ranks."""
        return self.embed.weight.shape[0] * (1 if self.embed.reduce is None else self.embed.reduce.ranks)

    def __call__(self, batch: Batch, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, *tapped = self.layers(self.embed(batch.ids), None, batch, cache)
        x, before = self.norm(x, residual)
        logits = self.head(x, batch)
        if self.fuse is not None:
            x = self.fuse(tapped[0])
        elif self.returns_streams:
            x = before.flatten(1)
        return logits if self.gather is None else self.gather(logits), x

    def cost(self, load: Workload) -> Cost:
        """The sum over the ops that a call runs; the engine calls and counts the draft layers."""
        return sum((child.cost(load) for path, child in self.children() if not self._engine_calls(path)), Cost())

    def _engine_calls(self, path: str) -> bool:
        return path.partition(".")[0] in self.called_by_engine

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Small models around the decode stacks of `DecoderStack.samples`; that of several block tables with a scaled
        embedding, an offset in its norm and a cap of logits."""
        vocab = placeholder(97, 64)

        def model(stack: Sample) -> Sample:
            norm = AddRMSNorm(RMSNorm(placeholder(64), 1e-6))
            op = CausalLM(Embedding(vocab), stack.op, norm, LMHead(vocab))  # type: ignore[arg-type]
            if stack.label == "tables":
                norm = replace(norm, norm=replace(norm.norm, offset=1.0))
                op = replace(op, embed=ScaledEmbedding(op.embed, 8.0), norm=norm, head=ScaledHead(op.head, 1.0, 2.0))  # type: ignore[arg-type]
            return Sample(stack.label, op, lambda d: stack.inputs(d)[2:], stack.step_kind)

        labels = ("decode", "latents", "int8", "tables")
        return [model(stack) for stack in DecoderStack.samples() if stack.label in labels]
