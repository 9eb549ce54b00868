"""A model that runs layer by layer computes what transformers computes, and folds of scales change none of it: on the
first config of every family."""

from __future__ import annotations

import pytest
import torch

from inferplane.calibrate import folds
from inferplane.calibrate.folds import find_folds
from inferplane.calibrate.layers import LayeredModel, bind, make_step, run_layer
from inferplane.calibrate.observe import NormReaders, ProductObserver
from inferplane.engine import ModelFiles
from inferplane.models.build import Build
from inferplane.models.registry import build
from inferplane.quant import READERS
from tests.e2e.tiny_models import logits_of
from tests.families.cases import ALL_CASES, make

LEAST_FOLDS = 6
"""Folds that are found in each of these small models at least."""

READ_OTHERWISE = {
    "llama4": "experts read factors of their inputs",
    "longcat_flash": "some experts return what they read",
}
"""Families with a norm behind which no fold is possible, and why: the calibrator tries each fold, and drops it."""


def layered(folder) -> LayeredModel:
    files = ModelFiles(folder)
    return LayeredModel(build(Build(files.config_of_tensors(), positions=128)), files.source(), READERS)


def logits_by_layers(model: LayeredModel, ids: list[int], change=None) -> torch.Tensor:
    (hidden,) = model.embed([ids])
    for layer in model.model.layers:
        values = model.load(layer)
        if change is not None:
            change(layer, values, hidden, ids)
        hidden = run_layer(layer, bind(layer, values), hidden, ids)
    norm, head = model.model.norm, model.model.head
    x, _ = bind(norm, model.load(norm))(hidden.x, hidden.residual)
    return bind(head, model.load(head))(x, make_step(ids))


@pytest.mark.parametrize("family", ALL_CASES)
def test_layers_compute_what_transformers_does(family, tmp_path):
    """And rescaling channels by powers and by odd numbers, wherever folds are found, changes nothing."""
    reference = make(family, next(iter(ALL_CASES[family])), tmp_path)
    model = layered(tmp_path)
    ids = torch.randint(0, model.model.vocab, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    want = logits_of(reference, ids)
    close = 2e-5 * want.abs().max()
    assert (logits_by_layers(model, ids) - want).abs().max() <= close
    draw, found = torch.Generator().manual_seed(4), []

    def fold_all(layer, values, hidden, ids) -> None:
        readers = NormReaders()
        weights = [w for _, w in layer.weights() if len(w.shape) > 1 and w.parts]
        with ProductObserver(values, weights, readers.see):
            run_layer(layer, bind(layer, values, readers.around), hidden, ids)
        for fold in find_folds(layer, readers.found):
            before = run_layer(layer, bind(layer, values), hidden, ids).total()
            held = {i: value.clone() for i, value in values.items()}
            folds.apply(fold, values, torch.rand(fold.channels, generator=draw) * 3 + 0.2)
            after = run_layer(layer, bind(layer, values), hidden, ids).total()
            if (after - before).abs().max() <= 1e-5 * before.abs().max():
                found.append(fold)
            else:
                assert family in READ_OTHERWISE
                for i, value in held.items():
                    values[i].copy_(value)

    assert (logits_by_layers(model, ids, fold_all) - want).abs().max() <= close
    assert len(found) >= LEAST_FOLDS
