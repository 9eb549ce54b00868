"""Experts that a checkpoint stores as one tensor a layer, with inputs before outputs, as gpt-oss's own layout has them.

| stored | read, for each expert `e` |
|---|---|
| `experts.gate_up_proj` `[E, D, 2 I]` | `experts.e.gate_up_proj.weight` `[2 I, D]` |
| `experts.gate_up_proj_bias` `[E, 2 I]` | `experts.e.gate_up_proj.bias` `[1, 2 I]` |
| `experts.gate_up_proj_blocks` uint8 `[E, 2 I, D / 32, 16]` | `experts.e.gate_up_proj.weight_blocks` |
| `experts.gate_up_proj_scales` uint8 `[E, 2 I, D / 32]` | `experts.e.gate_up_proj.weight_scales` |

`experts.down_proj` alike, with `[E, I, D]`. Of some families there are also stacks with outputs before inputs, which
their shape tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from inferplane.models.reading.safetensors_header import Entry

_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales|)")
_KINDS = {"": (3, "weight"), "_bias": (2, "bias"), "_blocks": (4, "weight_blocks"), "_scales": (3, "weight_scales")}
"""Suffix of the stored name -> dimensions, and the name of an expert's part."""


def split_stacks(entries: Mapping[str, Entry], width: int = 0) -> dict[str, Entry]:
    """Return the tensors of a checkpoint with each stack of experts as single tensors; nothing is read for that.

    Args:
        entries: the tensors by name. Those that are no stacks stay as they are.
        width: D, where stacks may have outputs before inputs: those whose shape is `[E, 2 I, D]`, or `[E, D, I]`.
    """
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        stacked = _STACKED.fullmatch(name)
        if stacked and len(entry.shape) == _KINDS[stacked[3]][0]:
            found.update(_split(stacked, entry, width))
        else:
            found[name] = entry
    return found


def _split(stacked: re.Match[str], entry: Entry, width: int) -> Iterator[tuple[str, Entry]]:
    before, module, suffix = stacked.groups()
    kind = _KINDS[suffix][1]
    count, *shape = entry.shape
    outputs_first = kind == "weight" and width == shape[-1 if module == "gate_up_proj" else 0]
    if kind == "weight" and not outputs_first:
        shape.reverse()
    elif kind == "bias":
        shape.insert(0, 1)  # a row of a matrix [E, 2 I]
    nbytes = entry.nbytes // max(1, count)
    for e in range(count):
        part = replace(entry, shape=tuple(shape), start=entry.start + e * nbytes, nbytes=nbytes)
        yield f"{before}.{e}.{module}.{kind}", replace(part, transposed=kind == "weight" and not outputs_first)
