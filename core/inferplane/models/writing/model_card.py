"""The model card of a quantized copy."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inferplane.models.writing.compressed_form import Quants, describe_activations, plan_tensors

CARD = """---
base_model: {source}
library_name: inferplane
tags:
{tags}
---

# {name}, {title}

{source} quantized by Inferplane {version} with `{options}`: {how}

| format | weights | parameters | bytes |
|---|---|---|---|
{rows}

{notes}SHA-256 of the files that it was made from:

{hashes}
"""
UNCALIBRATED = "rounding to nearest, without calibration."
_ALPHABET = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class CardFacts:
    """What a model card says of a copy.

    Args:
        source: the model that was quantized. scheme: the quantization scheme; "": weights are as they were.
        shapes: of the quantized weights. formats: of the same.
        fallbacks: `(requested format, that of the copy)` -> number of weights.
        files: that it was made from.
        deepseek: the copy has DeepSeek's form.
        quants: format of weights -> quantization of activations.
        how: how weights were rounded. paragraphs: further ones.
        kv_dtype: KV dtype for which there are static scales; "": there are none.
    """

    source: str
    scheme: str
    shapes: Mapping[str, tuple[int, ...]]
    formats: Mapping[str, str]
    fallbacks: Mapping[tuple[str, str], int]
    files: Sequence[Path]
    deepseek: bool
    quants: Quants
    how: str = UNCALIBRATED
    paragraphs: Sequence[str] = field(default_factory=tuple)
    kv_dtype: str = ""


def write_card(facts: CardFacts, name: str, version: str) -> str:
    """The text of a model card.

    Args:
        facts: what it says.
        name: of the folder. version: of Inferplane.
    """
    counts: Counter[str] = Counter(facts.formats.values())
    parameters: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for weight, format in facts.formats.items():
        shape = facts.shapes[weight]
        parameters[format] += math.prod(shape)
        of_weight = plan_tensors(weight, format, (shape[0], shape[1]), facts.quants, deepseek=facts.deepseek)
        nbytes[format] += sum(planned.max_bytes for planned in of_weight)
    rows = [f"| {f} | {n:,} | {parameters[f]:,} | at most {nbytes[f]:,} |" for f, n in sorted(counts.items())]
    notes = [
        f"{count} weights are in {new}, because their columns are not whole groups of {old}.\n\n"
        for (old, new), count in sorted(facts.fallbacks.items())
    ]
    if any(describe_activations(f, facts.quants[f]) is None for f in counts if f in facts.quants):
        notes.append(
            f"Activations before weights of 4 bits are quantized with `quantization={facts.scheme!r}` at load; "
            "compressed-tensors cannot state it.\n\n"
        )
    notes += [f"{text}\n\n" for text in facts.paragraphs]
    tags = [tag for tag in (facts.scheme, facts.kv_dtype and f"kv_cache_{facts.kv_dtype}") if tag]
    options = ((facts.scheme, f"--quantization {facts.scheme}"), (facts.kv_dtype, f"--kv-cache {facts.kv_dtype}"))
    hashes = [f"- {path.name}: `{hash_file(path)}`" for path in facts.files]
    return CARD.format(
        source=facts.source,
        name=_ALPHABET.sub("-", name),
        tags="\n".join(f"- {tag}" for tag in tags),
        title=", ".join(tags),
        options=" ".join(words for value, words in options if value),
        version=version,
        how=facts.how,
        rows="\n".join(rows) or "| as they were | - | - | - |",
        notes="".join(notes),
        hashes="\n".join(hashes) or "- none",
    )


def hash_file(path: Path) -> str:
    """The SHA-256 of a file."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**22):
            found.update(part)
    return found.hexdigest()
