"""Weight formats that plugins read: from the `quant_method` in a checkpoint's config to a plugin's `WeightFormat`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from inferplane.binding import FormatReader, TensorSource
from inferplane.errors import InferplaneError, PluginError
from inferplane.types import QTensor, Shard, WeightFormat
from inferplane.types.kernel import import_target

Fail = Callable[["BaseException | str"], PluginError]
"""Quarantines a format with the reason, and returns the error to raise."""


def open_format(target: Any, settings: Mapping[str, Any], fail: Fail) -> WeightFormat:
    """What a plugin registered, as a `WeightFormat` whose functions quarantine the plugin when they raise or return
    something else than they should.

    Args:
        target: a `WeightFormat`; a reader `(source, name, shard)`; a function of the settings that returns one of them;
            or the dotted name of any.
        settings: the config's `quantization_config`.
        fail: for a plugin that fails.

    Raises:
        PluginError: the target cannot be imported, raises, or is none of these.
        InferplaneError: what the plugin itself raises of these, for instance for settings that it does not know.
    """
    found = _call(fail, import_target, target) if isinstance(target, str) else target
    if not isinstance(found, WeightFormat) and callable(found) and len(inspect.signature(found).parameters) == 1:
        found = _call(fail, found, settings)
    if not isinstance(found, WeightFormat):
        if not callable(found):
            raise fail(f"it has {found!r} for a WeightFormat or a reader (source, name, shard)")
        found = WeightFormat(found)
    return WeightFormat(
        partial(_read, found.read, fail),
        partial(_call, fail, found.weights),
        None if found.shape is None else partial(_call, fail, found.shape),
        found.kernels_format,
    )


def _call(fail: Fail, call: Callable[..., Any], *args: Any) -> Any:
    """A plugin's result; its own InferplaneErrors pass, others quarantine it."""
    try:
        return call(*args)
    except InferplaneError:
        raise
    except Exception as error:
        raise fail(error) from error


def _read(read: FormatReader, fail: Fail, source: TensorSource, name: str, shard: Shard) -> QTensor:
    found = _call(fail, read, source, name, shard)
    want = list(source.shape(name) or ())
    if not shard.is_whole:
        first, last = shard.bounds(want[shard.axis])
        want[shard.axis] = last - first
    if not isinstance(found, QTensor) or found.shape != tuple(want):
        what = f"a QTensor {found.shape}" if isinstance(found, QTensor) else type(found).__name__
        raise fail(f"its reader returned {what} for {name}, not a QTensor {tuple(want)}")
    return found


class ShownWeights:
    """A `TensorSource` that also shows the weights of a format that a checkpoint has under other names.

    Args:
        source: the checkpoint.
        weights: names of the weights.
        shape: `(source, name)` -> a weight's shape.
    """

    def __init__(
        self,
        source: TensorSource,
        weights: Collection[str],
        shape: Callable[[TensorSource, str], tuple[int, ...]],
    ) -> None:
        self.source, self.weights, self._shape = source, weights, shape

    def names(self) -> Iterable[str]:
        """See `TensorSource.names`."""
        return {**dict.fromkeys(self.source.names()), **dict.fromkeys(self.weights)}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource.shape`."""
        return tuple(self._shape(self.source, name)) if name in self.weights else self.source.shape(name)

    def dtype(self, name: str) -> torch.dtype | None:
        """See `TensorSource.dtype`; that of a shown weight is not known."""
        return self.source.dtype(name)

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        """See `TensorSource.read_into`."""
        self.source.read_into(name, out, shard)
