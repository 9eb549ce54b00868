"""Writes a GGUF model as a folder in the Hugging Face layout: config, safetensors, tokenizer, chat template."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from inferplane.errors import UsageError
from inferplane.gguf.opened import GGUFModel
from inferplane.models.reading.checkpoint import INDEX, SINGLE
from inferplane.models.reading.config import Config
from inferplane.models.reading.gguf_source import GGUFSource
from inferplane.models.reading.names import CONVOLUTION
from inferplane.models.registry import constructor
from inferplane.types import Shard

SHARD_BYTES = 4 * 2**30
"""Most bytes of a safetensors file, but for a single larger tensor; all of them are in memory while it is written."""
_STACK = re.compile(r"(.*\.experts)\.\d+\.(gate_up_proj|down_proj)\.(weight|bias)")
_STACKED = "gpt-oss"
"""The architecture, as GGUF names it, whose experts are published as one tensor a layer, inputs before outputs."""
Progress = Callable[[int, int], None]


def convert(file: Path, folder: Path, dtype: torch.dtype | None = None, progress: Progress | None = None) -> None:
    """Write a GGUF file's model to a new folder; after a failure there is none.

    Args:
        file: the model's file, or one of its shards.
        folder: must not exist.
        dtype: of the weights; None: as the file has them, and float32 where they are packed, which holds every value.
        progress: called with the number of tensors written, and of all.

    Raises:
        UsageError: the folder exists or cannot be written, or the file holds no language model.
        CheckpointError: the file is damaged. UnsupportedModelError: its architecture is not known.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists.", remedy="name another folder, or remove it")
    model = GGUFModel.open(file)
    entries = dict(model.entries)
    if dtype is not None or model.is_packed:
        entries["torch_dtype"] = str(dtype or torch.float32).removeprefix("torch.")
    constructor(Config(entries, str(file)).architecture, {})
    source, derived = GGUFSource(model.header, model.meta), model.derive_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
            made = Path(parent) / folder.name
            shutil.copytree(derived, made)
            (made / "config.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
            is_stacked = model.header.metadata.get("general.architecture") == _STACKED
            _write_tensors(source, made, dtype, progress, stacked=is_stacked)
            made.rename(folder)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror or error}.", remedy="choose another folder, or free space"
        ) from error
    finally:
        source.close()


def _write_tensors(
    source: GGUFSource, folder: Path, dtype: torch.dtype | None, progress: Progress | None, *, stacked: bool
) -> None:
    """Write all tensors: to one file, or to several with an index."""
    names = sorted(source.names())
    files: list[Path] = []
    where: dict[str, int] = {}
    held: dict[str, torch.Tensor] = {}
    total, size = 0, 0

    def write() -> None:
        files.append(folder / f"part-{len(files)}.safetensors")
        save_file(held, files[-1], {"format": "pt"})
        held.clear()

    for count, (name, tensor) in enumerate(_stack(source, names) if stacked else _read(source, names, dtype), 1):
        tensor = tensor if dtype is None else tensor.to(dtype)
        nbytes = tensor.numel() * tensor.element_size()
        if held and size + nbytes > SHARD_BYTES:
            write()
            size = 0
        held[name], where[name] = tensor, len(files)
        total, size = total + nbytes, size + nbytes
        if progress is not None:
            progress(min(count, len(names)), len(names))
    write()
    if len(files) == 1:
        files[0].rename(folder / SINGLE)
        return
    titles = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    for path, title in zip(files, titles):
        path.rename(folder / title)
    index = {"metadata": {"total_size": total}, "weight_map": {name: titles[n] for name, n in where.items()}}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _read(source: GGUFSource, names: list[str], dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by name."""
    for name in names:
        shape, stored = source.shape(name), source.dtype(name)
        assert shape is not None and stored is not None
        out = torch.empty(shape, dtype=dtype or stored)
        source.read_into(name, out, Shard())
        yield name, out[:, None] if CONVOLUTION.fullmatch(name) and out.ndim == 2 else out


def _stack(source: GGUFSource, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by name, with the experts of a layer as one: `[E, D, 2 I]`, `[E, I, D]`, and `[E, n]` of biases."""
    groups: dict[str, list[str]] = {}
    for name in names:
        found = _STACK.fullmatch(name)
        title = name if found is None else f"{found[1]}.{found[2]}{'_bias' if found[3] == 'bias' else ''}"
        groups.setdefault(title, []).append(name)
    for title, parts in groups.items():
        parts.sort(key=lambda part: [int(word) for word in re.findall(r"\d+", part)])
        tensors = [tensor for _, tensor in _read(source, parts, None)]
        if title == parts[0]:
            yield title, tensors[0]
        elif title.endswith("_bias"):
            yield title, torch.cat(tensors)
        else:
            yield title, torch.stack([tensor.T for tensor in tensors]).contiguous()
