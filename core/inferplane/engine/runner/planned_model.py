"""A model bound to a device's kernels, before its weights are read: what `explain`, `estimate` and `tune` need."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from inferplane.binding import Loaded, Options, Plan, Verdict, bind, explain, explain_text, read_lock, run_canary
from inferplane.binding.layout_canary import check_layout
from inferplane.binding.old_names import current_kernel_names
from inferplane.engine.runner.buckets import Size, bucket_sizes
from inferplane.engine.runner.capture import DecodeSteps, why_not_captured, why_not_captured_together
from inferplane.engine.runner.exports.compare import check_export
from inferplane.engine.runner.kv_cache import (
    LayerRequests,
    block_tokens_of,
    check_options,
    count_slot_bytes,
    list_requests,
)
from inferplane.engine.runner.loading import kv_scales
from inferplane.engine.runner.loading.device_model import DeviceModel
from inferplane.engine.runner.loading.drafters import OWN, Drafter, build_drafters
from inferplane.engine.runner.loading.slow_ops import describe_slow_ops
from inferplane.engine.runner.loading.weight_formats import build_as_read, count_expanded, formats_read_by_row
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.options import RunnerOptions
from inferplane.engine.runner.ranks import Ranks
from inferplane.errors import UsageError, warn
from inferplane.kvcache import SLOTS_PER_SEQUENCE, PoolShape, TablePlan, deal_layers, describe_pools, single_table
from inferplane.models import Build, build
from inferplane.models.draft_layers import DraftLayers, with_drafts
from inferplane.ops import CausalLM
from inferplane.plugins import Event, PluginHost
from inferplane.quant import READERS, QuantFormats, count_requantized
from inferplane.types import Backend, Kernel, KVRequest


class CapturedSpeculation(Protocol):
    """Runs steps together with a draft layer, by replaying a capture; `disabled_reason`, in words, if it does not, and
    `wrong`, the reasons why some captures are not used."""

    disabled_reason: str
    wrong: dict[Any, str]


class PlannedModel(DeviceModel):
    """A model bound to the kernels of one device.

    Attributes, beside those of `DeviceModel`: `plan`; `base`, the model without layers that were built apart, which
    `drafters` has, and `model` with them; `draft`, a draft model or None; `verdicts` of the canary; `ranks`, the
    processes that share the model, None for one; `loaded`, the weights; `decode`, which runs decode steps, and
    `captured_speculation`, which runs them together with a draft layer: both None before the model is loaded;
    `spent_s`, seconds by phase; `cached`, the layers that store entries.
    """

    def __init__(self, files: ModelFiles, host: PluginHost, backend: Backend, options: RunnerOptions) -> None:
        super().__init__(files, host, backend, options)
        self.ranks: Ranks | None = None
        self.decode: DecodeSteps | None = None
        self.captured_speculation: CapturedSpeculation | None = None
        self.verdicts: list[Verdict] = []
        self.spent_s: dict[str, float] = {}
        self.demoted: dict[Kernel, str] = {}
        self.drafters: list[Drafter] = []
        self.draft: PlannedModel | None = None
        self.loaded = Loaded()
        self.requantized: Mapping[tuple[str, str], int] = {}

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
        self.check_chosen()
        for what in describe_slow_ops(self.plan, self.options, self.files.name):
            warn(what)
        self.host.emit(Event("plan.bound", {"device": self.backend.name, "model": self.files.name}))

    def check_chosen(self) -> None:
        """Check the chosen KV layouts and kernels on the opened device (the canary); replace those that are wrong."""
        with self.measure_phase("canary"):
            self._check_layouts()
            self._run_canary()

    def check_kernels(self) -> None:
        """Choose kernels anew for a changed `model`, and check them."""
        self.verdicts = []
        self._choose_kernels()
        self.check_chosen()

    def bind(self, *, assumed: bool) -> None:
        """Build the model's tree of ops, and choose a kernel for each: sets `model`, `plan`, `ignored` (tensors not to
        read) and the weight readers. Reads the names of tensors, not their data, but for an order of columns that the
        config states.

        Args:
            assumed: the device is not here (`explain` for another machine): its kernels are assumed to be available.
        """
        self.assumed = assumed
        if self.is_packed and (exported := self.files.exported) is not None:
            check_export(exported, self.options, self.placement.tp_size, self.state)
        names, scheme = self.names_in(self.files), self.options.quantization
        config = self.files.config if names is None else self.files.config_of_tensors()

        def make(found: QuantFormats) -> tuple[CausalLM, list[str]]:
            rows, unread, length = formats_read_by_row(self), list(found.unread), self.max_model_len
            mtp, quants = self.options.has_own_mtp, found.activation_quants
            plans = Build(config, self.placement, found.format_of, length, mtp, unread, quants, rows, found.widths_of)
            plans = replace(plans, rotates_index_keys=self.options.has_quantized_index_keys)
            return build(plans, self.host.models()), plans.ignored

        (base, ignored), self.read = build_as_read(self, config, scheme, names, make, lambda made: made[:1])
        found = self.read.formats
        self.readers, self.view = {**READERS, **found.readers}, found.view
        self.expanded = count_expanded(config, found.format_of)
        self.base: CausalLM = base
        self.config, self.ignored = config, ignored
        self.add_drafters(apart=not self.options.has_own_mtp)
        self._choose_kernels()
        self.requantized = count_requantized((w for _, w in base.weights()), self.read.stored_format_of)

    def add_drafters(self, *, apart: bool) -> None:
        """Put the layers that draft behind `base`, as the options name them: sets `drafters` and `model`. `apart`: also
        the model's own prediction layers, if the options name them: they are not in `base`.
        """
        options = self.options
        self.drafters = build_drafters(self, self.base, apart=apart)
        more = (layer for drafter in self.drafters for layer in drafter.layers.layers)
        self.model: CausalLM = with_drafts(self.base, tuple(more))
        check_options(self.model, options, self.files.name)
        if options.mtp and len(self.model.mtp) == (options.eagle is not None):
            raise UsageError(
                f"mtp (of mtp=True or method='mtp'): {(options.mtp_files or self.files).name} has no "
                "multi-token-prediction layers.",
                remedy="leave it out, or load a checkpoint whose config has num_nextn_predict_layers",
            )

    def _choose_kernels(self) -> None:
        """Bind the tree of ops anew, by the options' pins, the lock file's choices and the kernels demoted so far."""
        locked = read_lock(self.options.lock, self.fingerprint()) if self.options.lock else {}
        if self.is_packed and not self.options.lock and (own := self.files.export_lock) is not None:
            locked = read_lock(own, None)  # for the device that `check_export` has compared
        choices = current_kernel_names(locked, self.kernels)
        self.plan: Plan = bind(
            self.model,
            self.kernels,
            self.settings,
            self.kv_layouts,
            options=Options(self.pins, choices, self.demoted),
            strict=self.options.strict,
        )
        self.cached = kv_scales.list_layers(self, self.plan, self.model, self.drafters)

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
                self._choose_kernels()

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
            self._choose_kernels()

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

    @property
    def block_tokens(self) -> int:
        """Tokens per KV block."""
        return block_tokens_of(self.plan)

    def layer_requests(self) -> list[LayerRequests]:
        """What each layer keeps of a sequence: the model's own layers, then its draft layers."""
        return list_requests((*self.model.layers, *self.model.mtp))

    def kv_requests(self) -> list[KVRequest]:
        """The entries that each layer stores which stores any, in the order of the layers; index keys follow a layer's
        entries.
        """
        return [request for layer in self.layer_requests() for request in layer.of_tokens]

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
        count = len(requests) - sum(len(layer.kv_requests()) for layer in self.model.mtp)

        def form(request: KVRequest) -> tuple[KVRequest, str, int]:
            layout = self.plan.layouts[request]
            return replace(request, window=None), layout.name, layout.bytes_per_block(request, self.dtype)

        return deal_layers(requests[:count], requests[count:], also, form)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The widest attention window of the layers of each block table, in tokens; None: a layer attends to all."""
        return self.tables.windows

    def block_bytes(self) -> int:
        """Bytes per KV block, in all storages; of a block of each pool."""
        return self._count_bytes(self.tables.storages)

    def describe_pools(self) -> list[PoolShape]:
        """The pools that blocks are taken from; a draft model's entries are in the blocks of the first."""
        drafted = 0 if self.draft is None else self.draft.block_bytes()
        return describe_pools(self.tables, self._count_bytes, drafted)

    def _count_bytes(self, requests: Sequence[KVRequest]) -> int:
        """Bytes of a block in storages of all of these."""
        return sum(self.plan.layouts[r].bytes_per_block(r, self.dtype) for r in requests)

    def count_unreleased_bytes(self) -> int:
        """Bytes per KV block of layers with a window whose table keeps all tokens."""
        tables = self.tables
        unreleased = [
            r for r, table in zip(self.kv_requests(), tables.table_of) if tables.windows[table] is None and r.window
        ]
        return self._count_bytes(unreleased)

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
        """The entries `kv_tables` and, if there are any, `drafters`, the `states` that layers keep of sequences, and
        what is `quantized` while it is read, of `explain`.
        """
        data: dict[str, Any] = {"kv_tables": self.tables.data(), **kv_scales.describe(self, self.plan, self.cached)}
        if drafters := self.describe_drafters():
            data["drafters"] = drafters
        if sequence_bytes := self.count_state_bytes():
            layers = sum(request.states is not None for request in self.layer_requests())
            data["states"] = {"layers": layers, "sequence_bytes": sequence_bytes}
        if choices := self.read.chosen.choices:
            data["quantized"] = [choice.data() for choice in choices]
        return data

    def describe_drafters(self) -> list[dict[str, Any]]:
        """What drafts for the model, as JSON-ready data (`drafters` in docs/schemas/explain.json): where it comes from,
        how it is quantized, whose embedding and head it reads, and the bytes that it adds to the model's.
        """
        plan, model, drafters = self.plan, replace(self.base, mtp=()), self.drafters
        if self.base.mtp:
            layers = DraftLayers(self.base.mtp)
            drafters = [Drafter("mtp", self.files, self.options.quantization, QuantFormats(), layers), *drafters]
        found = []
        for drafter in drafters:
            own = drafter.layers.own_weights(model)
            weight_bytes = sum(plan.nbytes(plan.weights[i], name) for i in own for name in plan.packings.get(i, ()))
            block_bytes = self._count_bytes([r for layer in drafter.layers.layers for r in layer.kv_requests()])
            found.append({**drafter.data(), "weight_bytes": weight_bytes, "kv_block_bytes": block_bytes})
        if (draft := self.draft) is not None:
            drafter = Drafter("draft_model", draft.files, draft.options.quantization, QuantFormats(), OWN)
            sizes = {"weight_bytes": draft.plan.weight_bytes, "kv_block_bytes": draft.block_bytes()}
            found.append({**drafter.data(), **sizes})
        return found

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
