"""Puts a quantized checkpoint into the formats of a scheme while it is read: some rows at a time, in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch

from inferplane.binding import FormatReader, TensorSource
from inferplane.ops.formats import FORMATS, dense_bits
from inferplane.quant.online import quantize
from inferplane.quant.stored import QuantFormats
from inferplane.types import PLAIN, QTensor, Shard, StoredWidths, Weight
from inferplane.types.qtensor import scale_shape

ENTRIES_AT_ONCE = 2**21
"""Entries that are expanded to float32 at a time, but for 128 rows of a wide weight."""
ROWS = 128
"""Rows are expanded in multiples of this, so that no block of a format crosses two pieces."""
FormatPairs = Mapping[tuple[str, str], int]
"""`(stored format, format of the scheme)` -> number of weights that are put from one into the other."""


def requantize_on_load(scheme: QuantFormats, stored: QuantFormats) -> QuantFormats:
    """The formats of a quantized checkpoint under a quantization scheme.

    | the scheme says | the checkpoint has | the weight is read |
    |---|---|---|
    | a format | plain values | as from a plain checkpoint |
    | a format | that format | as it is |
    | a format | another format | expanded and quantized, some rows at a time |
    | plain | any format | as it is |

    Activations are quantized as the scheme says.

    Args:
        scheme: what the scheme makes of a plain checkpoint (`quantize_on_load`).
        stored: what the checkpoint states (`read_quant_config`).
    """

    def format_of(name: str) -> str:
        requested = scheme.format_of(name)
        return stored.format_of(name) if requested == PLAIN else requested

    def widths_of(name: str) -> StoredWidths | None:
        return (stored if format_of(name) == stored.format_of(name) else scheme).widths_of(name)

    readers = {
        format: partial(_read, format=format, plain=reader, stored=stored) for format, reader in scheme.readers.items()
    }
    return replace(
        stored,
        format_of=format_of,
        activation_quants=scheme.activation_quants,
        readers={**stored.readers, **readers},
        widths_of=widths_of,
    )


def _read(
    source: TensorSource, name: str, shard: Shard, *, format: str, plain: FormatReader, stored: QuantFormats
) -> QTensor:
    """Read a weight in a scheme's format; `plain` reads it so where the checkpoint has plain values."""
    found = stored.format_of(name)
    if found == PLAIN:
        return plain(source, name, shard)
    q = stored.readers[found](source, name, shard)
    return q if found == format else requantize(q, format)


def requantize(q: QTensor, format: str) -> QTensor:
    """Quantize the values of a quantized weight to another format, by rounding to nearest.

    At most `ENTRIES_AT_ONCE` values, or `ROWS` rows, are in float32 at a time. The result is that of quantizing all
    values at once.

    Args:
        q: `[N, K]` in any format.
        format: one of `FORMATS` that `quantize` knows.
    """
    n, k = q.shape
    step = max(ROWS, ENTRIES_AT_ONCE // max(1, k) // ROWS * ROWS)
    if n <= step:
        return quantize(q.dequantize(), format)
    dtype, bits, (rows, columns) = FORMATS[format]
    block = (rows, columns or k)
    data, scale = torch.empty(n, k, dtype=dtype), torch.empty(scale_shape((n, k), block))
    for first in range(0, n, step):
        last = min(n, first + step)
        part = quantize(q.shard(0, first, last).dequantize(), format)
        data[first:last] = part.data
        scale[first // rows : -(-last // rows)] = part.scale
    return QTensor(data, scale, block=block, bits=bits)


def count_requantized(weights: Iterable[Weight], stored_format_of: Callable[[str], str]) -> FormatPairs:
    """The number of weights that a scheme puts from a stored format into another one.

    Args:
        weights: of the model; each part counts, the experts of a layer one by one.
        stored_format_of: a tensor's name -> its format in the checkpoint.
    """
    pairs = ((stored_format_of(part), w.format) for w in weights if w.format != PLAIN for part in w.parts)
    return Counter(pair for pair in pairs if pair[0] not in (PLAIN, pair[1]))


def explain_requantized(pairs: FormatPairs, scheme: str | None) -> list[str]:
    """A warning for weights that lose by a scheme, because it does not make them smaller.

    Args:
        pairs: as `count_requantized` returns them.
        scheme: the scheme's name.

    Returns:
        At most one message for weights that grow, and one for those that keep their number of bits; fewer bits are what
        the scheme is for.
    """
    found = []
    for grows, words in ((True, "take more memory and have no more in them"), (False, "are no smaller for it")):
        few = {
            pair: count
            for pair, count in pairs.items()
            if _bits(pair[1]) >= _bits(pair[0]) and (_bits(pair[1]) > _bits(pair[0])) is grows
        }
        if few:
            listed = ", ".join(f"{count} from {old} to {new}" for (old, new), count in sorted(few.items()))
            found.append(
                f"quantization = {scheme!r} rounds weights that are quantized already a second time, and they {words}: "
                f"{listed}. Leave quantization out unless the device's kernels need the other format."
            )
    return found


def _bits(format: str) -> int:
    return dense_bits(format) if format in FORMATS else 8
