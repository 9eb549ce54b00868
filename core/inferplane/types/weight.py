"""Weights as a model declares them before any tensor exists, and the packings that kernels request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from inferplane.renamed import NewName, old_names, warn_of_old_name
from inferplane.types.packed import PackedStorage
from inferplane.types.placement import WHOLE, Shard
from inferplane.types.qtensor import QTensor

PLAIN = "plain"


@dataclass(frozen=True)
class ActivationQuant:
    """How a checkpoint expects activations to be quantized before they are multiplied by a quantized weight.

    Args:
        format: "fp8", "int8", "int4" or "mxfp4", as the op `quantize` defines them.
        group: columns that share a scale; 0: one scale per row.
        static: the checkpoint brings one calibrated scale (`QTensor.act_scale`); otherwise scales are computed while
            running.
    """

    format: str
    group: int = 0
    static: bool = False

    def __str__(self) -> str:
        return f"{self.format}_static" if self.static else self.format


class StoredWidths(NamedTuple):
    """What a checkpoint says of a weight's numbers beyond its format, so that their bytes can be counted.

    Args:
        entry_bits: signed integers of so many bits hold all entries.
        has_unit_scales: scales and minimums are integers of 8 bits times one number per 256 columns.
    """

    entry_bits: int
    has_unit_scales: bool = False


OLD_OUTPUT_QUANT = {
    "codes": NewName("output_quant", to_old=lambda quant: "" if quant is None else quant.format),
    "codes_group": NewName("output_quant", to_old=lambda quant: 0 if quant is None else quant.group),
}
"""What kernels of norms read in plugin API 1.0."""


def _from_old_act(act: str) -> ActivationQuant | None:
    """`Weight.act` of plugin API 1.0: "", "fp8", "fp8_static" or "int8"."""
    return ActivationQuant(act.removesuffix("_static"), static=act.endswith("_static")) if act else None


@old_names({"act": NewName("activation_quant", _from_old_act, lambda quant: "" if quant is None else str(quant))})
@dataclass(frozen=True, eq=False)
class Weight:
    """One weight of a model: the checkpoint tensors it is made of, and its shape and format.

    An embedding and an output head that hold the same `Weight` object are tied: they share one tensor. Rows are
    outputs. `parts` are concatenated along rows in the given order; in a stack of experts they fill the `shape[0]`
    slices one after the other. A weight holds no tensor, so a model of any size can be declared at once.

    Args:
        parts: checkpoint names, in order; empty with `make`.
        shape: shape on this rank, `[N, K]`, `[N]`, or `[E, N, K]` for stacked experts.
        dtype: dtype of the values as kernels see them; None follows the plan's dtype.
        format: quantized format of the checkpoint's tensors ("plain", or a registered format such as "fp8_block").
        make: builds a constant (a rope table) instead of reading one; called once at load, and converted to `dtype`.
        shard: the slice of each part that this rank reads; a tuple where the slices differ.
        optional: the checkpoint may lack this weight; `default` is used then.
        default: builds the value of a missing optional weight.
        rows: rows of each part on this rank; empty: only their sum is compared with the shape.
        activation_quant: quantization that the checkpoint expects for the activations multiplied by this weight; None:
            they are not quantized. Kernels may apply it, but need not.
        widths: of the stored numbers; None: as the format says.
    """

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    format: str = PLAIN
    make: Callable[[], torch.Tensor] | None = None
    shard: Shard | tuple[Shard, ...] = WHOLE
    optional: bool = False
    default: Callable[[], torch.Tensor] | None = None
    rows: tuple[int, ...] = ()
    activation_quant: ActivationQuant | None = None
    widths: StoredWidths | None = None

    def __post_init__(self) -> None:
        if isinstance(self.activation_quant, str):  # given by its place, as in plugin API 1.0
            warn_of_old_name("Weight.act", "activation_quant", stacklevel=5)
            object.__setattr__(self, "activation_quant", _from_old_act(self.activation_quant))

    def shard_of(self, part: int) -> Shard:
        """The slice that this rank reads of one part."""
        return self.shard[part] if isinstance(self.shard, tuple) else self.shard

    def key(self) -> tuple[Any, ...]:
        """The static signature: weights with equal keys bind to the same kernel in every layer."""
        quant = () if self.activation_quant is None else (str(self.activation_quant),)
        return ("weight", self.shape, self.dtype, self.format, *quant)

    def accepts(self, stored: torch.dtype) -> bool:
        """Whether a tensor of this dtype has the weight's values without scales: floats of 16 bits and more, or
        integers where the weight is of integers.
        """
        if self.dtype is not None and not self.dtype.is_floating_point:
            return not stored.is_floating_point and not stored.is_complex
        return stored.is_floating_point and stored.itemsize > 1

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of the values in one packing if the plan's dtype is `dtype`; a quantized entry counts as one byte."""
        size = 1 if self.format != PLAIN else (self.dtype or dtype).itemsize
        return math.prod(self.shape) * size


def _same(tensor: Any) -> Any:
    return tensor


@dataclass(frozen=True)
class Packing:
    """A named weight layout. Kernels that request the same name share one packed copy.

    Args:
        name: unique; by convention `provider.layout` ("acme.tiled"). "plain" and "canonical" are reserved.
        fn: canonical tensor or `QTensor` -> what the kernel reads. Pure; may return any object that holds tensors.
        dense: entries of fewer than 8 bits share bytes; in the canonical form each entry has its own byte.
        dequantized: quantized weights are dequantized before `fn`; set by `dequantize_first`.
        storage: how what `fn` returns is written to a file and read again (`inferplane export`). None: as tensors or
            QTensors, which are readable by the same release of the plugin and of torch alone.
        count_bytes: a quantized weight -> bytes of its entries and scales in this layout; None: entries as `dense`
            says, and scales in float32.
    """

    name: str
    fn: Callable[[Any], Any] = field(default=_same, compare=False)
    dense: bool = field(default=False, compare=False)
    dequantized: bool = False
    storage: PackedStorage | None = field(default=None, compare=False)
    count_bytes: Callable[[Weight], int] | None = field(default=None, compare=False)

    def dequantize_first(self, dtype: torch.dtype) -> Packing:
        """The same packing of the weight's dequantized values in `dtype`."""
        fn = self.fn

        def pack(value: Any) -> Any:
            return fn(value.dequantize(dtype) if isinstance(value, QTensor) else value)

        return Packing(self.name, pack, dequantized=True, storage=self.storage)

    @property
    def label(self) -> str:
        """The name in messages and in explain: "plain > " stands before that of a packing of dequantized values."""
        if not self.dequantized:
            return self.name
        return PLAIN if self.name == CANONICAL.name else f"{PLAIN} > {self.name}"

    @property
    def has_reserved_name(self) -> bool:
        """True if the name is "plain", or "canonical" on a packing that is not `CANONICAL`."""
        return self.name == PLAIN or (self.name == CANONICAL.name and self.fn is not CANONICAL.fn)


CANONICAL = Packing("canonical", storage=PackedStorage.of_tensors("1"))
