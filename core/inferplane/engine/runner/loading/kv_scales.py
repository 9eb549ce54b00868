"""Static scales of the KV cache: read from a model's files, given to its layers, and described."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from inferplane.binding import Plan
from inferplane.engine.runner.loading.device_model import DeviceModel
from inferplane.errors import CheckpointError, UsageError, warn
from inferplane.kvcache import STATIC_SUFFIX
from inferplane.models.reading.kv_scales import find_layer, lacks_scales, read_kv_scales, values_of_export
from inferplane.ops import CausalLM
from inferplane.types import KVCache, LayerKV

Values = dict[str, tuple[float, ...]]
"""Layer -> scales of K and, if there is one, of V."""


def read_values(model: DeviceModel, plan: Plan) -> Values:
    """The scales that a model's files hold, by layer; none if the plan's layouts have no use for them, with a warning.

    Raises:
        CheckpointError: one is no positive number, or has another shape.
    """
    found = _describe(model, plan)
    requested = model.options.kv_cache_dtype.endswith(STATIC_SUFFIX) and model.options.load_format != "dummy"
    if found is not None and not found["used"] and (model.kv_scales is not None or requested):
        warn(f"KV cache: {found['note']}.")
    return _read(model) if found is not None and found["used"] else {}


def export_scales(model: DeviceModel) -> dict[str, Any] | None:
    """The scales that a model's files hold, as an export has them (`Manifest.kv_scales`); None: there are none. Broken
    ones, which a cache that uses them has refused before, are left out with a warning.
    """
    try:
        values = _read(model)
    except CheckpointError as error:
        warn(f"The export has no scales of the KV cache: {error.what}")
        return None
    return {"dtype": model.kv_scales.dtype, "layers": values} if model.kv_scales is not None and values else None


def _read(model: DeviceModel) -> Values:
    """All scales that a model's files hold, by layer; none if they are of no use.

    Raises:
        CheckpointError: one is no positive number, or has another shape.
    """
    found = model.kv_scales
    if found is None or not found.dtype or not found.tensors:
        return {}
    if (exported := model.files.exported) is not None:
        return values_of_export(exported.kv_scales or {})
    config = model.files.config
    heads = config.size("num_key_value_heads", config.size("num_attention_heads"))
    with contextlib.closing(model.files.source()) as source:
        return read_kv_scales(source, found, heads)


def give_scales(cache: KVCache, model: CausalLM, plan: Plan, values: Values) -> KVCache:
    """The cache with the static scales of each layer, in the same memory. Layers that draft have those with which their
    caches are built, where the files hold none.

    Args:
        cache: as it was allocated.
        model: its layers.
        plan: has the layouts.
        values: what `read_values` gave.

    Raises:
        CheckpointError: a layer of the model lacks scales that others have.
        UsageError: a layer that drafts has none, and its entries are integers.
    """
    if not values:
        return cache
    own, found = {find_layer(layer) for layer in model.layers}, list[LayerKV]()
    with_entries = [layer for layer in (*model.layers, *model.mtp) if layer.kv_requests()]
    of_drafters = sum(bool(layer.kv_requests()) for layer in model.mtp)
    for number, (layer, kv) in enumerate(zip(with_entries, cache.layers, strict=True)):
        layout, name, count = plan.layouts[kv.request], find_layer(layer), len(kv.request.entry_shapes)
        drafts = number >= len(with_entries) - of_drafters
        scales = () if drafts and name in own else values.get(name, ())  # a head's files may count from 0 again
        if not layout.has_static_scales:
            found.append(kv)
        elif len(scales) >= count:
            # A latent is what is read as keys, also where it serves as values: its scale is that of K.
            found.append(kv.with_scales(scales[:count]))
        elif not drafts:
            raise lacks_scales([name])
        elif layout.kv_dtype != "fp8":
            raise UsageError(
                f"A layer that drafts ({name}) has no static scales for KV layout {layout.name}.",
                remedy="leave kv_cache_dtype out, or draft by method='ngram'",
            )
        else:
            found.append(kv)
    return replace(cache, layers=tuple(found))


def describe(model: DeviceModel, plan: Plan) -> dict[str, Any]:
    """The entry `kv_scales` of `explain`: `used`, whether the cache has static scales of the checkpoint, and `note`,
    which are used, or why not. No entry where the checkpoint has none and the layouts need none.
    """
    found = _describe(model, plan)
    return {} if found is None else {"kv_scales": found}


def _describe(model: DeviceModel, plan: Plan) -> dict[str, Any] | None:
    found, static = model.kv_scales, [x for x in plan.layouts.values() if x.has_static_scales]
    kv_dtype = static[0].kv_dtype if static else ""
    stored = str(model.dtype).removeprefix("torch.")
    if found is not None and static and found.serves(kv_dtype):
        return {"used": True, "note": f"static scales of the checkpoint ({kv_dtype}), one a layer for K and for V"}
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
