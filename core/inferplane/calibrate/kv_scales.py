"""Static scales of a layer's KV cache, from what the layer stores while it runs over texts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from inferplane.calibrate.observe import SAMPLE_ROWS
from inferplane.errors import UnsupportedModelError
from inferplane.kvcache import STATIC_DTYPES
from inferplane.types import KVRequest
from inferplane.types.qtensor import round_entries

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Of the largest entry, up to which integers may reach: beyond that entries saturate."""
LEAST = 2.0**-40
"""The largest entry that is assumed at least, so that a scale of entries that are all zero is a number."""


@dataclass
class SeenEntries:
    """Entries that share a scale.

    Args:
        every: one row of so many is held for the search.

    Attributes: `largest`, of the absolute values; NaN if an entry is.
    """

    every: int = 1
    largest: float = 0.0
    rows: int = 0
    held: list[torch.Tensor] = field(default_factory=list)

    def add(self, entries: torch.Tensor) -> None:
        """Count rows of entries, `[T, ...]`."""
        if not len(entries):
            return
        found = entries.abs().amax().item()
        self.largest = found if math.isnan(found) or found > self.largest else self.largest
        self.held.append(entries[-self.rows % self.every :: self.every].flatten(1).clone())
        self.rows += len(entries)

    def choose(self, kv_dtype: str) -> float:
        """The scale: of FP8 the one by which the largest entry is the largest number of E4M3; of integers the one, up
        to that, which loses least, by squares.

        Raises:
            UnsupportedModelError: an entry is not finite.
        """
        if not math.isfinite(self.largest):
            raise UnsupportedModelError(
                f"The KV cache of a layer gets entries of {self.largest}, for which there is no scale.",
                remedy="calibrate on other texts, or leave --kv-cache out",
            )
        limit = STATIC_DTYPES[kv_dtype].limit
        most = max(self.largest, LEAST) / limit
        if kv_dtype == "fp8" or not self.held:
            return most
        sample = torch.cat(self.held)[:SAMPLE_ROWS]
        losses = [(_round(sample, most * share, kv_dtype) - sample).square().sum().item() for share in SHARES]
        return most * SHARES[losses.index(min(losses))]


class KVCalibration:
    """A layer's scales: `see` what it stores, then `choose`, then `round` what it stores.

    A latent's row has one scale, that of K; what of it serves as values, without the rotated key, has another one, V's,
    for caches that hold it apart.

    Args:
        request: what the layer stores.
        kv_dtype: "fp8" or "int8".
        every: as of `SeenEntries`.
    """

    def __init__(self, request: KVRequest, kv_dtype: str, every: int) -> None:
        self.request, self.kv_dtype = request, kv_dtype
        self._seen = SeenEntries(every), SeenEntries(every)
        self.scales: tuple[float, float] | None = None

    def see(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take note of rows that are stored, and give them back: K and V, or latents."""
        keys = values[0]
        of_latents = keys[..., : keys.shape[-1] - self.request.rope]
        for seen, entries in zip(self._seen, (keys, values[1] if len(values) > 1 else of_latents), strict=True):
            seen.add(entries)
        return values

    def choose(self) -> tuple[float, float]:
        """Set and return the scales of K and of V."""
        k, v = (seen.choose(self.kv_dtype) for seen in self._seen)
        self.scales = k, v
        return self.scales

    def round(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows as the cache returns them."""
        assert self.scales is not None
        return tuple(_round(value, scale, self.kv_dtype) for value, scale in zip(values, self.scales))


def _round(entries: torch.Tensor, scale: float, kv_dtype: str) -> torch.Tensor:
    spec = STATIC_DTYPES[kv_dtype]
    return round_entries(entries.float() / scale, spec.dtype, spec.limit).float() * scale
