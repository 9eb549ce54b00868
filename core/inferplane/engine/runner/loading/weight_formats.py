"""The weight formats of a model's files on a device: as stored, or as a scheme quantizes them while they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from inferplane import quant
from inferplane.engine.runner.loading.device_model import DeviceModel
from inferplane.models import Config
from inferplane.ops import Op
from inferplane.plugins import PluginHost
from inferplane.quant import (
    Chosen,
    QuantFormats,
    latent_formats,
    latent_request,
    quantize_on_load,
    read_quant_config,
    requantize_on_load,
    takes_as_stored,
)
from inferplane.types import PLAIN, Placement, WeightFormat

Made = TypeVar("Made")


def find_formats(
    planned: DeviceModel,
    config: Config,
    scheme: str | None,
    names: Collection[str] | None,
    chosen: Mapping[str, str] = MappingProxyType({}),
) -> QuantFormats:
    """The weight formats of files.

    Args:
        planned: the model's device and options.
        config: of the files.
        scheme: by which they are quantized while they are read; None: not at all.
        names: of the tensors in them; None without a checkpoint.
        chosen: formats by name that the scheme is to take in place of its first ones.

    Raises:
        As `quantize_on_load` and `read_quant_config`.
    """
    stored = find_stored_formats(planned, config, names)
    if scheme is None or takes_as_stored(scheme, config):
        return stored
    request = latent_request(config)
    layouts = [x.name for x in planned.kv_layouts(request)] if request is not None else []
    latent = latent_formats(planned.kernels, planned.settings, layouts, planned.pins)
    requested = quantize_on_load(scheme, config, latent, chosen, planned.options.head_format)
    return requantize_on_load(requested, stored)


def find_stored_formats(planned: DeviceModel, config: Config, names: Collection[str] | None) -> QuantFormats:
    """The weight formats of files as they are; arguments as of `find_formats`."""
    host = planned.host
    formats = {name: partial(_open_format, host, name) for name in host.quantization()}
    return read_quant_config(config.get("quantization_config"), names, formats, host.vacant_formats())


def _plain(name: str) -> str:
    return PLAIN


class FormatsRead(NamedTuple):
    """The formats that weights get while they are read.

    Args:
        formats: of all weights.
        chosen: those by a scheme, with the reasons.
        schemes_instead: other schemes whose formats the device's kernels read, if they do not read all of these.
        stored_format_of: a tensor's name -> its format in the files.
    """

    formats: QuantFormats
    chosen: Chosen = Chosen()
    schemes_instead: Sequence[str] = ()
    stored_format_of: Callable[[str], str] = _plain


def build_as_read(
    planned: DeviceModel,
    config: Config,
    scheme: str | None,
    names: Collection[str] | None,
    make: Callable[[QuantFormats], Made],
    ops_of: Callable[[Made], Iterable[Op]],
) -> tuple[Made, FormatsRead]:
    """Build ops with the formats of their files, or with the best ones of a scheme that the device's kernels read.

    Args:
        planned: the model's device and options.
        config: of the files.
        scheme: by which they are quantized while they are read; None: not at all.
        names: of the tensors in them; None without a checkpoint.
        make: builds the ops.
        ops_of: the ops in what it returns.

    Raises:
        As `find_formats`, and what `make` raises.
    """
    found = find_formats(planned, config, scheme, names)
    made = make(found)
    if scheme is None or takes_as_stored(scheme, config):
        return made, FormatsRead(found, stored_format_of=found.format_of)
    reads = quant.make_reads(planned.kernels, planned.settings, planned.pins)
    ops = list(ops_of(made))
    chosen = quant.choose_formats(ops, quant.find_scheme(scheme, planned.options.head_format), reads)
    instead = () if chosen.all_read else quant.schemes_instead(ops, scheme, reads)
    if any(found.format_of(name) != format for name, format in chosen.by_name.items()):
        found = find_formats(planned, config, scheme, names, chosen.by_name)
        made = make(found)
    return made, FormatsRead(found, chosen, instead, find_stored_formats(planned, config, names).format_of)


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
