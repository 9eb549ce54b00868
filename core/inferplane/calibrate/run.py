"""`calibrate`: what `inferplane quantize --data` does for a copy that is to be written."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inferplane.calibrate.calibrator import Calibrator
from inferplane.calibrate.layers import LayeredModel
from inferplane.calibrate.partial import PartialCalibration, count_bytes, count_layer_bytes
from inferplane.calibrate.recipe import Recipe
from inferplane.calibrate.shifts import check_shifts
from inferplane.calibrate.texts import MIN_WINDOW, hash_windows
from inferplane.errors import UnsupportedModelError, UsageError
from inferplane.models.build import Build
from inferplane.models.draft_layers import find_stored
from inferplane.models.reading.kv_scales import LAYER
from inferplane.models.registry import build
from inferplane.models.writing.disk_space import check_space, refuse_write
from inferplane.models.writing.kv_scales import PARTS
from inferplane.models.writing.quantize import QuantizedCopy
from inferplane.ops import HyperLayer, MTPLayer
from inferplane.quant import READERS
from inferplane.quant.instructions import TRANSFORMS
from inferplane.types import PLAIN, QTensor

Progress = Callable[[int, int], None]
EXACTLY = "without changing float32 results"
ROUNDED = "which changes results by no more than biases in the checkpoint's dtype are rounded"
ROTATED = (
    "The residual stream and the values of attention are rotated, without changing float32 results by more than "
    "1e-5; so the embedding and the head are two tensors."
)


ROTATED_INNER = (
    "What down_proj of an MLP reads is multiplied by a Hadamard matrix while running, as the config's transform_config "
    "says."
)


@dataclass(frozen=True)
class CalibrationSettings:
    """How a model is calibrated.

    Args:
        recipe: the methods.
        windows: token ids.
        data: names of the texts' files, for the model card.
        seed: of anything random.
        quantizes_weights: whether the methods have weights to quantize; else the cache's scales are all that is found.
    """

    recipe: Recipe
    windows: Sequence[Sequence[int]]
    data: Sequence[str] = ()
    seed: int = 0
    quantizes_weights: bool = True


class CalibratedTensors:
    """What a calibration found, for the copy that is written.

    Args:
        partial: the folder that holds it.
        settings: how it was made.
        predicting: how many of the layers, the last ones, are prediction layers.
        rotates_inner: what the second products of MLPs read is rotated while running.
    """

    def __init__(
        self,
        partial: PartialCalibration,
        settings: CalibrationSettings,
        *,
        predicting: int = 0,
        rotates_inner: bool = False,
    ) -> None:
        self._partial = partial
        windows, names = settings.windows, ", ".join(settings.recipe.names) or "nearest"
        tokens = sum(map(len, windows))
        by = f" ({names})" if settings.quantizes_weights else ""
        self.how = f"calibrated{by} on {len(windows)} windows, {tokens:,} tokens, with seed {settings.seed}."
        reports = partial.reports()
        losses = [f"{report.error:.2e}" for report in reports]
        own = len(losses) - predicting
        listed = ", ".join(losses[:own]) + (
            f"; prediction layers (MTP): {', '.join(losses[own:])}" if predicting else ""
        )
        folded, shifted = sum(report.folded for report in reports), sum(report.shifted for report in reports)
        unshifted = sum(report.unshifted for report in reports)
        self.paragraphs: Sequence[str] = [
            f"SHA-256 of the windows' token ids: `{hash_windows(windows)}`. Texts: {', '.join(settings.data) or '-'}.",
            f"What quantizing each layer added, as squares of the error over squares of its result: {listed}.",
            *([ROTATED] if settings.recipe.rotation is not None else []),
            *([ROTATED_INNER] if rotates_inner else []),
            *_describe_cache(partial),
            *([f"Channels were shifted behind {shifted} norms, {ROUNDED}."] if shifted else []),
            *([f"{unshifted} norms were not shifted: float32 results would change."] if unshifted else []),
            *([f"Channels were rescaled in {folded} places, {EXACTLY}."] if folded else []),
        ]

    def names(self) -> list[str]:
        """See `Calibrated.names`."""
        return self._partial.names()

    def quantized(self, name: str) -> QTensor | None:
        """See `Calibrated.quantized`."""
        return self._partial.quantized(name)

    def plain(self, name: str) -> torch.Tensor | None:
        """See `Calibrated.plain`."""
        return self._partial.plain(name)


def calibrate(
    copy: QuantizedCopy,
    settings: CalibrationSettings,
    folder: Path,
    plugins: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> CalibratedTensors:
    """Calibrate a copy's weights layer by layer, or go on where an earlier call with the same settings was ended.

    Args:
        copy: what is to be written.
        settings: methods and windows.
        folder: where unfinished work is stored, one file a layer; the caller removes it.
        plugins: model families of plugins.
        progress: called with the number of layers done, and of all.

    Raises:
        UsageError: a window is too short or has ids that the model lacks.
        UnsupportedModelError: the model cannot be calibrated.
        CheckpointError: a tensor cannot be read, or the folder holds something else.
        CapacityError: the disk is too small, or was full; the same call goes on with what is there.
    """
    config = copy.origin.config
    longest = max(map(len, settings.windows), default=1)
    model = build(Build(config, format_of=copy.stored.format_of, positions=longest, mtp=True), plugins)
    if not len(model.layers):
        raise UnsupportedModelError(f"{copy.origin.name} has no layers.", remedy="quantize it without --data")
    if any(isinstance(layer, HyperLayer) for layer in model.layers):
        raise UnsupportedModelError(
            f"{copy.origin.name} has layers with hyper-connections, which are not calibrated.",
            remedy="quantize it without --data",
        )
    predicting = tuple(x for x in find_stored(model, set(copy.source.names())) if isinstance(x, MTPLayer))
    vocab, positions = (int(config.get(name) or 0) for name in ("vocab_size", "max_position_embeddings"))
    check_windows(settings.windows, vocab, positions, max(MIN_WINDOW, len(predicting) + 1))
    layered = LayeredModel(model, copy.source, {**READERS, **copy.stored.readers})
    calibrator = Calibrator(
        layered,
        settings.windows,
        lambda name: copy.formats.get(name, PLAIN),
        copy.quants,
        settings.recipe,
        settings.seed,
        copy.kv_dtype,
    )
    if settings.recipe.shift is not None:
        if not copy.quants:
            raise UsageError(
                "Shifting channels makes activations easier to quantize, and this scheme quantizes weights alone.",
                remedy="leave the method out, or take a scheme that quantizes activations, such as a8w8",
            )
        check_shifts(copy.origin.name, model.layers)
    check_space(folder, _list_space(copy, settings, folder))
    with _writing(copy, settings, folder):
        partial = PartialCalibration.begin(folder, describe(copy, settings))
    if partial.done:
        calibrator.hidden = partial.read_hidden()
    else:
        calibrator.begin()
    count = len(model.layers)
    for number in range(count + len(predicting)):
        if number >= partial.done:
            if number < count:
                result = calibrator.calibrate_layer(model.layers[number])
            else:
                result = calibrator.calibrate_prediction(predicting, number - count)
            with _writing(copy, settings, folder):
                partial.add(result, calibrator.hidden)
        if progress is not None:
            progress(number + 1, count + len(predicting))
    rotates_inner = TRANSFORMS in copy.origin.changes
    return CalibratedTensors(partial, settings, predicting=len(predicting), rotates_inner=rotates_inner)


@contextlib.contextmanager
def _writing(copy: QuantizedCopy, settings: CalibrationSettings, folder: Path) -> Iterator[None]:
    """Raise CapacityError, which says what is needed, where the block finds the disk full."""
    try:
        yield
    except OSError as error:
        raise refuse_write(error, folder, _list_space(copy, settings, folder), goes_on=True) from error


def _list_space(copy: QuantizedCopy, settings: CalibrationSettings, folder: Path) -> dict[str, int]:
    """What is still to be written -> its most bytes: layers, with hidden states before and behind one, and the copy."""
    source, names = copy.source, copy.names
    weights = {name: (source.shape(name) or (), format) for name, format in copy.formats.items()}
    changes = settings.recipe.scale or settings.recipe.shift
    others = [name for name in names if name not in weights and LAYER.match(name)] if changes else []
    width = int(copy.origin.config.get("hidden_size") or 0)
    states = 2 * 2 * 4 * width * sum(map(len, settings.windows))
    unfinished = count_layer_bytes(weights, (source.shape(name) or () for name in others)) + states
    return {str(folder): max(0, unfinished - count_bytes(folder)), "the copy": copy.max_bytes}


def _describe_cache(partial: PartialCalibration) -> Iterator[str]:
    """What the model card says of the KV cache's scales."""
    found = {part: [name for name in partial.names() if name.endswith(part)] for part in PARTS}
    values = {part: [partial.plain(name).item() for name in names] for part, names in found.items()}  # type: ignore[union-attr]
    if all(values.values()):
        spans = (f"{part} from {min(v):.3g} to {max(v):.3g}" for part, v in values.items())
        yield f"Static scales of the KV cache, one a layer: {', '.join(spans)}."


def check_windows(windows: Sequence[Sequence[int]], vocab: int, positions: int, least: int = MIN_WINDOW) -> None:
    """Raise UsageError for windows of less than so many tokens, too long ones, or ids that the model lacks; 0: no
    limit."""
    if not windows:
        raise UsageError("No windows to calibrate on.", remedy="give texts, or windows of token ids")
    for ids in windows:
        if len(ids) < least:
            raise UsageError(f"A window of {len(ids)} tokens.", remedy=f"windows have at least {least}")
        if positions and len(ids) > positions:
            what = f"A window of {len(ids)} tokens for a model of {positions} positions."
            raise UsageError(what, remedy=f"lower --window-tokens to {positions} at most")
        if vocab and max(ids) >= vocab:
            raise UsageError(f"A window has token {max(ids)}.", there_is=f"ids 0 to {vocab - 1}")


def describe(copy: QuantizedCopy, settings: CalibrationSettings) -> dict[str, Any]:
    """Everything that a calibration's result depends on, so that another one is not continued by mistake."""
    files = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in copy.origin.files]
    cache = {} if copy.kv_dtype is None else {"kv_cache": copy.kv_dtype}
    formats = hashlib.sha256(json.dumps(sorted(copy.formats.items())).encode()).hexdigest()
    return {
        "schema": 1,
        "model": copy.origin.name,
        "files": files,
        "scheme": copy.scheme,
        "config": dict(copy.origin.changes),
        "formats": formats,
        "methods": list(settings.recipe.names),
        "windows": hash_windows(settings.windows),
        "seed": settings.seed,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **cache,
    }
