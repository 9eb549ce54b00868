"""Calibrates a model layer by layer: each layer reads what the quantized layers before it return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from inferplane.calibrate import folds, shifts
from inferplane.calibrate.drafting import PredictionLayer, list_inputs
from inferplane.calibrate.folds import Fold, find_folds
from inferplane.calibrate.kv_scales import KVCalibration
from inferplane.calibrate.layers import Hidden, LayeredModel, LayerOp, bind, run_layer
from inferplane.calibrate.methods.gptq import Hessian
from inferplane.calibrate.methods.rounding import fake_quantize
from inferplane.calibrate.observe import SAMPLE_ROWS, Inputs, NormReaders, ProductKey, ProductObserver
from inferplane.calibrate.recipe import Channels, Method, Recipe, WeightToRound
from inferplane.calibrate.shifts import ChannelShift, NormRanges, find_shifts
from inferplane.models.reading.kv_scales import find_layer
from inferplane.models.writing.kv_scales import names_of
from inferplane.ops import MTPLayer, Op
from inferplane.ops.formats import FORMATS
from inferplane.ops.oracle import Stored
from inferplane.types import PLAIN, ActivationQuant, QTensor, Weight

EXACT = 1e-5
"""Largest change of a layer's float32 results that a fold may make, of their largest entry: else it is undone."""
RARE_ROWS = 128
"""An expert that fewer tokens reached is calibrated on the inputs of all experts too, up to so many rows' weight."""


@dataclass(frozen=True)
class LayerResult:
    """A calibrated layer.

    Args:
        quantized: weights by checkpoint names.
        plain: other tensors that changed, by checkpoint names.
        error: of what the layer returns, by the squares of differences and values: what quantizing it added.
        folded: number of places where channels were rescaled, and of those that were left because results changed.
        shifted: the same of places where channels were shifted.
    """

    quantized: Mapping[str, QTensor]
    plain: Mapping[str, torch.Tensor]
    error: float
    folded: tuple[int, int]
    shifted: tuple[int, int] = (0, 0)


@dataclass
class Calibrator:
    """Calibrates the layers of a model in order.

    Args:
        model: the model.
        windows: token ids, of at least 16 tokens each.
        format_of: a checkpoint tensor's name -> its new format, or "plain".
        quants: format -> quantization of the activations.
        recipe: the methods.
        seed: of anything random.
        kv_dtype: KV dtype that gets static scales; None: the cache stays in the model's dtype.
    """

    model: LayeredModel
    windows: Sequence[Sequence[int]]
    format_of: Callable[[str], str]
    quants: Mapping[str, ActivationQuant]
    recipe: Recipe
    seed: int = 0
    kv_dtype: str | None = None
    hidden: list[Hidden] = field(default_factory=list)

    def begin(self) -> None:
        """Set `hidden`, what the first layer reads of each window."""
        self.hidden = self.model.embed(self.windows)

    def calibrate_layer(self, layer: Op) -> LayerResult:
        """Calibrate the next layer, and set `hidden` to what it returns quantized."""
        return _LayerCalibration(self, layer).run()

    def calibrate_prediction(self, layers: Sequence[MTPLayer], number: int) -> LayerResult:
        """As `calibrate_layer`, for the prediction layer of this number among all, from 0. The first one reads what the
        model's final norm returns, each other one what the norm of that before it does."""
        norm = layers[number - 1].norm if number else self.model.model.norm
        drafting = replace(self, windows=list_inputs(self.windows, number))
        states = zip(self.model.embed(drafting.windows), self.model.norm(norm, self.hidden), strict=True)
        drafting.hidden = [Hidden(embedded.x, state[: len(embedded.x)]) for embedded, state in states]
        result = _LayerCalibration(drafting, PredictionLayer(layers[number])).run()
        self.hidden = drafting.hidden
        return result

    @property
    def every(self) -> int:
        """One row of so many is held for searches."""
        return max(1, sum(map(len, self.windows)) // SAMPLE_ROWS)

    def make_inputs(self, columns: int) -> Inputs:
        """Where the inputs of a product are counted."""
        return Inputs(columns, Hessian(columns) if self.recipe.needs_hessian else None, self.every)


class _LayerCalibration:
    """One layer while it is calibrated."""

    def __init__(self, calibrator: Calibrator, layer: LayerOp) -> None:
        self.calibrator, self.layer = calibrator, layer
        self.values = calibrator.model.load(layer)
        self.weights = {id(w): w for _, w in layer.weights() if w.parts}
        self.formats = {i: self._format_of(w) for i, w in self.weights.items()}
        self.before = {i: self.values[i].clone() for i, format in self.formats.items() if format == PLAIN}
        self.inputs: dict[ProductKey, Inputs] = {}
        self.cache: KVCalibration | None = None

    def _format_of(self, weight: Weight) -> str:
        found = {self.calibrator.format_of(part) for part in weight.parts}
        return found.pop() if len(found) == 1 and len(weight.shape) > 1 else PLAIN

    def run(self) -> LayerResult:
        """Observe, shift, fold, round, and run again."""
        recipe, folded, shifted = self.calibrator.recipe, (0, 0), (0, 0)
        if recipe.shift is not None:
            shifted, results = self._shift(recipe.shift)
            (result, *_) = self._observe()
        else:
            result, *_ = results = self._observe()
        if recipe.scale is not None:
            folded = self._fold(find_folds(self.layer, self._find_readers()), result)
        quantized = self._round()
        plain = {**self._list_changed(), **self._scale_cache()}
        return LayerResult(quantized, plain, self._advance(results), folded, shifted)

    def _find_readers(self) -> Mapping[Op, Sequence[ProductKey]]:
        """Which products read the result of which norm."""
        readers = NormReaders()
        self._step(0, ProductObserver(self.values, self.weights.values(), readers.see), readers.around)
        return readers.found

    def _step(
        self, number: int, products: ProductObserver, around: Any = None, through: Stored | None = None
    ) -> Hidden:
        """Run the layer over one window."""
        calibrator = self.calibrator
        with products:
            bound = bind(self.layer, self.values, around)
            return run_layer(self.layer, bound, calibrator.hidden[number], calibrator.windows[number], through)

    def _scale_cache(self) -> dict[str, torch.Tensor]:
        """Choose the scales of the cache by what the quantized layer stores, keys as they are after their rotation;
        returns them by checkpoint names.
        """
        kv_dtype, request = self.calibrator.kv_dtype, next(iter(self.layer.kv_requests()), None)
        if kv_dtype is None or request is None:
            return {}
        self.cache = KVCalibration(request, kv_dtype, self.calibrator.every)
        for number in range(len(self.calibrator.windows)):
            self._step(number, self._quantized_products(), through=self.cache.see)
        scales = self.cache.choose()
        return {name: torch.tensor([scale]) for name, scale in zip(names_of(find_layer(self.layer)), scales)}

    def _observe(self) -> list[torch.Tensor]:
        """Count the inputs of all products; returns the hidden states behind the layer, as it is."""

        def count(key: ProductKey, x: torch.Tensor) -> torch.Tensor:
            if key not in self.inputs:
                self.inputs[key] = self.calibrator.make_inputs(x.shape[-1])
            self.inputs[key].add(x)
            return x

        quantized = [w for i, w in self.weights.items() if self.formats[i] != PLAIN]
        products = ProductObserver(self.values, quantized, count)
        return [self._step(i, products).total() for i in range(len(self.calibrator.windows))]

    # -- shifts and scales of channels

    def _shift(self, method: Method) -> tuple[tuple[int, int], list[torch.Tensor]]:
        """Choose and apply shifts; one that changes the layer's result is undone. Biases are as they will be stored.
        Returns how many were applied and undone, and the hidden states behind the layer as it was."""
        done, undone = list[ChannelShift](), 0
        found = [
            shift
            for shift in find_shifts(self.layer, self._find_readers())
            if any(self.formats[key.weight] != PLAIN for key, _ in shift.read_by)
        ]
        ranges = NormRanges([shift.norm for shift in found])
        count, unseen = len(self.calibrator.windows), ProductObserver(self.values, (), lambda key, x: x)
        results = [self._step(i, unseen, ranges.around).total() for i in range(count)]
        for shift in found:
            seen = (torch.stack(each[shift.norm]) for each in (ranges.least, ranges.largest))
            held = {id(w): self.values[id(w)].clone() for w in shift.weights()}
            shifts.apply(shift, self.values, method.run(*seen))  # type: ignore[arg-type]
            if _is_close(self._step(0, unseen).total(), results[0]):
                done.append(shift)
                continue
            for i, value in held.items():
                self.values[i].copy_(value)
            undone += 1
        for weight in (weight for shift in done for weight in shift.weights()):
            dtype = self.calibrator.model.source.dtype(weight.parts[0]) or torch.float32
            self.values[id(weight)].copy_(self.values[id(weight)].to(dtype))
        return (len(done), undone), results

    def _fold(self, found: Iterable[Fold], result: torch.Tensor) -> tuple[int, int]:
        """Choose and fold scales; a fold that changes the layer's result is undone."""
        done, undone = 0, 0
        for fold in found:
            keys = [key for key in fold.read_by if self.formats.get(key.weight, PLAIN) != PLAIN and key in self.inputs]
            if not keys:
                continue
            scale = self._choose_scale(fold, keys)
            touched = {key.weight for key in fold.read_by} | {id(rows.weight) for rows in fold.made_by}
            norm = fold.norm
            touched |= {id(w) for _, w in norm.weights()} if norm is not None else set()
            held = {i: self.values[i].clone() for i in touched}
            applied = folds.apply(fold, self.values, scale)
            again = self._step(0, ProductObserver(self.values, (), lambda key, x: x)).total()
            if not _is_close(again, result):
                for i, value in held.items():
                    self.values[i].copy_(value)
                undone += 1
                continue
            for key in fold.read_by:
                if key in self.inputs:
                    self.inputs[key].divide(fold.spread(applied))
            done += 1
        return done, undone

    def _choose_scale(self, fold: Fold, keys: Sequence[ProductKey]) -> torch.Tensor:
        scale_of = self.calibrator.recipe.scale
        assert scale_of is not None
        format = self.formats[keys[0].weight]
        weight = torch.cat([self._matrix(key) for key in keys])
        inputs = max((self.inputs[key] for key in keys), key=lambda found: found.rows)
        channels = Channels(weight, inputs, format, self.calibrator.quants.get(format), self.calibrator.seed, fold)
        return scale_of.run(channels)  # type: ignore[arg-type, call-arg, return-value]

    def _matrix(self, key: ProductKey) -> torch.Tensor:
        value = self.values[key.weight]
        return value if key.expert < 0 else value[key.expert]

    # -- rounding

    def _round(self) -> dict[str, QTensor]:
        """Round all weights that have a format, and put what they stand for into `values`."""
        found: dict[str, QTensor] = {}
        for i, weight in self.weights.items():
            if self.formats[i] == PLAIN:
                continue
            value = self.values[i]
            if value.ndim == 3:
                each = len(weight.parts) // len(value)
                for e in range(len(value)):
                    found.update(self._round_parts(ProductKey(i, e), weight.parts[e * each : (e + 1) * each], ()))
            else:
                found.update(self._round_parts(ProductKey(i), weight.parts, weight.rows))
        return found

    def _round_parts(self, key: ProductKey, parts: Sequence[str], rows: Sequence[int]) -> dict[str, QTensor]:
        """Round what several checkpoint tensors hold, together unless a block would hold rows of two of them."""
        matrix, height = self._matrix(key), FORMATS[self.formats[key.weight]][2][0]
        counts = list(rows) or [len(matrix) // len(parts)] * len(parts)
        if any(count % height for count in counts[:-1]):
            found = {name: self._round_product(key, part) for name, part in zip(parts, matrix.split(counts))}
            matrix.copy_(torch.cat([q.dequantize() for q in found.values()]))
            return found
        q = self._round_product(key, matrix)
        matrix.copy_(q.dequantize())
        return _divide(q, parts, counts)

    def _round_product(self, key: ProductKey, matrix: torch.Tensor) -> QTensor:
        """Round a product's weight `[N, K]`, or rows of it."""
        format = self.formats[key.weight]
        inputs = self.inputs.get(key) or self.calibrator.make_inputs(matrix.shape[1])
        if key.expert >= 0 and inputs.rows < RARE_ROWS:
            inputs = self._with_inputs_of_all(key, inputs)
        quant = self.calibrator.quants.get(format)
        return self.calibrator.recipe.round.run(WeightToRound(matrix, inputs, format, quant))  # type: ignore[arg-type, call-arg, return-value]

    def _with_inputs_of_all(self, key: ProductKey, own: Inputs) -> Inputs:
        """An expert's own inputs, and those of all experts with the weight of the rows that it lacks."""
        every = [found for other, found in self.inputs.items() if other.weight == key.weight]
        made = self.calibrator.make_inputs(own.columns)
        rows = sum(found.rows for found in every)
        if not rows:
            return own
        for found in every:
            made.include(found, (RARE_ROWS - own.rows) / rows)
        made.include(own, 1.0)
        return made

    def _list_changed(self) -> dict[str, torch.Tensor]:
        """Tensors without a format that a fold changed, by checkpoint names."""
        found: dict[str, torch.Tensor] = {}
        for i, weight in self.weights.items():
            value = self.values[i]
            if i in self.before and not torch.equal(value, self.before[i]):
                found.update(zip(weight.parts, _split_rows(value, weight)))
        return found

    # -- what comes after

    def _quantized_products(self) -> ProductObserver:
        """Quantizes the activations that the formats quantize."""
        quants = {i: quant for i, f in self.formats.items() if (quant := self.calibrator.quants.get(f)) is not None}

        def quantize(key: ProductKey, x: torch.Tensor) -> torch.Tensor:
            return fake_quantize(x, quants[key.weight])

        return ProductObserver(self.values, [self.weights[i] for i in quants], quantize)

    def _advance(self, results: Sequence[torch.Tensor]) -> float:
        """Run the quantized layer, with quantized activations and entries of the cache, over all windows; returns the
        error."""
        products = self._quantized_products()
        through = None if self.cache is None else self.cache.round
        wrong, size = 0.0, 0.0
        after = []
        for number, result in enumerate(results):
            hidden = self._step(number, products, through=through)
            wrong += (hidden.total() - result).square().sum().item()
            size += result.square().sum().item()
            after.append(hidden)
        self.calibrator.hidden = after
        return wrong / max(size, 1e-30)


def _is_close(again: torch.Tensor, result: torch.Tensor) -> bool:
    return bool((again - result).abs().max() <= EXACT * result.abs().max())


def _split_rows(value: torch.Tensor, weight: Weight) -> Sequence[torch.Tensor]:
    """What the parts of a weight hold."""
    if value.ndim == 3:
        return value.flatten(0, 1).chunk(len(weight.parts))
    return value.split(list(weight.rows)) if weight.rows else value.chunk(len(weight.parts))


def _divide(q: QTensor, parts: Sequence[str], rows: Sequence[int]) -> dict[str, QTensor]:
    """The rows of each part of a quantized weight, by name."""
    found, first = {}, 0
    for part, count in zip(parts, rows, strict=True):
        found[part] = q.shard(0, first, first + count) if count < q.shape[0] else q
        first += count
    return found
