"""Loads weights one at a time: reads all parts of a weight (sharded, then fused), packs it, and drops the source.

The source of a weight is dropped before the next one is read. If a kernel needs the canonical form, the file is read
directly into it.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from inferplane.binding.plan import Plan
from inferplane.errors import CheckpointError, KernelError, UsageError, first_of, in_words
from inferplane.ops import encode
from inferplane.types import HOST, PLAIN, Packing, QTensor, Shard, Weight
from inferplane.types.qtensor import largest


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint's files, a state dict, random numbers."""

    def names(self) -> Iterable[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None if no tensor has this name."""

    def dtype(self, name: str) -> torch.dtype | None:
        """Dtype in which a tensor is stored; None if no tensor has this name."""

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        """Fill `out` (on the host, contiguous) with this rank's slice of a tensor, converted to its dtype.

        Raises:
            CheckpointError: the tensor cannot be read; names file and tensor.
        """


FormatReader = Callable[[TensorSource, str, Shard], QTensor]
"""Reads one checkpoint tensor of a quantized format, with its scales."""


def static_reader_name(format: str) -> str:
    """Name of the reader for weights of this format with static activation scales (`ActivationQuant.static`)."""
    return f"{format}_static"


Progress = Callable[[int, int], None]
"""`(bytes done, bytes in all)`, called after each weight."""
Store = Callable[[Weight, Packing, Any], None]
"""Takes a weight in one packing."""


@dataclass
class Loaded:
    """The result of loading.

    Args:
        packed: `(id of a weight, packing label)` -> what kernels read.
        unused: unexpected names in the source that no weight reads.
        ignored: expected names in the source that no weight reads.
        nbytes: bytes of all packings.
        broken: checkpoint names of weights that contain NaN or infinity.
    """

    packed: dict[tuple[int, str], Any] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    nbytes: int = 0
    broken: list[str] = field(default_factory=list)

    def complaints(self, model: str) -> Iterator[str]:
        """Warnings for the user about the files of a model that loaded nevertheless, one sentence each."""

        if self.broken:
            yield (
                f"{model}: {len(self.broken)} weight(s) hold NaN or infinity: {first_of(self.broken)}. Requests that "
                "use them will fail; fetch the files again."
            )
        if self.unused:
            yield (
                f"{model}: {len(self.unused)} tensor(s) of the checkpoint are not part of the model and were not read: "
                f"{first_of(self.unused)}. Check that its config belongs to it."
            )


def load(
    plan: Plan,
    source: TensorSource | DummySource,
    device: str = HOST,
    *,
    readers: Mapping[str, FormatReader] | None = None,
    progress: Progress | None = None,
    ignore: Sequence[str] = (),
    missing: Mapping[int, Mapping[str, Packing]] | None = None,
    store: Store | None = None,
) -> Loaded:
    """Read and pack the weights of a plan.

    Args:
        plan: lists the needed weights and their packings.
        source: where the tensors are.
        device: torch device of the packed weights.
        readers: a reader for each quantized format in the plan.
        progress: called after each weight.
        ignore: shell patterns of names that no weight needs to read.
        missing: id of a weight -> the packings to make of it, by label; None: every weight in all packings of the plan.
        store: takes each packed weight, in place of `Loaded.packed`.

    Raises:
        CheckpointError: tensors are missing, or have another shape or kind of dtype than the model. All are checked
            before any is read; the message counts them and names the first.
        KernelError: a packing raised; the message names the kernels that request it.
    """
    requested = plan.packings if missing is None else missing
    weights = [plan.weights[i] for i in requested]
    names_read = set() if isinstance(source, DummySource) else check(weights, source)
    total = sum(plan.nbytes(w, name) for w in weights for name in requested[id(w)])
    loaded = Loaded()
    store = store or (lambda weight, packing, packed: loaded.packed.update({(id(weight), packing.label): packed}))
    for weight in weights:
        if isinstance(source, DummySource):
            full = source.draw(weight, plan.settings.dtype)
        else:
            full = assemble(weight, _RecordingSource(source, names_read), plan.settings.dtype, readers or {})
            if weight.parts and not is_finite(full):
                loaded.broken.append(weight.parts[0])
        packings = requested[id(weight)]
        if device != HOST:
            full = full.to(device)
        for name, packing in packings.items():
            try:
                packed = packing.fn(full)
            except Exception as error:
                users = sorted(plan.users[id(weight)][name])
                raise KernelError(
                    f"Packing {name!r} of {weight.parts[:1] or 'a constant'} raised {in_words(error)}. "
                    f"It is requested by {', '.join(users[:3])}.",
                    remedy="pin another provider for these sites",
                ) from error
            store(weight, packing, packed)
            del packed
            loaded.nbytes += plan.nbytes(weight, name)
        del full  # before the next weight is read; otherwise two canonical forms would be in memory at once
        if progress is not None:
            progress(loaded.nbytes, total)
    for name in sorted(set(source.names()) - names_read):
        expected = any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)
        (loaded.ignored if expected else loaded.unused).append(name)
    return loaded


class _RecordingSource:
    """A source that records which names are read: a format's reader also reads scales, which no weight names."""

    def __init__(self, source: TensorSource, read: set[str]) -> None:
        self.source, self.read = source, read

    def names(self) -> Iterable[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.source.shape(name)

    def dtype(self, name: str) -> torch.dtype | None:
        return self.source.dtype(name)

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        self.read.add(name)
        self.source.read_into(name, out, shard)

    def raw(self, name: str, first_row: int = 0, rows: int | None = None) -> Any:
        """What a source of blocks has beside values (`inferplane.quant.gguf_blocks`)."""
        self.read.add(name)
        return self.source.raw(name, first_row, rows)  # type: ignore[attr-defined]


def check(weights: Iterable[Weight], source: TensorSource) -> set[str]:
    """Check names, shapes and dtypes of all parts before any is read; returns the parts' names.

    Raises:
        CheckpointError: a part is missing, misshapen, or stored as numbers that are meaningless without scales.
    """
    missing, wrong, strange, names_read = [], [], [], set()
    for weight in weights:
        rows, columns, present, right = [0] * _groups(weight), set(), 0, True
        for i, part in enumerate(weight.parts):
            names_read.add(part)
            shape = source.shape(part)
            if shape is None:
                if not weight.optional or weight.default is None:
                    missing.append(part)
                continue
            present += 1
            dtype = source.dtype(part)
            if weight.format == PLAIN and dtype is not None and not weight.accepts(dtype):
                strange.append(f"{part} {str(dtype).removeprefix('torch.')}")
            if len(shape) in (len(weight.shape), min(2, len(weight.shape))):  # else it is misshapen and counts no rows
                shape = _shard_shape(part, shape, weight.shard_of(i))
                mine = _rows(weight, shape)
                rows[i * len(rows) // len(weight.parts)] += mine
                right = right and (not weight.rows or mine == weight.rows[i])
                columns.add(shape[-1])
        if not present:
            continue
        want = _rows(weight, weight.shape) // len(rows)
        right = right and all(n == want for n in rows)
        if not right or (len(weight.shape) > 1 and columns != {weight.shape[-1]}):
            found = ", ".join(f"{p} {source.shape(p)}" for p in weight.parts[:3])
            each = f" of {' + '.join(map(str, weight.rows[:3]))} rows" if len(weight.parts) > 1 and weight.rows else ""
            more = (", ...", " + ...") if len(weight.parts) > 3 else ("", "")
            wrong.append(f"{found}{more[0]} for {weight.shape}{each}{more[1] if each else ''}")
    if missing:
        raise CheckpointError(
            f"The checkpoint lacks {len(missing)} tensor(s) the model needs: {first_of(missing)}.",
            remedy="check that all its files are there and that its config belongs to it",
        )
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensor(s) have other shapes than the model's config says: {'; '.join(wrong[:3])}.",
            remedy="check that the config belongs to the checkpoint",
        )
    if strange:
        raise CheckpointError(
            f"{len(strange)} tensor(s) are stored in a dtype that means nothing without scales: "
            f"{', '.join(strange[:3])}.",
            remedy="check that the checkpoint has its scales, and its config a quantization_config",
        )
    return names_read


def assemble(
    weight: Weight, source: TensorSource, dtype: torch.dtype, readers: Mapping[str, FormatReader]
) -> torch.Tensor | QTensor:
    """One weight in canonical form on the host, sharded and fused.

    Raises:
        CheckpointError: a part cannot be read, or no reader is registered for the weight's format.
    """
    if weight.make is not None:
        return _make(weight, dtype)
    if weight.optional and weight.default is not None and source.shape(weight.parts[0]) is None:
        return weight.default()
    if weight.format != PLAIN:
        return _assemble_quantized(weight, source, readers)
    full = torch.empty(weight.shape, dtype=weight.dtype or dtype)
    flat = full.view(-1, weight.shape[-1]) if len(weight.shape) > 1 else full
    row = 0
    for i, part in enumerate(weight.parts):
        shard = weight.shard_of(i)
        shape = _shard_shape(part, source.shape(part) or (), shard)
        rows = _rows(weight, shape)
        source.read_into(part, flat[row : row + rows].view(shape), shard)
        row += rows
    return full


def is_finite(full: torch.Tensor | QTensor) -> bool:
    """Whether a weight contains no NaN or infinity; in quantized weights, scales, minimums and FP8 data are checked."""
    if isinstance(full, QTensor):
        data = full.data
        fp8 = data.view(torch.uint8).flatten().split(2**24) if data.dtype is torch.float8_e4m3fn else ()
        if full.minimum is not None and not is_finite(full.minimum):
            return False
        return is_finite(full.scale) and not any(bool(((part & 0x7F) == 0x7F).any()) for part in fp8)
    if not full.numel() or not full.is_floating_point():
        return True
    if bool(full.sum().isfinite()):  # twice as fast as the check below, but large numbers may overflow it
        return True
    return bool(torch.stack(full.aminmax()).isfinite().all())


def _assemble_quantized(weight: Weight, source: TensorSource, readers: Mapping[str, FormatReader]) -> QTensor:
    quant = weight.activation_quant
    reader = readers.get(static_reader_name(weight.format) if quant and quant.static else weight.format)
    if reader is None:
        raise CheckpointError(
            f"Weight format {weight.format!r} of {weight.parts[0]} has no reader.",
            there_is=", ".join(sorted(readers)) or "none",
            remedy="install the plugin that reads it",
        )
    if len(weight.parts) == 1:
        return reader(source, weight.parts[0], weight.shard_of(0))
    if len(weight.shape) == 2:
        return QTensor.cat([reader(source, name, weight.shard_of(i)) for i, name in enumerate(weight.parts)])
    experts = weight.shape[0]
    each = len(weight.parts) // experts
    stack: QTensor | None = None
    for e in range(experts):  # one expert at a time: a layer's experts are most of the weights
        parts = range(e * each, (e + 1) * each)
        q = QTensor.cat([reader(source, weight.parts[i], weight.shard_of(i)) for i in parts])
        if stack is None:
            zero = None if q.zero is None else q.zero.new_empty(experts, *q.zero.shape)
            data, scale = q.data.new_empty(experts, *q.data.shape), q.scale.new_empty(experts, *q.scale.shape)
            minimum = None if q.minimum is None else q.minimum.new_empty(experts, *q.minimum.shape)
            stack = replace(q, data=data, scale=scale, zero=zero, minimum=minimum)
        else:
            stack = replace(stack, act_scale=largest([stack.act_scale, q.act_scale]))
        stack.data[e], stack.scale[e] = q.data, q.scale
        if stack.zero is not None and q.zero is not None:
            stack.zero[e] = q.zero
        if stack.minimum is not None and q.minimum is not None:
            stack.minimum[e] = q.minimum
    assert stack is not None, weight.parts[:1]
    return stack


def _make(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """A constant; in the plan's dtype if it states none."""
    assert weight.make is not None
    return weight.make().to(weight.dtype or dtype)


def _groups(weight: Weight) -> int:
    """Number of slices that the parts are stacked into: one per expert, else one."""
    return weight.shape[0] if len(weight.shape) == 3 and len(weight.parts) % weight.shape[0] == 0 else 1


def _rows(weight: Weight, shape: tuple[int, ...]) -> int:
    """Rows of a shape; for a vector, its number of entries."""
    return math.prod(shape[:-1]) if len(weight.shape) > 1 else math.prod(shape)


def _shard_shape(name: str, shape: tuple[int, ...], shard: Shard) -> tuple[int, ...]:
    if shard.is_whole:
        return shape
    try:
        first, last = shard.bounds(shape[shard.axis])
    except UsageError as error:
        raise CheckpointError(
            f"Tensor {name} has {shape[shard.axis]} entries in dimension {shard.axis}, which {shard.size} ranks cannot "
            "share equally.",
            remedy=f"choose a tensor-parallel size that divides {shape[shard.axis]}",
        ) from error
    return (*shape[: shard.axis], last - first, *shape[shard.axis + 1 :])


class DictSource:
    """Tensors in memory, e.g. a state dict.

    Args:
        tensors: by name, on any device; never changed.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        """See `TensorSource.names`."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource.shape`."""
        found = self.tensors.get(name)
        return None if found is None else tuple(found.shape)

    def dtype(self, name: str) -> torch.dtype | None:
        """See `TensorSource.dtype`."""
        found = self.tensors.get(name)
        return None if found is None else found.dtype

    def read_into(self, name: str, out: torch.Tensor, shard: Shard) -> None:
        """See `TensorSource.read_into`."""
        tensor = self.tensors[name]
        if not shard.is_whole:
            first, last = shard.bounds(tensor.shape[shard.axis])
            tensor = tensor.narrow(shard.axis, first, last - first)
        out.copy_(tensor)


class DummySource:
    """Random weights of the declared shapes, for trying sizes and speeds without a checkpoint.

    Args:
        seed: any integer; equal seeds give equal weights.
    """

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator(HOST).manual_seed(seed)

    def names(self) -> Iterable[str]:
        """No names."""
        return ()

    def draw(self, weight: Weight, dtype: torch.dtype) -> torch.Tensor | QTensor:
        """One whole weight: norms near 1, matrices scaled so that activations keep their magnitude."""
        if weight.make is not None:
            return _make(weight, dtype)
        if weight.format != PLAIN:
            fan_in = weight.shape[-1]
            return encode(torch.randn(weight.shape, generator=self.generator) / math.sqrt(fan_in), weight.format)
        out = torch.empty(weight.shape, dtype=weight.dtype or dtype)
        mean, deviation = (1.0, 0.1) if len(weight.shape) == 1 else (0.0, 1 / math.sqrt(weight.shape[-1]))
        return out.normal_(mean, deviation, generator=self.generator) if out.is_floating_point() else out.zero_()
