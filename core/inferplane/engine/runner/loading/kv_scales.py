"""Static scales of the KV cache: read from a model's files, given to its layers, and described."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from inferplane.binding import Plan
from inferplane.engine.runner.loading.device_model import DeviceModel, find_scales_in
from inferplane.engine.runner.loading.drafters import Drafter
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.errors import CheckpointError, UsageError, warn
from inferplane.kvcache import STATIC_SUFFIX
from inferplane.models.reading.kv_scales import (
    KVScales,
    find_layer,
    lacks_scales,
    read_kv_scales,
    values_of_export,
)
from inferplane.ops import CausalLM, Eagle3Layer, EagleLayer, HyperMTPLayer, MTPLayer
from inferplane.types import KVCache, KVRequest

Values = dict[str, tuple[float, ...]]
"""Layer -> scales of K and, if there is one, of V."""


class CachedLayer(NamedTuple):
    """A layer that stores entries.

    Args:
        name: in its files, such as "model.layers.0".
        files: that its weights are read from.
        request: what it stores.
        drafts: "mtp" or "eagle" of a layer that drafts for the model; "": it is the model's.
    """

    name: str
    files: ModelFiles
    request: KVRequest
    drafts: str = ""


def list_layers(model: DeviceModel, plan: Plan, tree: CausalLM, drafters: Iterable[Drafter]) -> list[CachedLayer]:
    """The layers whose entries a cache holds, in its order: the model's, then those that draft. Nothing is read.

    Args:
        model: has the model's files. plan: has the layouts.
        tree: has all layers.
        drafters: those with other files or formats.

    Raises:
        UsageError: by the names of tensors, a layer that drafts has no static scales, and its entries are integers.
    """
    owners = {id(layer): drafter.files for drafter in drafters for layer in drafter.layers.layers}
    found = []
    for layer in (*tree.layers, *tree.mtp):
        for request in layer.kv_requests():
            drafts = {MTPLayer: "mtp", HyperMTPLayer: "mtp", EagleLayer: "eagle", Eagle3Layer: "eagle"}.get(
                type(layer), ""
            )
            found.append(CachedLayer(find_layer(layer), owners.get(id(layer), model.files), request, drafts))
    if model.options.load_format != "dummy" and model.files.has_weights:
        _check_drafters(model, plan, found)
    return found


def read_values(model: DeviceModel, plan: Plan, layers: Sequence[CachedLayer]) -> list[tuple[float, ...]]:
    """The scales of each layer from its files; none where the plan's layouts have no use for them, and for layers that
    draft and have none.

    Raises:
        CheckpointError: one is no positive number, or has another shape; a layer of the model lacks some that others
            have.
    """
    if model.options.load_format == "dummy":
        return [() for _ in layers]
    read: dict[int, Values] = {}
    values: list[tuple[float, ...]] = []
    for layer in layers:
        layout, scales = plan.layouts[layer.request], _scales_of(model, layer)
        if not layout.has_static_scales or scales is None or not scales.serves(layout.kv_dtype):
            values.append(())
            continue
        if id(layer.files) not in read:
            read[id(layer.files)] = _read(layer.files, scales)
        # A latent is what is read as keys, also where it serves as values: its scale is that of K.
        given, count = read[id(layer.files)].get(layer.name, ()), len(layer.request.entry_shapes)
        if len(given) < count and not layer.drafts:
            raise lacks_scales([layer.name])
        values.append(given[:count] if len(given) >= count else ())
    return values


def warn_if_unused(model: DeviceModel, plan: Plan, layers: Sequence[CachedLayer]) -> None:
    """Warn where a model has scales that its cache does not use, or lacks those that the options name."""
    found = _describe(model, plan, layers)
    requested = model.options.kv_cache_dtype.endswith(STATIC_SUFFIX) and model.options.load_format != "dummy"
    if found is not None and not found["used"] and (model.kv_scales is not None or requested):
        warn(f"KV cache: {found['note']}.")


def _check_drafters(model: DeviceModel, plan: Plan, layers: Sequence[CachedLayer]) -> None:
    for layer in layers:
        layout = plan.layouts[layer.request]
        if not layer.drafts or not layout.has_static_scales or layout.kv_dtype == "fp8":
            continue
        if not _is_given(_scales_of(model, layer), layer, layout.kv_dtype):
            command = f"inferplane quantize MODEL --kv-cache {layout.kv_dtype} --data TEXTS --out FOLDER"
            anew = f", or calibrate the model in 16 bits with its prediction layers: `{command}`"
            raise UsageError(
                f"A layer that drafts ({layer.name} of {layer.files.name}) has no static scales, and KV layout "
                f"{layout.name} needs some.",
                remedy=f"leave kv_cache_dtype out, draft by method='ngram'{anew if layer.drafts == 'mtp' else ''}",
            )


def _is_given(scales: KVScales | None, layer: CachedLayer, kv_dtype: str) -> bool:
    """Whether files have the scales of a layer, by their names."""
    parts = "kv"[: len(layer.request.entry_shapes)]
    return scales is not None and scales.serves(kv_dtype) and set(parts) <= scales.tensors.get(layer.name, {}).keys()


def _scales_of(model: DeviceModel, layer: CachedLayer) -> KVScales | None:
    """The scales in a layer's files."""
    return model.kv_scales if layer.files is model.files else find_scales_in(layer.files)


def export_scales(model: DeviceModel) -> dict[str, Any] | None:
    """The scales that a model's files hold, as an export has them (`Manifest.kv_scales`); None: there are none. Broken
    ones, which a cache that uses them has refused before, are left out with a warning.
    """
    try:
        values = {} if model.kv_scales is None else _read(model.files, model.kv_scales)
    except CheckpointError as error:
        warn(f"The export has no scales of the KV cache: {error.what}")
        return None
    return {"dtype": model.kv_scales.dtype, "layers": values} if model.kv_scales is not None and values else None


def _read(files: ModelFiles, found: KVScales) -> Values:
    """All scales that files hold, by layer; none if they are of no use.

    Raises:
        CheckpointError: one is no positive number, or has another shape.
    """
    if not found.dtype or not found.tensors:
        return {}
    if files.exported is not None:
        return values_of_export(files.exported.kv_scales or {})
    heads = files.config.size("num_key_value_heads", files.config.size("num_attention_heads"))
    with contextlib.closing(files.source()) as source:
        return read_kv_scales(source, found, heads)


def give_scales(cache: KVCache, values: Sequence[tuple[float, ...]]) -> KVCache:
    """The cache with the static scales of each layer, in the same memory. Layers without any have those with which
    their caches are built.

    Args:
        cache: as it was allocated.
        values: what `read_values` gave.
    """
    if not any(values):
        return cache
    layers = zip(cache.layers, values, strict=True)
    return replace(cache, layers=tuple(kv.with_scales(scales) if scales else kv for kv, scales in layers))


def describe(model: DeviceModel, plan: Plan, layers: Sequence[CachedLayer]) -> dict[str, Any]:
    """The entry `kv_scales` of `explain`: `used`, whether the cache has static scales of the checkpoint, and `note`,
    which are used, or why not. No entry where the checkpoint has none and the layouts need none.
    """
    found = _describe(model, plan, layers)
    return {} if found is None else {"kv_scales": found}


def _describe(model: DeviceModel, plan: Plan, layers: Sequence[CachedLayer]) -> dict[str, Any] | None:
    found, static = model.kv_scales, [x for x in plan.layouts.values() if x.has_static_scales]
    kv_dtype = static[0].kv_dtype if static else ""
    stored = str(model.dtype).removeprefix("torch.")
    if found is not None and static and found.serves(kv_dtype):
        drafting = [layer for layer in layers if layer.drafts]
        lacking = [x for x in drafting if not _is_given(_scales_of(model, x), x, kv_dtype)]
        note = f"static scales of the checkpoint ({kv_dtype}), one a layer for K and for V"
        return {"used": True, "note": f"{note}{'; of 1 in layers that draft' if lacking else ''}"}
    if static and found is None:
        default = "scales of 1" if kv_dtype == "fp8" else "made-up scales, as its weights are"
        return {"used": False, "note": f"{default}: the checkpoint has none"}
    if found is None or not plan.layouts:
        return None
    what = f"static scales of the checkpoint ({found.stated or found.dtype}) are not used"
    if found.why_not or static:
        why = found.why_not or f"they are for {found.dtype}, and the cache is in {kv_dtype}"
        return {"used": False, "note": f"{what}: {why}{'; its scales are 1' if static else ''}"}
    if model.options.kv_cache_dtype == "auto":
        return {
            "used": False,
            "note": f"{what}: entries are in {stored}; kv_cache_dtype={found.dtype} stores them in 8 bits",
        }
    if found.dtype != model.options.kv_cache_dtype:
        return {"used": False, "note": f"{what}: the cache is in {model.options.kv_cache_dtype}"}
    return {
        "used": False,
        "note": f"{what}: the layout's own are computed for each token and head, which is more exact",
    }
