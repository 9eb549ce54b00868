"""A checkpoint's weight format that a plugin reads: which weights have it, their shapes, and how each is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from inferplane.types.placement import Shard
from inferplane.types.qtensor import QTensor

WEIGHT, PACKED = ".weight", ".qweight"


def weights_with_scales(names: Collection[str]) -> list[str]:
    """Names of weights beside which a checkpoint has a tensor `MODULE.weight_...`, or has `MODULE.qweight` instead.

    Args:
        names: all tensors of the checkpoint.
    """
    found = {name.partition(f"{WEIGHT}_")[0] + WEIGHT for name in names if f"{WEIGHT}_" in name}
    return sorted(found | {name.removesuffix(PACKED) + WEIGHT for name in names if name.endswith(PACKED)})


@dataclass(frozen=True)
class WeightFormat:
    """How a checkpoint stores its quantized weights. A plugin registers one by the checkpoint's `quant_method`.

    `source` has the checkpoint's tensors: `names()`, `shape(name)` and `dtype(name)` (None where there is no such
    tensor), and `read_tensor(source, name, dtype)` reads one.

    Args:
        read: `(source, name, shard)` -> the rank's part of the weight `name` ("MODULE.weight") in canonical form.
        weights: names of all tensors -> names of the weights that have the format.
        shape: `(source, name)` -> `(N, K)`, the shape of a weight that the checkpoint has under other names; None: the
            shape of the tensor with the weight's name.
        kernels_format: the name by which kernels accept such weights (`When.formats`): one of core's formats if the
            entries are as there, for instance "int4_group32". Left out: the registered name, and where no kernel
            accepts that, weights are dequantized at load.
    """

    read: Callable[[Any, str, Shard], QTensor]
    weights: Callable[[Collection[str]], Iterable[str]] = weights_with_scales
    shape: Callable[[Any, str], tuple[int, ...]] | None = None
    kernels_format: str = ""


def read_tensor(source: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A whole tensor `[...]` of a checkpoint on the host, in its stored shape, converted to `dtype`.

    Args:
        source: what a `WeightFormat`'s functions are given.
        name: of the tensor.
        dtype: of the result.

    Raises:
        CheckpointError: there is no such tensor, or it cannot be read.
    """
    out = torch.empty(source.shape(name) or (), dtype=dtype)
    source.read_into(name, out, Shard())
    return out
