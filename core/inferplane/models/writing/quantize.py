"""Writes a model's checkpoint anew in the formats of a quantization scheme, weight by weight."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from inferplane.binding.load import check
from inferplane.errors import CheckpointError, InferplaneError, UnsupportedModelError, UsageError, warn
from inferplane.models.build import Build
from inferplane.models.reading.config import Config
from inferplane.models.reading.kv_scales import find_kv_scales
from inferplane.models.reading.normalize import SPELLINGS, TEXT_PART_OF
from inferplane.models.registry import build
from inferplane.models.writing.carried_files import carry_files, list_carried
from inferplane.models.writing.compressed_form import (
    FORMS,
    GROUP_SIZES,
    WEIGHT,
    amax_of_scales,
    describe,
    find_storable,
    plan_tensors,
    regroup,
    split,
)
from inferplane.models.writing.disk_space import check_space, refuse_write
from inferplane.models.writing.fused_names import is_stored_within, list_parts
from inferplane.models.writing.kv_scales import (
    TYPES,
    describe_alone,
    describe_scheme,
    list_layers,
    names_of,
    plan_scales,
)
from inferplane.models.writing.model_card import UNCALIBRATED, CardFacts, write_card
from inferplane.models.writing.model_to_quantize import Calibrated, ModelToQuantize
from inferplane.models.writing.planned_source import PlannedSource, find_published_shape
from inferplane.models.writing.safetensors_writer import PlannedTensor, SafetensorsWriter, count_bytes
from inferplane.models.writing.shared_factors import SharedFactors
from inferplane.quant import quantize_on_load, read_quant_config, requantize_on_load
from inferplane.quant.instructions import TRANSFORMS, take_transforms
from inferplane.quant.online import max_magnitude
from inferplane.quant.requantize import requantize
from inferplane.types import PLAIN, QTensor, Shard

Progress = Callable[[int, int], None]
SAME_WEIGHTS = {"a8w8c8": ("a8w8", "int8"), "a8w8c8_fp8": ("a8w8_fp8", "fp8")}
"""Schemes that differ from another one in the cache alone, and its dtype: entries are quantized while running."""
HEADER_BYTES, TEXT_BYTES = 256, 2**16
"""Most bytes of a tensor's entry in the header of its file, and of config and model card."""
DTYPES = {"float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True)
class QuantizedFolder:
    """What was written: the folder, bytes of all tensors, and weights by format."""

    folder: Path
    nbytes: int
    weights: Mapping[str, int]


def quantize_checkpoint(
    origin: ModelToQuantize,
    scheme: str | None,
    folder: Path,
    version: str,
    progress: Progress | None = None,
    calibrate: Callable[[QuantizedCopy], Calibrated] | None = None,
    group: int | None = None,
    kv_dtype: str | None = None,
) -> QuantizedFolder:
    """Write a quantized copy of a model to a new folder; after a failure there is none.

    Weights are rounded to nearest, some rows at a time; one weight is in memory at a time. Those that are quantized
    already are expanded in float32 first, or taken as they are where they have the scheme's format. With `calibrate`,
    weights that it found are written in their place.

    Args:
        origin: the model.
        scheme: a quantization scheme; None: weights stay as they are.
        folder: must not exist.
        version: of Inferplane, for the model card.
        progress: called with the number of tensors written, and of all.
        calibrate: called once it is known that the copy can be written.
        group: columns that share a scale of integers of 4 bits; None: as the scheme has it.
        kv_dtype: KV dtype for which the copy gets static scales, "int8" or "fp8", which `calibrate` finds; None: none.

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
            f"quantization = {scheme!r} quantizes the cache too, by scales that no checkpoint holds.",
            there_is=f"{other!r}, which has the same weights; static scales of the cache, by --kv-cache {dtype}",
            remedy=f"quantize with {other}, and load with kv_cache_dtype={dtype!r}",
        )
    if group not in (None, *GROUP_SIZES):
        raise UsageError(f"group_size = {group!r}.", there_is=", ".join(map(str, GROUP_SIZES)))
    if kv_dtype is not None and (kv_dtype not in TYPES or calibrate is None):
        there_is = ", ".join(sorted(TYPES))
        raise UsageError(
            f"Static scales of a KV cache in {kv_dtype!r}.", there_is=there_is, remedy="pass texts (--data)"
        )
    copy = QuantizedCopy(origin, scheme, group, kv_dtype)
    copy.check()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        check_space(folder.parent, {str(folder): copy.max_bytes})
        if calibrate is not None:
            copy.calibrated = calibrate(copy)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-", dir=folder.parent) as parent:
            made = Path(parent) / folder.name
            made.mkdir()
            carry_files(origin.folder, made)
            writer = SafetensorsWriter(made, copy.planned)
            writer.write(copy.tensors(progress))
            (made / "config.json").write_text(json.dumps(copy.config, indent=2) + "\n", encoding="utf-8")
            (made / "README.md").write_text(copy.describe(folder.name, version), encoding="utf-8")
            made.rename(folder)
    except OSError as error:
        takes, goes_on = {str(folder): copy.max_bytes}, calibrate is not None
        raise refuse_write(error, folder.parent, takes, goes_on=goes_on) from error
    return QuantizedFolder(folder, writer.nbytes, Counter(copy.formats.values()))


class QuantizedCopy:
    """What a quantized copy holds, known before a tensor is read.

    Args:
        origin: the model.
        scheme, group, kv_dtype: see `quantize_checkpoint`.

    Attributes: `stored`, the formats of the model as it is, and `source`, its tensors as their readers need them;
    `formats`, those of the copy's quantized weights; `quants`, format -> quantization of activations; `calibrated`,
    what is written in place of weights rounded to nearest, or None.
    """

    def __init__(
        self, origin: ModelToQuantize, scheme: str | None, group: int | None = None, kv_dtype: str | None = None
    ) -> None:
        self.origin, self.scheme, self.group, self.kv_dtype = origin, scheme, group, kv_dtype
        config, names = origin.config, set(origin.source.names())
        if config.get(TEXT_PART_OF) is not None:
            raise UnsupportedModelError(
                f"{origin.name} has towers for images beside its language model.",
                there_is="copies of language models alone",
                remedy=f"load it with quantization={scheme!r}, which quantizes while it reads",
            )
        self.stored = read_quant_config(config.get("quantization_config"), names)
        self._found = self.stored
        if scheme is not None:
            self._found = requantize_on_load(quantize_on_load(scheme, config), self.stored)
        self.source = self.stored.view(origin.source)
        self.calibrated: Calibrated | None = None
        self.formats: dict[str, str] = {}
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        old = find_kv_scales(config.get("quantization_config"), names)
        self._old_scales = {
            name for parts in (old.tensors if old is not None else {}).values() for name in parts.values()
        }
        self._factors = SharedFactors(self.formats, self._find_amax)
        for name in self.names if scheme is not None else ():
            self._choose(name)
        if scheme is None and any(self.stored.format_of(name) != PLAIN for name in self.names):
            raise UsageError(
                f"{origin.name} has quantized weights, which are not written as they are.",
                remedy="name a scheme (--quantization), or begin with the model in 16 bits",
            )
        if scheme is not None and all(self.stored.format_of(name) == format for name, format in self.formats.items()):
            what = "has these formats already" if self.formats else "has no weights that it quantizes"
            raise UsageError(f"quantization = {scheme!r} changes nothing: {origin.name} {what}.")
        if self._old_scales and kv_dtype is None:
            warn(f"{origin.name} has static scales of the KV cache, which the copy has not. --kv-cache finds new ones.")
        self._deepseek_form = set(self.formats.values()) == {"fp8_block"} and kv_dtype is None
        self.quants = self._found.activation_quants

    @cached_property
    def names(self) -> list[str]:
        """Tensors that the copy has: without scales, and without parts of projections that are stored as one."""
        every = set(self.source.names()) - self._old_scales
        modules = {name.removesuffix(WEIGHT) for name in every if self.stored.format_of(name) != PLAIN}
        spelling = SPELLINGS.get(self.origin.config.architecture)
        return [
            name
            for name in sorted(every)
            if not (name.rpartition(".")[0] in modules and not name.endswith((WEIGHT, ".bias")))
            and not (spelling is not None and spelling.is_fused and is_stored_within(name, every))
        ]

    @cached_property
    def kv_layers(self) -> list[str]:
        """Layers that get static scales of the cache."""
        if self.kv_dtype is None:
            return []
        return list_layers(self.origin.config, self.stored, set(self.source.names()), self.origin.plugins)

    def _choose(self, name: str) -> None:
        """Set the format of a weight, if it has one that can be stored."""
        shape = self.source.shape(name) or ()
        format = regroup(self._found.format_of(name), self.group)
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
        stored = self.origin.source.dtype(name)  # None: packed, and expanded while it is read
        return self.dtype if self.stored.format_of(name) != PLAIN or stored is None else stored

    @cached_property
    def planned(self) -> list[PlannedTensor]:
        """All tensors of the copy, in the order in which `tensors` gives them."""
        found: list[PlannedTensor] = []
        for name in self.names:
            shape = self.source.shape(name) or ()
            if name in self.formats:
                found += plan_tensors(name, self.formats[name], shape[:2], self.quants, deepseek=self._deepseek_form)
            else:
                nbytes = count_bytes(shape, self._dtype_of(name))
                found.append(PlannedTensor(name, find_published_shape(name, shape), nbytes))
        return [*found, *plan_scales(self.kv_layers)]

    @property
    def max_bytes(self) -> int:
        """Most bytes of the copy, with its config and the files that it takes over."""
        carried = sum(path.stat().st_size for path in list_carried(self.origin.folder))
        return TEXT_BYTES + carried + sum(HEADER_BYTES + planned.max_bytes for planned in self.planned)

    def tensors(self, progress: Progress | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Read, quantize and give every tensor, by name."""
        if self.calibrated is not None:
            written = {part for name in self.names for part in (name, *list_parts(name))} | set(self._list_scales())
            if lost := sorted(set(self.calibrated.names()) - written):
                raise UnsupportedModelError(
                    f"{len(lost)} calibrated tensors have no place in the copy, first {lost[0]}.",
                    remedy="quantize it without --data",
                )
        for count, name in enumerate(self.names, 1):
            if name in self.formats:
                form, factor = self.formats[name], self._factors.find(name)
                yield from split(name, self._read(name), form, self.quants, deepseek=self._deepseek_form, factor=factor)
            else:
                yield name, self._read_plain(name)
            if progress is not None:
                progress(count, len(self.names))
        for name in self._list_scales():
            scale = self.calibrated.plain(name) if self.calibrated is not None else None
            assert scale is not None, name
            yield name, scale

    def _list_scales(self) -> list[str]:
        """Names of the static scales of the cache."""
        return [name for layer in self.kv_layers for name in names_of(layer)]

    def _read(self, name: str) -> QTensor:
        """A weight in its format."""
        if self.calibrated is not None and (found := self._find_calibrated(name)) is not None:
            return found
        format, requested = self.formats[name], self._found.format_of(name)
        reader = self._found.readers[requested]
        if format == requested:
            q = reader(self.source, name, Shard())
            return q if q.zero is None and q.minimum is None else requantize(q, format)
        stored = self.stored.format_of(name)
        if stored != PLAIN:
            return requantize(self.stored.readers[stored](self.source, name, Shard()), format)
        wide = self._read_plain(name, self.source.dtype(name))
        return requantize(QTensor(wide, torch.ones(len(wide), 1), block=(1, wide.shape[1])), format)

    def _find_amax(self, name: str) -> torch.Tensor:
        q = None if self.calibrated is None else self._find_calibrated(name)
        return max_magnitude(self._read_plain(name)) if q is None else amax_of_scales(q)

    def _find_calibrated(self, name: str) -> QTensor | None:
        """A calibrated weight, also one whose parts were calibrated apart and are stored as one."""
        assert self.calibrated is not None
        if (found := self.calibrated.quantized(name)) is not None:
            return found
        parts = [self.calibrated.quantized(part) for part in list_parts(name)]
        known = [part for part in parts if part is not None]
        return QTensor.cat(known) if known and len(known) == len(parts) else None

    def _find_changed(self, name: str) -> torch.Tensor | None:
        """The new values of a tensor that is not quantized, also of one that holds several parts."""
        assert self.calibrated is not None
        if (found := self.calibrated.plain(name)) is not None:
            return found
        parts = [self.calibrated.plain(part) for part in list_parts(name)]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if known and len(known) == len(parts) else None

    def _read_plain(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor's values, in the dtype of the copy or another one."""
        if self.calibrated is not None and (found := self._find_changed(name)) is not None:
            return found.to(self._dtype_of(name)).reshape(find_published_shape(name, self.source.shape(name) or ()))
        shape, stored = self.source.shape(name) or (), self.stored.format_of(name)
        if stored != PLAIN:
            return self.stored.readers[stored](self.source, name, Shard()).dequantize(self.dtype)
        out = torch.empty(shape, dtype=dtype or self._dtype_of(name))
        self.source.read_into(name, out, Shard())
        return out.reshape(find_published_shape(name, shape))

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
        others = (n for n in self.names if n not in self.formats and not n.endswith("embed_tokens.weight"))
        matrices = (n for n in others if n.endswith(WEIGHT) and len(self.source.shape(n) or ()) == 2)
        plain = [name.removesuffix(WEIGHT) for name in matrices]
        modules = {name.removesuffix(WEIGHT): format for name, format in self.formats.items()}
        stated = describe(modules, self.quants, deepseek=self._deepseek_form, plain=plain)
        if self.kv_dtype is not None:
            stated = {**(stated if modules else describe_alone()), "kv_cache_scheme": describe_scheme(self.kv_dtype)}
        entries |= self.origin.changes
        stated |= {TRANSFORMS: stated_rotations} if (stated_rotations := take_transforms(entries)) else {}
        return {**entries, "quantization_config": stated}

    def check(self) -> None:
        """Check that the copy can be read back, by its names and shapes.

        Raises:
            UnsupportedModelError: it cannot, with the reason.
        """
        source = PlannedSource(self.planned, {name: self.source.shape(name) or () for name in self.formats})
        try:
            config = Config(self.config, self.origin.name)
            found = read_quant_config(config["quantization_config"], set(source.names()))
            model = build(Build(config, format_of=found.format_of), self.origin.plugins)
            wrong = [n for n, format in self.formats.items() if found.format_of(n) != format]
            if wrong:
                raise CheckpointError(f"{len(wrong)} weights would have another format, first {wrong[0]}.")
            check([w for _, w in model.weights() if w.parts], found.view(source))
            scales = find_kv_scales(config["quantization_config"], set(source.names()))
            if self.kv_dtype is not None and (scales is None or not scales.serves(self.kv_dtype)):
                raise CheckpointError(f"{self.origin.name} has no layers with a KV cache.")
        except InferplaneError as error:
            form = self.scheme or f"KV cache in {self.kv_dtype}"
            raise UnsupportedModelError(
                f"A copy of {self.origin.name} in {form!r} could not be read back: {error.what}",
                remedy=f"load it with quantization={self.scheme!r}, which quantizes while it reads",
            ) from error

    def describe(self, name: str, version: str) -> str:
        """The model card, for a folder of this name."""
        calibrated = self.calibrated
        facts = CardFacts(
            self.origin.name,
            self.scheme or "",
            {weight: self.source.shape(weight) or () for weight in self.formats},
            self.formats,
            self.fallbacks,
            self.origin.files,
            self._deepseek_form,
            self.quants,
            UNCALIBRATED if calibrated is None else calibrated.how,
            () if calibrated is None else calibrated.paragraphs,
            self.kv_dtype or "",
        )
        return write_card(facts, name, version)
