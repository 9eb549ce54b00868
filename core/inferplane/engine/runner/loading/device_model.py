"""A model's files and options beside a device: what has to be known before its weights' formats can be chosen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from inferplane.binding import PlanSettings
from inferplane.binding.old_names import current_kernel_names
from inferplane.engine.runner.exports.compare import settle_options
from inferplane.engine.runner.kv_cache import kv_layouts_for
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.options import RunnerOptions, resolve_dtype
from inferplane.errors import BindError, UsageError
from inferplane.models import Config
from inferplane.models.reading.kv_scales import KVScales, find_kv_scales, of_export
from inferplane.plugins import PluginHost
from inferplane.types import Backend, DeviceState, KVLayout, KVRequest, Placement


class DeviceModel:
    """A model that is to run on a device.

    Attributes: `files`, `host`, `backend`, `options`; `is_packed`, the weights are an export's; `dtype`, of
    activations; `config`, the files' with its head tied as the tensors have it; `state`, None if the device was not
    opened; `assumed`, the device is not here; `placement`, the part of the model; `kernels` of the device, and `pins`
    of ops; `max_model_len`, and `longest`, which it is without the cache's limit; `wrong_layouts`, those of the cache
    that are not used, with the reasons.
    """

    def __init__(self, files: ModelFiles, host: PluginHost, backend: Backend, options: RunnerOptions) -> None:
        if files.exported is not None:
            options = settle_options(options, files.exported, backend.name)
        self.is_packed = files.exported is not None and options.load_format != "dummy"
        self.files, self.host, self.backend, self.options = files, host, backend, options
        self.config: Config = files.config
        self.dtype = resolve_dtype(options.dtype, files)
        self.state: DeviceState | None = None
        self.placement = Placement()
        self.wrong_layouts: dict[tuple[KVRequest, str], str] = {}
        self.assumed = False
        limit = files.config.positions
        if options.max_model_len is not None:
            if options.max_model_len < 1 or (limit and options.max_model_len > limit):
                raise UsageError(
                    f"max_model_len = {options.max_model_len}.",
                    there_is=f"1 to {limit}, the model's own positions" if limit else "numbers from 1",
                    remedy="pass one of these, or leave it out",
                )
            limit = options.max_model_len
        self.max_model_len: int = limit or 4096
        self.longest = self.max_model_len
        self.kernels = host.kernels(backend)
        self.pins = current_kernel_names(options.ops, self.kernels)

    def names_in(self, files: ModelFiles) -> set[str] | None:
        """Names of the tensors in some files; None without a checkpoint, where weights are random, and for an export
        that needs none.
        """
        if self.options.load_format == "dummy" or not files.has_weights:
            return None
        return None if files.exported is not None and files.exported.names is None else set(files.names())

    @cached_property
    def kv_scales(self) -> KVScales | None:
        """Calibrated scales of the KV cache that the files state or have; None: neither."""
        return None if self.options.load_format == "dummy" else find_scales_in(self.files)

    def _has_kv_scales(self, kv_dtype: str) -> bool:
        """Whether there are static scales for a KV dtype. Random weights have random ones."""
        if self.options.load_format == "dummy" or not self.files.has_weights:
            return True
        return self.kv_scales is not None and self.kv_scales.serves(kv_dtype)

    @property
    def settings(self) -> PlanSettings:
        """What binding needs to know of the device: that of `options.arch` if given, else of the opened device, else
        the backend's first architecture.
        """
        arch = self.options.arch or next(iter(self.backend.architectures), "")
        features = self.backend.features(self.options.arch)
        if self.state is not None and self.options.arch is None:
            arch, features = self.state.arch, self.state.features
        deterministic, fraction = self.options.deterministic, self.options.max_repacked_fraction
        return PlanSettings(self.backend.name, self.dtype, arch, features, deterministic, fraction, self.assumed)

    def kv_layouts(self, request: KVRequest) -> Sequence[KVLayout]:
        """Layouts that the cache of one kind of layer may have, in the KV dtype of the options (`kv_layouts_for`), but
        for those that were found wrong.

        Raises:
            BindError: all of them were.
        """
        fitting = kv_layouts_for(self.backend, request, self.dtype, self.options, self.files.name, self._has_kv_scales)
        if right := [x for x in fitting if (request, x.name) not in self.wrong_layouts]:
            return right
        reasons = [f"{x.name}: {self.wrong_layouts[request, x.name]}" for x in fitting]
        raise BindError(
            f"Device {self.backend.name!r} has no KV layout for {request.kind!r} that works: {'; '.join(reasons)}.",
            remedy=f"set another kv_cache_dtype; its author finds more with `inferplane conform --device "
            f"{self.backend.name}`",
        )


def find_scales_in(files: ModelFiles) -> KVScales | None:
    """Calibrated scales of the KV cache that files state or have; None: neither."""
    if not files.has_weights:
        return None
    if files.exported is not None:
        return None if files.exported.kv_scales is None else of_export(files.exported.kv_scales)
    return find_kv_scales(files.config.get("quantization_config"), set(files.names()))
