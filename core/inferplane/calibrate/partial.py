"""What a calibration that is under way has done so far, in a folder beside the result: it can go on after a kill.

Each layer's tensors are one safetensors file, the hidden states before the next layer another. A file appears under its
name when complete, so that what is there is whole.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from inferplane.calibrate.calibrator import LayerResult
from inferplane.calibrate.layers import Hidden
from inferplane.errors import CheckpointError
from inferplane.ops.formats import FORMATS
from inferplane.types import QTensor
from inferplane.types.qtensor import scale_shape

SETTINGS = "settings.json"
HIDDEN = "hidden"
DATA, SCALE = "data", "scale"
PARTIAL = ".partial"
"""Ends the names of files that are not complete yet."""
HEADER_BYTES = 512
"""Of a tensor's name, shape and form in a file's header, with both of its parts, at most."""
_NUMBER = re.compile(r"\(os error (\d+)\)")


@dataclass(frozen=True)
class LayerReport:
    """What is said of a calibrated layer.

    Args:
        error: see `LayerResult`.
        folded: places where channels were rescaled. unfolded: places that were left as they were.
        shifted, unshifted: the same of places where channels were shifted.
    """

    error: float
    folded: int
    unfolded: int
    shifted: int = 0
    unshifted: int = 0


class PartialCalibration:
    """The folder of a calibration: `begin` makes or continues one.

    Args:
        folder: holds it.

    Attributes: `done`, the number of calibrated layers.

    Raises:
        CheckpointError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Path] = {}
        self.done = 0
        while self._layer_path(self.done).is_file():
            self._index(self._layer_path(self.done))
            self.done += 1
        if self.done and not self._states_path(self.done - 1).is_file():
            self.done -= 1  # killed between the two files: the layer is calibrated again

    @classmethod
    def begin(cls, folder: Path, settings: Mapping[str, Any]) -> PartialCalibration:
        """Make the folder, or go on with what it holds.

        Args:
            folder: made if need be.
            settings: everything that the result depends on.

        Raises:
            CheckpointError: the folder holds something else, or another calibration.
        """
        requested = json.loads(json.dumps(settings))
        path = folder / SETTINGS
        if folder.exists() and not path.is_file() and any(x.suffix != PARTIAL for x in folder.iterdir()):
            raise CheckpointError(f"{folder} holds something else than a calibration.", remedy="move it away")
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            _write_text(path, json.dumps(requested))
        elif json.loads(path.read_text(encoding="utf-8")) != requested:
            raise CheckpointError(
                f"{folder} holds a calibration that began with other settings.",
                remedy="run the same command to finish it, or remove the folder",
            )
        return cls(folder)

    def _layer_path(self, number: int) -> Path:
        return self.folder / f"layer-{number:04}.safetensors"

    def _states_path(self, number: int) -> Path:
        return self.folder / f"{HIDDEN}-{number:04}.safetensors"

    def add(self, result: LayerResult, hidden: Sequence[Hidden]) -> None:
        """Write the next layer's tensors, and what the layer after it reads."""
        tensors: dict[str, torch.Tensor] = {}
        forms = {}
        for name, q in result.quantized.items():
            tensors[f"{name}|{DATA}"], tensors[f"{name}|{SCALE}"] = q.data.contiguous(), q.scale.contiguous()
            forms[name] = [q.block, q.bits]
        tensors.update({name: value.contiguous() for name, value in result.plain.items()})
        report = LayerReport(result.error, *result.folded, *result.shifted)
        path = self._layer_path(self.done)
        _save(path, tensors, {"forms": json.dumps(forms), "report": json.dumps(asdict(report))})
        states = {}
        for number, each in enumerate(hidden):
            found = {name: tensor for name, tensor in each._asdict().items() if tensor is not None}
            states.update({f"{name}.{number}": tensor.contiguous() for name, tensor in found.items()})
        _save(self._states_path(self.done), states, {})
        if self.done:
            self._states_path(self.done - 1).unlink(missing_ok=True)
        self._index(path)
        self.done += 1

    def read_hidden(self) -> list[Hidden]:
        """What the next layer reads of each window."""
        with _open(self._states_path(self.done - 1)) as file:
            names = set(file.keys())
            count = sum(name.startswith("x.") for name in names)
            return [
                Hidden(**{p: file.get_tensor(f"{p}.{i}") for p in Hidden._fields if f"{p}.{i}" in names})
                for i in range(count)
            ]

    def _index(self, path: Path) -> None:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                self._files[name.removesuffix(f"|{SCALE}").removesuffix(f"|{DATA}")] = path

    def names(self) -> list[str]:
        """Tensors of all calibrated layers, by checkpoint names."""
        return sorted(self._files)

    def quantized(self, name: str) -> QTensor | None:
        """A calibrated weight; None if there is none of this name."""
        path = self._files.get(name)
        if path is None:
            return None
        with _open(path) as file:
            form = json.loads(file.metadata()["forms"]).get(name)
            if form is None:
                return None
            block, bits = form
            data, scale = file.get_tensor(f"{name}|{DATA}"), file.get_tensor(f"{name}|{SCALE}")
            return QTensor(data, scale, block=(block[0], block[1]), bits=bits)

    def plain(self, name: str) -> torch.Tensor | None:
        """The new values of a tensor that is not quantized; None if they did not change."""
        path = self._files.get(name)
        if path is None:
            return None
        with _open(path) as file:
            is_quantized = name in json.loads(file.metadata()["forms"])
            value: torch.Tensor | None = None if is_quantized else file.get_tensor(name)
            return value

    def reports(self) -> list[LayerReport]:
        """What is said of each layer."""
        found = []
        for number in range(self.done):
            with _open(self._layer_path(number)) as file:
                found.append(LayerReport(**json.loads(file.metadata()["report"])))
        return found


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}.", remedy="remove its folder, and calibrate again"
        ) from error


def _save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file that appears when it is complete."""
    made = path.with_suffix(PARTIAL)
    try:
        save_file(dict(tensors), made, metadata={**metadata})
        os.replace(made, path)
    except SafetensorError as error:
        number = _NUMBER.search(str(error))
        raise (OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))) from error
    finally:
        made.unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    """Write a file that appears when it is complete."""
    made = path.with_suffix(PARTIAL)
    try:
        made.write_text(text, encoding="utf-8")
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)


def count_bytes(folder: Path) -> int:
    """Bytes of the files in a folder; of none if there is none."""
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0


def count_layer_bytes(weights: Mapping[str, tuple[tuple[int, ...], str]], others: Iterable[tuple[int, ...]]) -> int:
    """Most bytes of the files of all layers.

    Args:
        weights: shapes and formats of quantized weights, by name.
        others: shapes of other tensors that may change.
    """
    total = sum(4 * math.prod(shape) + HEADER_BYTES for shape in others)
    for shape, format in weights.values():
        rows, columns = FORMATS[format][2]
        scales = scale_shape(shape, (rows, columns or shape[-1]))
        total += math.prod(shape) + 4 * math.prod(scales) + HEADER_BYTES
    return total
