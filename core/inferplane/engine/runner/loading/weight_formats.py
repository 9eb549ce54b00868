"""The weight formats of a model's files on a device: as stored, or as a scheme quantizes them while they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from inferplane import quant
from inferplane.engine.runner.loading.device_model import DeviceModel
from inferplane.models import Config
from inferplane.plugins import PluginHost
from inferplane.quant import QuantFormats, latent_formats, latent_request, quantize_on_load, read_quant_config
from inferplane.types import PLAIN, Placement, WeightFormat


def find_formats(
    planned: DeviceModel, config: Config, scheme: str | None, names: Collection[str] | None
) -> QuantFormats:
    """The weight formats of files.

    Args:
        planned: the model's device and options.
        config: of the files.
        scheme: by which they are quantized while they are read; None: not at all.
        names: of the tensors in them; None without a checkpoint.

    Raises:
        As `quantize_on_load` and `read_quant_config`.
    """
    host = planned.host
    if scheme is None:
        formats = {name: partial(_open_format, host, name) for name in host.quantization()}
        return read_quant_config(config.get("quantization_config"), names, formats, host.vacant_formats())
    request = latent_request(config)
    layouts = [x.name for x in planned.kv_layouts(request)] if request is not None else []
    return quantize_on_load(scheme, config, latent_formats(planned.kernels, planned.settings, layouts, planned.pins))


def formats_read_by_row(planned: DeviceModel) -> frozenset[str]:
    """See `quant.formats_read_by_row`; none where ranks share the model."""
    if planned.placement != Placement():
        return frozenset()
    return quant.formats_read_by_row(planned.kernels, planned.settings)


def _open_format(host: PluginHost, method: str, settings: Mapping[str, Any]) -> WeightFormat:
    """The weight format that a plugin registered for a quantization method."""
    return quant.open_format(host.quantization()[method], settings, partial(host.fail_format, method))


def count_expanded(config: Config, format_of: Callable[[str], str]) -> dict[str, int]:
    """The packed types of a GGUF file whose matrices are expanded while they are read, with the number of matrices
    (those of a layer's experts count as one); empty for other checkpoints."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or settings.get("quant_method") != "gguf":
        return {}
    types = settings["types"].items()
    return dict(Counter(kind for name, kind in types if format_of(name.replace("*", "0")) == PLAIN))
