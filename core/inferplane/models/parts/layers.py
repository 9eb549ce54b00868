"""Layers that several families share, their MLPs, and the model around them.

Names of weights are those of Hugging Face checkpoints, in which these families agree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inferplane import ops
from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models.build import ACTIVATION_NAMES, HEAD, Build
from inferplane.models.reading.config import Config
from inferplane.types import ActivationQuant, Weight

LAYERS = "num_hidden_layers"


NormOf = Callable[[Build, str, int], ops.RMSNorm | ops.LayerNorm]
"""From a norm's name and width to the op."""


@dataclass(frozen=True)
class LayerForm:
    """How a family's layers are put together, where they are no plain pre-norm layers.

    Args:
        before: names of the norms before attention and MLP, in the checkpoint, or None.
        after: names of the norms on what they return, or None.
        factor: on what they return.
        parallel: whether both read the first norm's result, and their results are added.
        norm: builds a norm.
        last: name of the norm behind the layers.
    """

    before: tuple[str | None, str | None] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str | None, str | None] = (None, None)
    factor: float = 1.0
    parallel: bool = False
    norm: NormOf = Build.rms_norm
    last: str = "norm"

    @property
    def is_plain(self) -> bool:
        """Whether it is the pre-norm layer."""
        return not self.parallel and self.factor == 1 and None not in self.before and self.after == (None, None)

    def norm_before(self, build: Build, name: str, width: int) -> ops.AddRMSNorm | ops.AddNorm:
        """Build a norm of `width` entries that first adds the residual."""
        norm = self.norm(build, name, width)
        return ops.AddRMSNorm(norm) if isinstance(norm, ops.RMSNorm) else ops.AddNorm(norm)


PRE_NORM = LayerForm()


def decoder_layer(build: Build, i: int, attn: Any, mlp: Any, form: LayerForm = PRE_NORM) -> Any:
    """Build decoder layer `i` from its attention and its MLP, one of which may be None. Such a layer has one norm."""
    name, width = f"model.layers.{i}", build.config.size("hidden_size")

    def before(part: str | None, *blocks: Any) -> ops.AddRMSNorm | ops.AddNorm | None:
        if part is None:
            return None
        norm = form.norm_before(build, f"{name}.{part}", width)
        if isinstance(norm, ops.AddNorm) or not build.activation_quants:
            return norm
        quant = norm_output_quant(*(weight for block in blocks for weight in input_weights(block)))
        return norm if quant is None else replace(norm, output_quant=quant)

    def after(part: str | None) -> Any:
        return None if part is None else form.norm(build, f"{name}.{part}", width)

    if attn is None or mlp is None:
        block = attn or mlp
        return ops.BlockLayer(before(form.before[0], block), block, mlp is None)  # type: ignore[arg-type]
    if form.parallel:
        return ops.ParallelLayer(before(form.before[0], attn, mlp), attn, mlp)  # type: ignore[arg-type]
    first, second = before(form.before[0], attn), before(form.before[1], mlp)
    if form.is_plain and isinstance(first, ops.AddRMSNorm) and isinstance(second, ops.AddRMSNorm):
        return ops.DecoderLayer(first, attn, second, mlp)
    return ops.ResidualLayer(first, attn, after(form.after[0]), second, mlp, after(form.after[1]), form.factor)


def input_weights(
    block: ops.GQABlock
    | ops.MLABlock
    | ops.SparseMLABlock
    | ops.RecurrentBlock
    | ops.HybridBlock
    | ops.GatedMLP
    | ops.MLP
    | ops.MoE
    | ops.HashMoE
    | ops.SharedKVBlock
    | ops.CompressedBlock,
) -> list[Weight]:
    """The weights that a block multiplies its input by. Routers are left out: their input is never quantized."""
    if isinstance(block, ops.HybridBlock):
        return (
            []
            if block.attn_factors[0] != 1 or block.recurrence_factors[0] != 1
            else [*input_weights(block.attn), *input_weights(block.recurrence)]
        )
    if isinstance(block, ops.RecurrentBlock):
        return [x.weight for x in block.mixer.list_inputs()]
    if isinstance(block, ops.GQABlock):
        return [block.qkv.weight, *([] if block.head_gate is None else [block.head_gate.weight])]
    if isinstance(block, ops.MLABlock):
        return [(block.q_a or block.q_b).weight, block.kv_a.weight]
    if isinstance(block, ops.SparseMLABlock):
        indexer = [] if block.indexer is None else [block.indexer.wk.weight]
        return [block.q_a.weight, block.kv_a.weight, *indexer]
    if isinstance(block, (ops.SharedKVBlock, ops.CompressedBlock)):
        return [block.q_a.weight, block.kv.weight]
    if isinstance(block, ops.GatedMLP):
        return [block.gate_up.weight]
    if isinstance(block, ops.MLP):
        return [block.up.weight]
    return [block.experts.gate_up, *([] if block.shared is None else input_weights(block.shared))]


def norm_output_quant(*weights: Weight) -> ActivationQuant | None:
    """How the norm before these weights may quantize its result: what the quantized ones among them all request.

    None if they request different things, or a static scale, which only the linear itself knows.
    """
    quants = {w.activation_quant for w in weights if w.activation_quant is not None and w.format in ops.FORMATS}
    quant = quants.pop() if len(quants) == 1 else None
    return None if quant is None or quant.static else quant


def decoder_model(
    build: Build,
    attn: Callable[[int, str], Any],
    mlp: Callable[[int, str], Any],
    form: LayerForm = PRE_NORM,
    *,
    embed_factor: float = 1.0,
    logit_factor: float = 1.0,
    logit_cap: float | None = None,
    head_bias: bool = False,
) -> ops.CausalLM:
    """Build a causal language model.

    Args:
        build: config, placement and weight formats.
        attn: builds a layer's attention from the layer's number and the attention's name in the checkpoint; None for a
            layer without.
        mlp: the same for the layer's MLP.
        form: how a layer is put together.
        embed_factor: on the embedding. logit_factor: on the logits.
        logit_cap: the bound to which the logits are capped softly, or None.
        head_bias: whether the output head has a bias.
    """
    names = [(i, f"model.layers.{i}") for i in range(build.config.size(LAYERS))]
    layers = tuple(decoder_layer(build, i, attn(i, f"{n}.self_attn"), mlp(i, f"{n}.mlp"), form) for i, n in names)
    factors = {"embed_factor": embed_factor, "logit_factor": logit_factor}
    return model_around(build, layers, form, **factors, logit_cap=logit_cap, head_bias=head_bias)


def model_around(
    build: Build,
    layers: Sequence[Any],
    form: LayerForm = PRE_NORM,
    *,
    embed_factor: float = 1.0,
    logit_factor: float = 1.0,
    logit_cap: float | None = None,
    head_bias: bool = False,
) -> ops.CausalLM:
    """Build a causal language model around its layers.

    Args:
        build, form, embed_factor, logit_factor, logit_cap, head_bias: as of `decoder_model`.
        layers: ops that a stack calls in order.
    """
    config = build.config
    vocab, width = config.size("vocab_size"), config.size("hidden_size")
    embed = build.embedding("model.embed_tokens", vocab, width)
    head = build.head(embed, vocab, width)
    mine = build.local_size("vocab_size", vocab)
    bias = Weight((f"{HEAD}.bias",), (mine,), shard=build.shard(0)) if head_bias else None
    is_plain = logit_factor == 1 and logit_cap is None and bias is None
    return ops.CausalLM(
        embed=embed if embed_factor == 1 else ops.ScaledEmbedding(embed, embed_factor),
        layers=ops.DecoderStack(tuple(layers)),
        norm=form.norm_before(build, f"model.{form.last}", width),
        head=head if is_plain else ops.ScaledHead(head, logit_factor, logit_cap, bias),
        gather=build.gather(),
    )


def layer_kinds(
    config: Config, known: tuple[str, ...], left_out: Sequence[str], entry: str = "layer_types"
) -> list[str]:
    """The kind of each layer: `layer_types`, or another entry, or `left_out` if the config lacks it.

    Args:
        config: the model's.
        known: kinds that are implemented.
        left_out: what stands for an absent entry.
        entry: of the config.

    Raises:
        CheckpointError: it is not a list with a name for each layer.
        UnsupportedModelError: a layer has another kind.
    """
    kinds, layers = config.get(entry), config.size(LAYERS)
    kinds = list(left_out) if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CheckpointError(
            f"{config.name}: {entry} is not a list of {layers} names, one a layer.",
            remedy="correct the entry, or fetch the file again",
        )
    for kind in kinds:
        config.check(entry, kind, known)
    return kinds


def list_layers(config: Config, entry: str, left_out: Collection[int]) -> Collection[int]:
    """Numbers of the layers that a config's entry lists, or `left_out` if the config lacks it.

    Raises:
        CheckpointError: it is not a list.
    """
    listed = config.get(entry)
    if listed is None:
        return left_out
    if not isinstance(listed, list):
        raise CheckpointError(f"{config.name}: {entry} is {listed!r}, not a list.", remedy="fetch the file again")
    return listed


def dense_mlp(
    build: Build, *, bias: bool = False, act: str = "silu", fused: bool = False
) -> Callable[[int, str], ops.GatedMLP]:
    """Return a function that builds a layer's gated MLP from the layer's number and the MLP's name.

    Args:
        build: its config gives the sizes.
        bias: whether its linear layers have biases.
        act: the activation, a name of `ops.activation.ACTIVATIONS`; the config may not name another.
        fused: whether gate and up are stored as one, `gate_up_proj`.
    """
    inner, width = build.config.size("intermediate_size"), build.config.size("hidden_size")
    return lambda i, name: build.mlp(name, inner, width, bias=bias, act=act, fused=fused)


def plain_mlp(
    build: Build,
    act: str,
    *,
    bias: bool = False,
    names: tuple[str, str] = ("up_proj", "down_proj"),
    inner: int | None = None,
) -> Callable[[int, str], ops.MLP]:
    """Return a function that builds a layer's MLP without a gate from the layer's number and the MLP's name.

    Args:
        build: its config gives the sizes.
        act: the activation, a name of `ops.activation.ACTIVATIONS`; the config may not name another.
        bias: whether its linear layers have biases.
        names: names of the linear layers in the checkpoint.
        inner: its inner size over all ranks; None: `intermediate_size`.
    """
    inner, width = inner or build.config.size("intermediate_size"), build.config.size("hidden_size")
    build.config.refuse(hidden_act=ACTIVATION_NAMES[act])
    mine = build.local_size("intermediate_size", inner)

    def mlp(i: int, name: str) -> ops.MLP:
        up, down = (f"{name}.{part}" for part in names)
        return ops.MLP(
            up=build.linear(up, rows=mine, columns=width, axis=0, bias=bias),
            down=build.linear(down, rows=width, columns=mine, axis=1, bias=bias),
            act=ops.Activation(act),
            reduce=build.reduce(),
        )

    return mlp


def needs_stored_parts(build: Build) -> bool:
    """Whether projections that the checkpoint stores as one (q, k and v; gate and up) are read as one.

    Quantized ones are, which one rank can do; others are read part by part (`names.canonical_names`).

    Raises:
        UnsupportedModelError: several ranks would have to share a quantized one.
    """
    settings = build.config.get("quantization_config")
    in_rows = isinstance(settings, Mapping) and settings.get("quant_method") == "gguf"  # whose scales lie in the rows
    whole = settings is not None and not in_rows
    if whole and build.placement.tp_size > 1:
        raise UnsupportedModelError(
            f"{build.config.name}: quantized projections that are stored as one, on several ranks.",
            there_is="one rank, or a checkpoint that is not quantized",
        )
    parts = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") if whole else ("qkv_proj", "gate_up_proj")
    build.ignore(*(f"model.layers.*.{part}.weight" for part in parts))
    return whole
