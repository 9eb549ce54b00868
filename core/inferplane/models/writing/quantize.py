"""Writes a model's checkpoint anew in the formats of a quantization scheme, weight by weight."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from inferplane.binding import TensorSource
from inferplane.binding.load import check
from inferplane.errors import CapacityError, CheckpointError, InferplaneError, UnsupportedModelError, UsageError
from inferplane.models.build import Build
from inferplane.models.reading.config import Config
from inferplane.models.reading.names import CONVOLUTION
from inferplane.models.reading.normalize import SPELLINGS, TEXT_PART_OF
from inferplane.models.registry import build
from inferplane.models.writing.compressed_form import FORMS, WEIGHT, describe, find_storable, plan_tensors, split
from inferplane.models.writing.safetensors_writer import PlannedTensor, SafetensorsWriter, count_bytes
from inferplane.quant import QuantFormats, quantize_on_load, read_quant_config, requantize_on_load
from inferplane.quant.requantize import requantize
from inferplane.types import PLAIN, QTensor, Shard
from inferplane.units import format_bytes

Progress = Callable[[int, int], None]
SAME_WEIGHTS = {"a8w8c8": ("a8w8", "int8"), "a8w8c8_fp8": ("a8w8_fp8", "fp8")}
"""Schemes that differ from another one in the cache alone, and its dtype: entries are quantized while running."""
CARRIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*", "additional_chat_templates/*")
"""Files that a quantized model takes over: tokenizer, templates, generation config, licences."""
REPLACED = ("config.json", "params.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that say how the source was quantized, or what its config is."""
DTYPES = {"float32": torch.float32, "float16": torch.float16}
CARD = """---
base_model: {source}
library_name: inferplane
tags:
- {scheme}
---

# {name}, {scheme}

{source} quantized by Inferplane {version} with `--quantization {scheme}`: rounding to nearest, without calibration.

| format | weights | parameters | bytes |
|---|---|---|---|
{rows}

{notes}SHA-256 of the files that it was made from:

{hashes}
"""
_ALPHABET = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class QuantizedFolder:
    """What was written: the folder, bytes of all tensors, and weights by format."""

    folder: Path
    nbytes: int
    weights: Mapping[str, int]


@dataclass(frozen=True)
class ModelToQuantize:
    """The model that is quantized.

    Args:
        name: as the user named it.
        config: its entries.
        source: its tensors.
        folder: with tokenizer, templates and licence; None: there is none.
        files: its weights' files, which are hashed.
        plugins: model families of plugins.
    """

    name: str
    config: Config
    source: TensorSource
    folder: Path | None = None
    files: Sequence[Path] = ()
    plugins: Mapping[str, Any] | None = None


def quantize_checkpoint(
    origin: ModelToQuantize, scheme: str, folder: Path, version: str, progress: Progress | None = None
) -> QuantizedFolder:
    """Write a quantized copy of a model to a new folder; after a failure there is none.

    Weights are rounded to nearest, some rows at a time; one weight is in memory at a time. Those that are quantized
    already are expanded in float32 first, or taken as they are where they have the scheme's format.

    Args:
        origin: the model.
        scheme: a quantization scheme.
        folder: must not exist.
        version: of Inferplane, for the model card.
        progress: called with the number of tensors written, and of all.

    Raises:
        UsageError: the folder exists or cannot be written; the scheme is unknown, cannot be stored, or changes nothing.
        CheckpointError: the source is damaged. UnsupportedModelError: the copy could not be read back.
        CapacityError: the disk is too small.
    """
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} exists.", remedy="name another folder, or remove it")
    if scheme in SAME_WEIGHTS:
        other, dtype = SAME_WEIGHTS[scheme]
        raise UsageError(
            f"quantization = {scheme!r} quantizes the cache too, which no checkpoint can hold.",
            there_is=f"{other!r}, which has the same weights",
            remedy=f"quantize with {other}, and load with kv_cache_dtype={dtype!r}",
        )
    copy = _Copy(origin, scheme)
    copy.check()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if copy.max_bytes > free:
            raise CapacityError(
                f"{folder} takes {format_bytes(copy.max_bytes)}, and the disk has {format_bytes(free)} free.",
                remedy="free space, or choose a folder on another disk",
            )
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-", dir=folder.parent) as parent:
            made = Path(parent) / folder.name
            made.mkdir()
            copy.carry_files(made)
            writer = SafetensorsWriter(made, copy.planned)
            writer.write(copy.tensors(progress))
            (made / "config.json").write_text(json.dumps(copy.config, indent=2) + "\n", encoding="utf-8")
            (made / "README.md").write_text(copy.describe(folder.name, version), encoding="utf-8")
            made.rename(folder)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror or error}.", remedy="choose another folder, or free space"
        ) from error
    return QuantizedFolder(folder, writer.nbytes, Counter(copy.formats.values()))


class _Copy:
    """What a quantized copy holds, known before a tensor is read."""

    def __init__(self, origin: ModelToQuantize, scheme: str) -> None:
        self.origin, self.scheme = origin, scheme
        config, names = origin.config, set(origin.source.names())
        if config.get(TEXT_PART_OF) is not None:
            raise UnsupportedModelError(
                f"{origin.name} has towers for images beside its language model.",
                there_is="copies of language models alone",
                remedy=f"load it with quantization={scheme!r}, which quantizes while it reads",
            )
        self._stored = read_quant_config(config.get("quantization_config"), names)
        requested = quantize_on_load(scheme, config)
        self._found: QuantFormats = requantize_on_load(requested, self._stored)
        self._source = self._stored.view(origin.source)
        self.formats: dict[str, str] = {}
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        for name in self.names:
            self._choose(name)
        if all(self._stored.format_of(name) == format for name, format in self.formats.items()):
            what = "has these formats already" if self.formats else "has no weights that it quantizes"
            raise UsageError(f"quantization = {scheme!r} changes nothing: {origin.name} {what}.")
        self._deepseek_form = set(self.formats.values()) == {"fp8_block"}
        self._quants = self._found.activation_quants

    @cached_property
    def names(self) -> list[str]:
        """Tensors that the copy has: without scales, and without parts of projections that are stored as one."""
        every = set(self._source.names())
        modules = {name.removesuffix(WEIGHT) for name in every if self._stored.format_of(name) != PLAIN}
        spelling = SPELLINGS.get(self.origin.config.architecture)
        return [
            name
            for name in sorted(every)
            if not (name.rpartition(".")[0] in modules and not name.endswith((WEIGHT, ".bias")))
            and not (spelling is not None and spelling.is_fused and _is_part(name, every))
        ]

    def _choose(self, name: str) -> None:
        """Set the format of a weight, if it has one that can be stored."""
        shape = self._source.shape(name) or ()
        format = self._found.format_of(name)
        if format not in FORMS or len(shape) != 2:
            return
        found = find_storable(format, shape[1])
        if found != format:
            self.fallbacks[format, found] += 1
        if found != PLAIN:
            self.formats[name] = found

    # -- tensors

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of weights that are expanded."""
        stated = self.origin.config.get("torch_dtype") or self.origin.config.get("dtype")
        return DTYPES.get(str(stated), torch.bfloat16)

    def _dtype_of(self, name: str) -> torch.dtype:
        stored = self._source.dtype(name)
        return self.dtype if self._stored.format_of(name) != PLAIN or stored is None else stored

    @cached_property
    def planned(self) -> list[PlannedTensor]:
        """All tensors of the copy, in the order in which `tensors` gives them."""
        found: list[PlannedTensor] = []
        for name in self.names:
            shape = self._source.shape(name) or ()
            if name in self.formats:
                found += plan_tensors(name, self.formats[name], (shape[0], shape[1]), deepseek=self._deepseek_form)
            else:
                nbytes = count_bytes(shape, self._dtype_of(name))
                found.append(PlannedTensor(name, _find_published_shape(name, shape), nbytes))
        return found

    @property
    def max_bytes(self) -> int:
        """Most bytes of the copy."""
        return sum(planned.max_bytes for planned in self.planned)

    def tensors(self, progress: Progress | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Read, quantize and give every tensor, by name."""
        for count, name in enumerate(self.names, 1):
            if name in self.formats:
                yield from split(name, self._read(name), self.formats[name], deepseek=self._deepseek_form)
            else:
                yield name, self._read_plain(name)
            if progress is not None:
                progress(count, len(self.names))

    def _read(self, name: str) -> QTensor:
        """A weight in its format."""
        format, requested = self.formats[name], self._found.format_of(name)
        reader = self._found.readers[requested]
        if format == requested:
            q = reader(self._source, name, Shard())
            return q if q.zero is None and q.minimum is None else requantize(q, format)
        stored = self._stored.format_of(name)
        if stored != PLAIN:
            return requantize(self._stored.readers[stored](self._source, name, Shard()), format)
        wide = self._read_plain(name)
        return requantize(QTensor(wide, torch.ones(len(wide), 1), block=(1, wide.shape[1])), format)

    def _read_plain(self, name: str) -> torch.Tensor:
        """A tensor's values."""
        shape, stored = self._source.shape(name) or (), self._stored.format_of(name)
        if stored != PLAIN:
            return self._stored.readers[stored](self._source, name, Shard()).dequantize(self.dtype)
        out = torch.empty(shape, dtype=self._dtype_of(name))
        self._source.read_into(name, out, Shard())
        return out.reshape(_find_published_shape(name, shape))

    # -- what lies beside them

    @cached_property
    def config(self) -> dict[str, Any]:
        """Entries of the copy's config.json."""
        raw = self.origin.folder / "config.json" if self.origin.folder is not None else None
        entries = json.loads(raw.read_text(encoding="utf-8")) if raw is not None and raw.is_file() else None
        entries = dict(self.origin.config) if entries is None else entries
        entries = {key: value for key, value in entries.items() if key != "compression_config"}
        if "torch_dtype" not in entries and "dtype" not in entries:
            entries["torch_dtype"] = str(self.dtype).removeprefix("torch.")
        plain = [
            name.removesuffix(WEIGHT)
            for name in self.names
            if name.endswith(WEIGHT) and name not in self.formats and len(self._source.shape(name) or ()) == 2
        ]
        plain = [module for module in plain if not module.endswith("embed_tokens")]
        modules = {name.removesuffix(WEIGHT): format for name, format in self.formats.items()}
        stated = describe(modules, self._quants, deepseek=self._deepseek_form, plain=plain)
        return {**entries, "quantization_config": stated}

    def check(self) -> None:
        """Check that the copy can be read back, by its names and shapes.

        Raises:
            UnsupportedModelError: it cannot, with the reason.
        """
        source = _PlannedSource(self.planned, {name: self._source.shape(name) or () for name in self.formats})
        try:
            config = Config(self.config, self.origin.name)
            found = read_quant_config(config["quantization_config"], set(source.names()))
            model = build(Build(config, format_of=found.format_of), self.origin.plugins)
            wrong = [n for n, format in self.formats.items() if found.format_of(n) != format]
            if wrong:
                raise CheckpointError(f"{len(wrong)} weights would have another format, first {wrong[0]}.")
            check([w for _, w in model.weights() if w.parts], found.view(source))
        except InferplaneError as error:
            raise UnsupportedModelError(
                f"A copy of {self.origin.name} in {self.scheme!r} could not be read back: {error.what}",
                remedy=f"load it with quantization={self.scheme!r}, which quantizes while it reads",
            ) from error

    def carry_files(self, folder: Path) -> None:
        """Copy tokenizer, templates, generation config and licences."""
        origin = self.origin.folder
        if origin is None:
            return
        for path in sorted(path for pattern in CARRIED for path in origin.glob(pattern)):
            if path.is_file() and path.name not in REPLACED and ".safetensors" not in path.name:
                target = folder / path.relative_to(origin)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)

    def describe(self, name: str, version: str) -> str:
        """The model card."""
        counts: Counter[str] = Counter(self.formats.values())
        parameters: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for weight, format in self.formats.items():
            shape = self._source.shape(weight) or ()
            parameters[format] += math.prod(shape)
            of_weight = plan_tensors(weight, format, (shape[0], shape[1]), deepseek=self._deepseek_form)
            nbytes[format] += sum(planned.max_bytes for planned in of_weight)
        rows = [f"| {f} | {n:,} | {parameters[f]:,} | at most {nbytes[f]:,} |" for f, n in sorted(counts.items())]
        notes = [
            f"{count} weights are in {new}, because their columns are not whole groups of {old}.\n\n"
            for (old, new), count in sorted(self.fallbacks.items())
        ]
        if any(FORMS[f] == "pack-quantized" and f in self._quants for f in counts):
            notes.append(
                f"Activations before weights of 4 bits are quantized with `quantization={self.scheme!r}` at load; "
                "compressed-tensors cannot state it.\n\n"
            )
        hashes = [f"- {path.name}: `{_hash(path)}`" for path in self.origin.files]
        return CARD.format(
            source=self.origin.name,
            name=_ALPHABET.sub("-", name),
            scheme=self.scheme,
            version=version,
            rows="\n".join(rows),
            notes="".join(notes),
            hashes="\n".join(hashes) or "- none",
        )


class _PlannedSource:
    """Names and shapes of tensors that are not written yet.

    Args:
        planned: the tensors.
        weights: shapes of the quantized weights.
    """

    def __init__(self, planned: Iterable[PlannedTensor], weights: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes, self._weights = {tensor.name: tensor.shape for tensor in planned}, weights

    def names(self) -> Iterable[str]:
        """See `TensorSource.names`."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource.shape`."""
        found = self._shapes.get(name)
        return found[::2] if found is not None and CONVOLUTION.fullmatch(name) and len(found) == 3 else found

    def dtype(self, name: str) -> torch.dtype | None:
        """See `TensorSource.dtype`; packed integers are known by their names, and no others are known."""
        return torch.int32 if name.endswith("weight_packed") else None

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        """Only the shapes of packed weights are known."""
        out.copy_(torch.tensor(self._weights[name.removesuffix("_shape")]))


def _find_published_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], 1, shape[1]) if CONVOLUTION.fullmatch(name) and len(shape) == 2 else shape


def _is_part(name: str, every: Collection[str]) -> bool:
    """Whether a tensor is also part of one that is stored as one."""
    whole = re.sub(r"(q|k|v)_proj\.weight$", "qkv_proj.weight", name)
    whole = re.sub(r"(gate|up)_proj\.weight$", "gate_up_proj.weight", whole)
    return whole != name and whole in every


def _hash(path: Path) -> str:
    """The SHA-256 of a file."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**22):
            found.update(part)
    return found.hexdigest()
