"""A model bound to a device's kernels, before its weights are read: what `explain`, `estimate` and `tune` need."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from inferplane.binding import Options, Plan, PlanSettings, Verdict, bind, explain, explain_text, read_lock, run_canary
from inferplane.binding.layout_canary import check_layout
from inferplane.binding.old_names import current_kernel_names
from inferplane.engine.runner.buckets import Size, bucket_sizes
from inferplane.engine.runner.capture import DecodeSteps, why_not_captured, why_not_captured_together
from inferplane.engine.runner.kv_cache import (
    LayerRequests,
    block_tokens_of,
    check_options,
    count_slot_bytes,
    kv_layouts_for,
    list_requests,
)
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.options import RunnerOptions, resolve_dtype
from inferplane.engine.runner.ranks import Ranks
from inferplane.errors import BindError, UsageError, warn
from inferplane.kvcache import SLOTS_PER_SEQUENCE, TablePlan, deal_layers, single_table
from inferplane.models import Build, Config, build
from inferplane.models.families.eagle import with_eagle
from inferplane.ops import CausalLM
from inferplane.plugins import Event, PluginHost
from inferplane.quant import (
    READERS,
    formats_read_by_row,
    latent_formats,
    latent_request,
    open_format,
    quantize_on_load,
    read_quant_config,
)
from inferplane.types import PLAIN, Backend, DeviceState, Kernel, KVLayout, KVRequest, Placement, WeightFormat


class CapturedSpeculation(Protocol):
    """Runs steps together with a draft layer, by replaying a capture; `disabled_reason`, in words, if it does not, and
    `wrong`, the reasons why some captures are not used."""

    disabled_reason: str
    wrong: dict[Any, str]


def count_expanded(config: Config, format_of: Callable[[str], str]) -> dict[str, int]:
    """The packed types of a GGUF file whose matrices are expanded while they are read, with the number of matrices
    (those of a layer's experts count as one); empty for other checkpoints."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or settings.get("quant_method") != "gguf":
        return {}
    types = settings["types"].items()
    return dict(Counter(kind for name, kind in types if format_of(name.replace("*", "0")) == PLAIN))


class PlannedModel:
    """A model bound to the kernels of one device.

    Attributes: `backend`; `state`, None if the device was not opened; `plan`; `max_model_len`; `verdicts` of the
    canary; `placement`, the part of the model; `ranks`, the processes that share the model, None for one; `decode`,
    which runs decode steps, and `captured_speculation`, which runs them together with a draft layer: both None before
    the model is loaded.
    """

    def __init__(self, files: ModelFiles, host: PluginHost, backend: Backend, options: RunnerOptions) -> None:
        self.files, self.host, self.backend, self.options = files, host, backend, options
        self.dtype = resolve_dtype(options.dtype, files)
        self.state: DeviceState | None = None
        self.ranks: Ranks | None = None
        self.placement = Placement()
        self.decode: DecodeSteps | None = None
        self.captured_speculation: CapturedSpeculation | None = None
        self.verdicts: list[Verdict] = []
        self.spent_s: dict[str, float] = {}
        self.demoted: dict[Kernel, str] = {}
        self.wrong_layouts: dict[tuple[KVRequest, str], str] = {}
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
        self.kernels = host.kernels(backend)
        self.pins = current_kernel_names(options.ops, self.kernels)

    @contextlib.contextmanager
    def measure_phase(self, phase: str) -> Iterator[None]:
        """Measure the seconds that the block takes, and store them in `spent_s` under the name of the phase."""
        begun = time.perf_counter()
        yield
        self.spent_s[phase] = time.perf_counter() - begun

    # -- binding

    def bind_and_check(self) -> None:
        """Bind, then try the chosen KV layouts and kernels on the opened device (the canary) and replace those that are
        wrong. No weights are read. Warns about hot ops without a fast kernel; emits the event "plan.bound".
        """
        with self.measure_phase("bind"):
            self.bind(assumed=False)
        with self.measure_phase("canary"):
            self._check_layouts()
            self._run_canary()
        if left := self.plan.hot_references():
            ops = sorted({op for _, _, op in left})
            warn(
                f"On device {self.backend.name!r} hot ops run on their slow reference: {', '.join(ops)}. "
                f"See `inferplane explain {self.files.name} --device {self.backend.name}` for the reasons; strict=True "
                "refuses such a plan."
            )
        self.host.emit(Event("plan.bound", {"device": self.backend.name, "model": self.files.name}))

    def bind(self, *, assumed: bool) -> None:
        """Build the model's tree of ops, and choose a kernel for each: sets `model`, `plan`, `ignored` (tensors not to
        read) and the weight readers. Reads the names of tensors, not their data.

        Args:
            assumed: the device is not here (`explain` for another machine): its kernels are assumed to be available.
        """
        names = None if self.options.load_format == "dummy" or not self.files.has_weights else set(self.files.names())
        scheme, config = (
            self.options.quantization,
            self.files.config if names is None else self.files.config_of_tensors(),
        )
        settings = self._settings(assumed)
        if scheme is None:
            formats = {name: partial(self._open_format, name) for name in self.host.quantization()}
            found = read_quant_config(config.get("quantization_config"), names, formats, self.host.vacant_formats())
        else:
            request = latent_request(config)
            layouts = [x.name for x in self.kv_layouts(request)] if request is not None else []
            found = quantize_on_load(scheme, config, latent_formats(self.kernels, settings, layouts, self.pins))
        self.readers, self.view = {**READERS, **found.readers}, found.view
        self.expanded = count_expanded(config, found.format_of)
        rows = formats_read_by_row(self.kernels, settings) if self.placement == Placement() else frozenset()
        unread, length = list(found.unread), self.max_model_len
        plans = Build(
            config, self.placement, found.format_of, length, self.options.mtp, unread, found.activation_quants, rows
        )
        self.model: CausalLM = build(plans, self.host.models())
        self.ignored = plans.ignored
        if (head := self.options.eagle) is not None:
            names = set(head.names()) if head.has_weights else None
            self.model, more = with_eagle(self.model, head.config, names, self.max_model_len)
            self.ignored = [*self.ignored, *more]
        check_options(self.model, self.options, self.files.name)
        if self.options.mtp and not self.model.mtp:
            raise UsageError(
                f"mtp (of mtp=True or method='mtp'): {self.files.name} has no multi-token-prediction layers.",
                remedy="leave it out, or load a checkpoint whose config has num_nextn_predict_layers",
            )
        self._choose_kernels(assumed=assumed)

    def _open_format(self, method: str, settings: Mapping[str, Any]) -> WeightFormat:
        """The weight format that a plugin registered for a quantization method."""
        return open_format(self.host.quantization()[method], settings, partial(self.host.fail_format, method))

    def _settings(self, assumed: bool) -> PlanSettings:
        """What binding needs to know of the device: that of `options.arch` if given, else of the opened device, else
        the backend's first architecture.
        """
        arch = self.options.arch or next(iter(self.backend.architectures), "")
        features = self.backend.features(self.options.arch)
        if self.state is not None and self.options.arch is None:
            arch, features = self.state.arch, self.state.features
        deterministic, fraction = self.options.deterministic, self.options.max_repacked_fraction
        return PlanSettings(self.backend.name, self.dtype, arch, features, deterministic, fraction, assumed)

    def _choose_kernels(self, *, assumed: bool) -> None:
        """Bind the tree of ops anew, by the options' pins, the lock file's choices and the kernels demoted so far."""
        locked = read_lock(self.options.lock, self.fingerprint()) if self.options.lock else {}
        choices = current_kernel_names(locked, self.kernels)
        self.plan: Plan = bind(
            self.model,
            self.kernels,
            self._settings(assumed),
            self.kv_layouts,
            options=Options(self.pins, choices, self.demoted),
            strict=self.options.strict,
        )

    def fingerprint(self) -> dict[str, str]:
        """The device, architecture and torch version that a lock file has to match."""
        return {
            "device": self.backend.name,
            "arch": self.state.arch if self.state else "",
            "name": self.state.name if self.state else "",
            "torch": torch.__version__,
        }

    def _check_layouts(self) -> None:
        """Check the chosen KV layouts before any kernel is judged on them. Wrong ones are left out, with a warning and
        an event, and others are chosen, until all chosen ones are right.

        Raises:
            BindError: no layout of a layer's cache is right.
        """
        checked: set[tuple[KVRequest, str]] = set()
        while new := {(r, x.name): x for r, x in self.plan.layouts.items() if (r, x.name) not in checked}:
            checked |= new.keys()
            device = self.backend.torch_device_indexed
            found = {key: check_layout(layout, key[0], self.dtype, device) for key, layout in new.items()}
            wrong = {key: reason for key, reason in found.items() if reason}
            for (request, name), reason in wrong.items():
                warn(f"KV layout {name} of device {self.backend.name!r} is wrong and is not used: {reason}.")
                self.host.emit(Event("layout.refused", {"layout": name, "kind": request.kind, "reason": reason}))
            if wrong:
                self.wrong_layouts |= wrong
                self._choose_kernels(assumed=False)

    def _run_canary(self) -> None:
        """Run the chosen kernels on small samples; those that give wrong results are demoted, with a warning and an
        event, and others are chosen, until all chosen ones are right.
        """
        checked: set[int] = set()
        while True:
            verdicts = [*run_canary(self.plan, self.backend.torch_device_indexed, self.kv_layouts, checked)]
            self.verdicts += verdicts
            checked |= {id(v.kernel) for v in verdicts}
            for v in verdicts:
                if v.outcome is None:
                    warn(f"{self._describe(v.kernel)} could not be checked: it serves none of its op's samples.")
            failed = [v for v in verdicts if v.failed]
            if not failed:
                return
            for v in failed:
                self.demoted[v.kernel] = v.reason
                warn(f"{self._describe(v.kernel)} gives wrong results and is not used: {v.reason}.")
                self.host.emit(
                    Event("canary.demoted", {"kernel": v.kernel.name, "op": v.kernel.op, "reason": v.reason})
                )
            self._choose_kernels(assumed=False)

    def report_wrong_capture(self, size: Size, reason: str) -> None:
        """Warn of a captured step that replays wrongly and is not used, and emit the event "capture.dropped"."""
        warn(
            f"Backend.capture of device {self.backend.name!r} is wrong, so such steps run eagerly: of {size.sequences} "
            f"sequences with {size.tokens} token(s) each, {reason}."
        )
        self.host.emit(Event("capture.dropped", {"device": self.backend.name, **size._asdict(), "reason": reason}))

    def _describe(self, kernel: Kernel) -> str:
        """A kernel, its op, its device and its origin, for a warning."""
        origin = self.host.origin(kernel, self.backend)
        return f"Kernel {kernel.name} for op {kernel.op!r} on device {self.backend.name!r} (from {origin})"

    # -- the cache that it needs

    def kv_layouts(self, request: KVRequest) -> Sequence[KVLayout]:
        """Layouts that the cache of one kind of layer may have, in the KV dtype of the options (`kv_layouts_for`), but
        for those that were found wrong.

        Raises:
            BindError: all of them were.
        """
        fitting = kv_layouts_for(self.backend, request, self.dtype, self.options, self.files.name)
        if right := [x for x in fitting if (request, x.name) not in self.wrong_layouts]:
            return right
        reasons = [f"{x.name}: {self.wrong_layouts[request, x.name]}" for x in fitting]
        raise BindError(
            f"Device {self.backend.name!r} has no KV layout for {request.kind!r} that works: {'; '.join(reasons)}.",
            remedy=f"set another kv_cache_dtype; its author finds more with `inferplane conform --device "
            f"{self.backend.name}`",
        )

    @property
    def block_tokens(self) -> int:
        """Tokens per KV block."""
        return block_tokens_of(self.plan)

    def layer_requests(self) -> list[LayerRequests]:
        """What each layer keeps of a sequence: the model's own layers, then its draft layers."""
        return list_requests((*self.model.layers, *self.model.mtp))

    def kv_requests(self) -> list[KVRequest]:
        """The entries that each layer stores which stores any, in the order of the layers."""
        return [request.kv for request in self.layer_requests() if request.kv is not None]

    def count_state_bytes(self) -> int:
        """Bytes that recurrent layers keep of a sequence, in both of its slots; 0 if there are no such layers."""
        return SLOTS_PER_SEQUENCE * count_slot_bytes(self.layer_requests(), self.dtype)

    @property
    def tables(self) -> TablePlan:
        """Which block table each layer reads, and where its entries lie. A draft model has one table."""
        if self.options.block_tokens is not None:
            return single_table(self.kv_requests(), reason="a draft model has one block table")
        return self._deal_layers(())

    def _deal_layers(self, also: Sequence[KVRequest]) -> TablePlan:
        """`deal_layers`, for the layouts of the plan; `also`: the layers of a draft model."""
        requests = self.kv_requests()
        count = len(requests) - sum(bool(layer.kv_requests()) for layer in self.model.mtp)

        def form(request: KVRequest) -> tuple[KVRequest, str, int]:
            layout = self.plan.layouts[request]
            return replace(request, window=None), layout.name, layout.bytes_per_block(request, self.dtype)

        return deal_layers(requests[:count], requests[count:], also, form)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The widest attention window of the layers of each block table, in tokens; None: a layer attends to all."""
        return self.tables.windows

    def block_bytes(self) -> int:
        """Bytes per KV block, in all storages."""
        return sum(self.plan.layouts[r].bytes_per_block(r, self.dtype) for r in self.tables.storages)

    def count_unreleased_bytes(self) -> int:
        """Bytes per KV block of layers with a window whose table keeps all tokens."""
        tables = self.tables
        unreleased = [
            r for r, table in zip(self.kv_requests(), tables.table_of) if tables.windows[table] is None and r.window
        ]
        return sum(self.plan.layouts[r].bytes_per_block(r, self.dtype) for r in unreleased)

    # -- explaining

    def explain(self) -> dict[str, Any]:
        """The plan and the captured decode steps as JSON-ready data (docs/schemas/explain.json)."""
        return {**explain(self.plan, self.files.name), **self._describe_caches_and_steps()}

    def explain_text(self, *, verbose: bool = False) -> str:
        """The plan and the captured decode steps as text, in the words of `inferplane explain`; captures are left out
        where there are none. `verbose` adds every rejected kernel with its reason.
        """
        return explain_text(self.plan, self.files.name, verbose=verbose, **self._describe_caches_and_steps())

    def describe_caches(self) -> dict[str, Any]:
        """The entries `kv_tables` and, if layers keep states of sequences, `states` of `explain`."""
        data: dict[str, Any] = {"kv_tables": self.tables.data()}
        if sequence_bytes := self.count_state_bytes():
            layers = sum(request.states is not None for request in self.layer_requests())
            data["states"] = {"layers": layers, "sequence_bytes": sequence_bytes}
        return data

    def _describe_caches_and_steps(self) -> dict[str, Any]:
        return {**self.describe_caches(), "decode_steps": describe_captured_steps(self)}

    def why_not_captured(self) -> str:
        """In words, why decode steps are not captured; empty if they can be."""
        return why_not_captured(self.plan, self.options)


def describe_captured_steps(planned: PlannedModel) -> dict[str, Any]:
    """The `decode_steps` of `explain`: the sizes of captured decode steps; `off`, the reason why none are captured, in
    words, "" where they are; `wrong`, the sizes whose captures replay wrongly and are not used, if there are any.

    Where a layer of the model drafts, `drafting_layer` is the reason why its drafts are not captured together with the
    step; empty where they are.
    """
    sizes = bucket_sizes(planned.plan, planned.options, planned.max_model_len, num_tables=len(planned.windows))
    off = planned.why_not_captured()
    if planned.decode is not None:
        sizes, off = planned.decode.sizes, planned.decode.disabled_reason
    if not off and type(planned.backend).capture is Backend.capture:
        off = "the device captures no steps"
    data = {**sizes.data(), "off": off}
    if planned.decode is not None and planned.decode.wrong:
        data["wrong"] = [{**size._asdict(), "reason": reason} for size, reason in planned.decode.wrong.items()]
    if not planned.options.has_draft_layer:
        return data
    together = planned.captured_speculation
    if together is None:
        apart = why_not_captured_together(planned.plan, planned.options)
    else:
        apart = together.disabled_reason or next(iter(together.wrong.values()), "")
    return {**data, "drafting_layer": off or apart}
