"""`Build`: what a family's constructor uses to declare weights, shard them over ranks and make common ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models.reading.config import Config
from inferplane.models.rope import rope_table
from inferplane.ops import (
    ActivationMul,
    AddRMSNorm,
    AllGather,
    AllReduce,
    Embedding,
    GatedMLP,
    LayerNorm,
    Linear,
    LMHead,
    RMSNorm,
    RotatedActivation,
    SiluMul,
    WidthRMSNorm,
)
from inferplane.ops.formats import join_formats
from inferplane.quant.instructions import InputRotation, find_rotations
from inferplane.types import PLAIN, WHOLE, ActivationQuant, Placement, Shard, StoredWidths, Weight

HEAD = "lm_head"
ACTIVATION_NAMES: Mapping[str, tuple[str, ...]] = {
    "silu": ("silu",),
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "relu2": ("relu2",),
}
"""Names of activations, and what configs call them."""
FormatOf = Callable[[str], str]
"""From the name of a checkpoint tensor to its weight format."""


def _plain_format(name: str) -> str:
    return PLAIN


def _no_widths(name: str) -> None:
    return None


@dataclass(frozen=True)
class Build:
    """Everything that a family's constructor needs besides its own arithmetic.

    Args:
        config: the checkpoint's config.
        placement: the rank of this process among those that share the model.
        format_of: returns the weight format of a checkpoint tensor.
        positions: number of positions that the rotary tables must cover.
        mtp: whether to build the multi-token-prediction layers too.
        ignored: shell patterns of checkpoint tensors that the family knows and does not read; `ignore` adds to it.
        activation_quants: weight format -> quantization of the activations that are multiplied by such weights.
        formats_read_by_row: quantized formats from which the device's kernels can read single rows. If a head in one of
            these formats is tied to the embedding, both share its weight; otherwise the embedding stays plain.
        widths_of: returns what the checkpoint says of a tensor's numbers beyond its format, or None.
        rotates_index_keys: whether index keys are rotated so that a scale per token loses less.

    Raises:
        UnsupportedModelError: the placement divides experts and layers over different numbers of ranks.
    """

    config: Config
    placement: Placement = field(default_factory=Placement)
    format_of: FormatOf = _plain_format
    positions: int = 4096
    mtp: bool = False
    ignored: list[str] = field(default_factory=list, compare=False)
    activation_quants: Mapping[str, ActivationQuant] = field(default_factory=dict)
    formats_read_by_row: frozenset[str] = frozenset()
    widths_of: Callable[[str], StoredWidths | None] = _no_widths
    rotates_index_keys: bool = False

    def __post_init__(self) -> None:
        place = self.placement
        if place.ep_size > 1 and (place.ep_rank, place.ep_size) != (place.tp_rank, place.tp_size):
            raise UnsupportedModelError(
                f"ep_size = {place.ep_size} beside tp_size = {place.tp_size} is not implemented.",
                there_is="the same ranks for both, or ep_size = 1, with tp_size to divide every expert",
                remedy="use Placement.shared(rank, size)",
            )

    def ignore(self, *patterns: str) -> None:
        """Declare checkpoint tensors that are not read. Other tensors that nothing reads are reported."""
        self.ignored.extend(patterns)

    # -- weights

    def weight(
        self,
        names: Iterable[str],
        shape: tuple[int, ...],
        axis: int | None = None,
        shards: tuple[Shard, ...] | None = None,
        rows: tuple[int, ...] = (),
        rotates: bool = False,
        **options: Any,
    ) -> Weight:
        """Declare a weight that stacks the tensors `name.weight`.

        Args:
            names: names of the parts.
            shape: shape on this rank.
            axis: the axis that is divided over the tensor-parallel ranks; None: not divided.
            shards: the slice to read of each part, where `axis` does not say it.
            rows: rows of each part on this rank; by default the parts have equally many.
            rotates: what it is multiplied by is rotated where the checkpoint says so.
            options: further fields of `Weight`.

        Raises:
            CheckpointError: the parts are stored in different formats.
            UnsupportedModelError: the checkpoint says that its input is rotated, and it is not.
        """
        names = tuple(names)
        for name in names if self._rotations and not rotates else ():
            if any(rotation.includes(name) for rotation in self._rotations):
                raise UnsupportedModelError(
                    f"{self.config.name}: the checkpoint says that the input of {name} is rotated while running.",
                    there_is="rotations before down_proj of gated MLPs",
                    remedy="take a checkpoint that was quantized without it",
                )
        parts = tuple(f"{name}.weight" for name in names)
        formats = {self.format_of(part) for part in parts}
        if len(formats) > 1 and (joined := join_formats(formats)) is not None:
            formats = {joined}
        elif PLAIN in formats and self._has_packed_blocks:
            formats = {PLAIN}  # the packed parts are expanded while they are read
        if len(formats) > 1:
            raise CheckpointError(
                f"{parts[0]} and {len(parts) - 1} more are fused, but stored in formats {', '.join(sorted(formats))}.",
                remedy="quantize all parts of a fused weight alike",
            )
        rows = rows or (math.prod(shape[:-1]) // len(parts),) * len(parts)
        shard, format = shards or self.shard(axis), formats.pop()
        return Weight(
            parts,
            shape,
            format=format,
            shard=shard,
            rows=rows,
            activation_quant=self.activation_quants.get(format),
            widths=self._join_widths(parts),
            **options,
        )

    def _join_widths(self, parts: Iterable[str]) -> StoredWidths | None:
        """The widths that hold the numbers of all parts; None if those of a part are not known."""
        found = [self.widths_of(part) for part in parts]
        known = [widths for widths in found if widths is not None]
        if len(known) < len(found):
            return None
        return StoredWidths(max(w.entry_bits for w in known), all(w.has_unit_scales for w in known))

    def shard(self, axis: int | None) -> Shard:
        """The slice that this rank reads of a weight whose `axis` is divided."""
        place = self.placement
        return WHOLE if axis is None or place.tp_size == 1 else Shard(axis, place.tp_rank, place.tp_size)

    def local_size(self, name: str, size: int) -> int:
        """How much of a dimension this rank has; `name` is its config entry, for errors."""
        return self.placement.part(name, size)

    def linear(
        self,
        *names: str,
        rows: int | tuple[int, ...],
        columns: int,
        axis: int | None = None,
        bias: bool = False,
        shards: tuple[Shard, ...] | None = None,
        rotates: bool = False,
        **options: Any,
    ) -> Linear:
        """Declare a linear layer whose weight stacks the rows of several checkpoint tensors.

        Args:
            names: names of the parts.
            rows: rows on this rank: of all parts together if they are equal, or of each part.
            columns: columns on this rank.
            axis: 0 divides the outputs over the ranks, 1 the inputs. With 1 the block sums the results over ranks, so
                only the first rank adds the bias.
            bias: whether the layer has a bias.
            shards: the slice to read of each part, where `axis` does not say it.
            rotates: its input is rotated where the checkpoint says so.
            options: further fields of `Linear`.
        """
        total, each = (rows, (rows // len(names),) * len(names)) if isinstance(rows, int) else (sum(rows), rows)
        biases = None
        if bias and not (axis == 1 and self.placement.tp_rank):
            shard = shards or self.shard(0 if axis == 0 else None)
            biases = Weight(tuple(f"{name}.bias" for name in names), (total,), shard=shard, rows=each)
        elif bias:
            self.ignore(*(f"{name}.bias" for name in names))  # the first rank adds it
        weight = self.weight(names, (total, columns), axis, shards, each, rotates=rotates)
        return Linear(weight, biases, **options)

    def router(self, name: str, experts: int, width: int) -> Linear:
        """Declare a router: a linear layer that computes its result in float32."""
        return self.linear(name, rows=experts, columns=width, out_dtype=torch.float32)

    def rms_norm(self, name: str, width: int, eps: float | None = None) -> RMSNorm:
        """Declare an RMS norm. `eps` defaults to the config's epsilon."""
        return RMSNorm(Weight((f"{name}.weight",), (width,)), self._rms_norm_eps if eps is None else eps)

    @cached_property
    def _has_packed_blocks(self) -> bool:
        """Whether the checkpoint is a GGUF file, whose tensors have values in any format."""
        settings = self.config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("quant_method") == "gguf"

    @cached_property
    def _rms_norm_eps(self) -> float:
        return self.config.number_from_zero("rms_norm_eps", 1e-6)

    def offset_rms_norm(self, name: str, width: int) -> RMSNorm:
        """Declare an RMS norm whose weight is stored without its 1."""
        return replace(self.rms_norm(name, width), offset=1.0)

    def layer_norm(self, name: str, width: int, entry: str = "layer_norm_eps", *, bias: bool = False) -> LayerNorm:
        """Declare a layer norm; `entry` is the config's entry with its epsilon, `bias` whether it has a bias."""
        bias_weight = Weight((f"{name}.bias",), (width,)) if bias else None
        return LayerNorm(Weight((f"{name}.weight",), (width,)), self.config.number_from_zero(entry), bias_weight)

    def head_norm(self, name: str, heads: int, dim: int, shard: Shard) -> LayerNorm:
        """Declare a layer norm of each of this rank's heads; `shard` is their slice of the weight."""
        weight = Weight((f"{name}.weight",), (heads, dim), shard=WHOLE if self.placement.tp_size == 1 else shard)
        return LayerNorm(weight, self.config.number_from_zero("layer_norm_eps"))

    def width_norm(self, name: str, dim: int, heads: int, shard: Shard) -> WidthRMSNorm:
        """Declare an RMS norm over all heads together.

        Args:
            name: of the norm.
            dim: entries of a head.
            heads: number of heads over all ranks; `shard` is this rank's slice.

        Raises:
            UnsupportedModelError: there are more ranks than heads, so that some would count twice.
        """
        ranks = self.placement.tp_size
        if heads % ranks:
            raise UnsupportedModelError(
                f"{self.config.name}: norms over {heads} heads on {ranks} ranks.",
                there_is="numbers of ranks that divide the number of heads",
            )
        weight = Weight((f"{name}.weight",), (heads // ranks * dim,), shard=WHOLE if ranks == 1 else shard)
        return WidthRMSNorm(weight, self.config.number_from_zero("rms_norm_eps", 1e-6), heads * dim, self.reduce())

    def add_rms_norm(self, name: str, width: int) -> AddRMSNorm:
        """Declare an RMS norm that first adds the residual."""
        return AddRMSNorm(self.rms_norm(name, width))

    def reduce(self) -> AllReduce | None:
        """The op that sums the results of a linear layer with divided inputs over the ranks; None on one rank."""
        return AllReduce(self.placement.tp_size) if self.placement.tp_size > 1 else None

    def mlp(
        self,
        name: str,
        inner: int,
        width: int,
        entry: str = "intermediate_size",
        *,
        bias: bool = False,
        act: str = "silu",
        fused: bool = False,
    ) -> GatedMLP:
        """Declare a gated MLP of `gate_proj`, `up_proj` and `down_proj`.

        Args:
            name: of the MLP.
            inner: its inner size over all ranks; `entry` is the config's entry for it, for errors.
            width: size of inputs and outputs.
            bias: whether all three have biases.
            act: the activation, a name of `ops.activation.ACTIVATIONS`.
            fused: whether gate and up are stored as one, `gate_up_proj`, which one rank can read.

        Raises:
            UnsupportedModelError: the config names another activation than `act`.
        """
        self.config.refuse(hidden_act=ACTIVATION_NAMES[act])
        mine = self.local_size(entry, inner)
        parts = [f"{name}.gate_up_proj"] if fused else [f"{name}.gate_proj", f"{name}.up_proj"]
        plain = SiluMul() if act == "silu" else ActivationMul(act)
        block = self._find_rotation(f"{name}.down_proj", mine)
        return GatedMLP(
            gate_up=self.linear(*parts, rows=2 * mine, columns=width, axis=0, bias=bias),
            down=self.linear(f"{name}.down_proj", rows=width, columns=mine, axis=1, bias=bias, rotates=True),
            act=RotatedActivation(plain, block) if block else plain,
            reduce=self.reduce(),
        )

    def _find_rotation(self, module: str, columns: int) -> int:
        """How many of a module's columns on this rank read what a rotation mixes; 0: it reads its input as it is."""
        found = {r.block or columns for r in self._rotations if r.includes(module)}
        if len(found) > 1 or any(columns % block or block & (block - 1) for block in found):
            sizes = ", ".join(map(str, sorted(found)))
            raise UnsupportedModelError(
                f"{self.config.name}: {module} reads {columns} columns that are rotated in blocks of {sizes}.",
                there_is="blocks of one size, a power of two that divides the columns of each rank",
                remedy="take fewer ranks, or a checkpoint with other blocks",
            )
        return found.pop() if found else 0

    @cached_property
    def _rotations(self) -> tuple[InputRotation, ...]:
        return find_rotations(self.config)

    def embedding(self, name: str, vocab: int, width: int) -> Embedding:
        """Declare the token embedding; each rank has a range of the vocabulary."""
        mine = self.local_size("vocab_size", vocab)
        weight = self.weight((name,), (mine, width), 0)
        head = self.format_of(f"{HEAD}.weight")
        if self.config.flag("tie_word_embeddings") and weight.format == PLAIN and head in self.formats_read_by_row:
            weight = replace(weight, format=head)
        return Embedding(weight, self.placement.tp_rank * mine, self.reduce())

    def head(self, embed: Embedding, vocab: int, width: int, name: str = HEAD) -> LMHead:
        """Declare the output head. If the config ties it to the embedding, it shares the embedding's weight."""
        if self.config.flag("tie_word_embeddings"):
            self.ignore(f"{name}.weight")  # some exports write it although it is tied
            format, stored = self.format_of(f"{name}.weight"), self.format_of(embed.weight.parts[0])
            if format in (embed.weight.format, stored) or stored != PLAIN:  # what is stored in few bits stays so
                return LMHead(embed.weight)
            return LMHead(replace(embed.weight, format=format))  # the head alone is quantized, while it is read
        weight = self.weight((name,), (self.local_size("vocab_size", vocab), width), 0)
        return LMHead(replace(weight, activation_quant=None))  # no kernel quantizes what the head reads

    def gather(self) -> AllGather | None:
        """The op that joins the ranks' columns of the logits; None on one rank."""
        return AllGather(self.placement.tp_size) if self.placement.tp_size > 1 else None

    def rope(self, dim: int, theta: float = 10000.0) -> Weight:
        """Declare the rotary table for `dim` entries per head; `theta` is the base if the config states none."""
        context = self.config.get("max_position_embeddings")
        settings = {"max_position_embeddings": context, **self.config.rotary(theta)}
        return rope_table(settings, dim, self.positions)
