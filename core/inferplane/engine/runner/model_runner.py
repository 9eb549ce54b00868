"""`Runner`: a model that runs on a device. It opens the device, binds, loads, builds the cache, then runs steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from inferplane.binding import DummySource, Loaded, link, load, view_of
from inferplane.engine.runner.buckets import bucket_sizes
from inferplane.engine.runner.capture import DecodeSteps
from inferplane.engine.runner.estimate import check_fit
from inferplane.engine.runner.kv_cache import KV_SHARE, CacheMemory, check_memory, place_caches
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.options import Draft, RunnerOptions
from inferplane.engine.runner.planned_model import PlannedModel
from inferplane.engine.runner.ranks import Ranks
from inferplane.errors import CapacityError, InferplaneError, UsageError, warn
from inferplane.kvcache import TablePlan
from inferplane.models import SafetensorsFolder, constructor
from inferplane.models.families.eagle import WithEagle
from inferplane.models.reading.gguf_source import GGUFSource
from inferplane.models.reading.names import check_frequencies
from inferplane.plugins import Event, PluginHost
from inferplane.quant import explain_no_savings
from inferplane.renamed import old_attributes
from inferplane.types import Backend, Batch, KVCache, Placement, StepKind
from inferplane.types.batch import make_batch


@old_attributes({"offer": "kv_layouts"})
class Runner(PlannedModel):
    """A model loaded on one device. `open` makes one; `plan_only` stops before anything is allocated.

    Attributes, beside those of `PlannedModel`: `loaded`; `steps`, the bound model per step kind; `cache`; `draft`, the
    runner of a draft model or None: it has a plan and weights of its own, and a cache of as many blocks of the same
    size, so that both share block tables; `limited_by_cache`, True if the cache caps `max_model_len`; `spent_s`,
    seconds of each phase of `open`, without those of a draft model.
    """

    def __init__(self, files: ModelFiles, host: PluginHost, backend: Backend, options: RunnerOptions) -> None:
        super().__init__(files, host, backend, options)
        self.loaded = Loaded()
        self.steps: dict[StepKind, Callable[..., Any]] = {}
        self.cache: KVCache | None = None
        self.draft: Runner | None = None
        self.limited_by_cache = False

    @classmethod
    def plan_only(cls, files: ModelFiles, host: PluginHost, device: str, options: RunnerOptions) -> Runner:
        """A runner that is bound to a device that need not be here, without opening it, reading weights or allocating:
        for `explain` and `estimate`. It cannot run steps. With several `options.ranks` it is the first rank's part.
        """
        runner = cls(files, host, host.backend_for_explain(device), options)
        runner.placement = Placement.shared(0, options.ranks)
        runner.bind(assumed=True)
        return runner

    @classmethod
    def open(
        cls,
        files: ModelFiles,
        host: PluginHost,
        device: str,
        options: RunnerOptions,
        progress: Callable[[int, int], None] | None = None,
        *,
        index: int = 0,
    ) -> Runner:
        """Open the device, bind, check the kernels, read the weights, build the cache; returns a runner that can run
        steps.

        Args:
            files: the model.
            host: the plugin host.
            device: its name.
            options: how to bind and load.
            progress: called with the bytes of weights loaded, and of all.
            index: which of several such devices; ranks on one machine count from it.

        Raises:
            DeviceError, BindError, CheckpointError, CapacityError: see each; nothing stays allocated.
        """
        backend = host.backend(device, index=index)
        ranks = None
        if options.ranks > 1:
            ranks = Ranks(backend.comm())
            if backend.torch_device_indexed != backend.torch_device:  # numbered devices: each rank takes its own
                backend = host.backend(device, index=index + ranks.local_rank)
        runner = cls(files, host, backend, options)
        if ranks is not None:
            runner.ranks, runner.placement = ranks, ranks.placement
        try:
            runner._open(progress)
        except BaseException as error:
            if ranks is not None and not ranks.weight_bytes:
                ranks.fail()
            if isinstance(error, MemoryError):
                what = f"{files.name} cannot be loaded: this process cannot get more memory."
                remedy = "see `inferplane estimate`; lower kv_cache_bytes, quantize, or raise the process's limit"
                raise CapacityError(what, remedy=remedy) from error
            raise
        return runner

    def _open(self, progress: Callable[[int, int], None] | None) -> None:
        """The phases of `open`, each timed in `spent_s`."""
        with self.measure_phase("open"):
            self.state = self.host.open(self.backend)
        self.host.emit(Event("device.opened", {"device": self.backend.name, "name": self.state.name}))
        self.bind_and_check()
        # Only rank 0 runs the draft model.
        if self.options.draft is not None and (self.ranks is None or self.ranks.rank == 0):
            self.draft = self._bind_draft(self.options.draft)
        self.check_fit(self.backend.memory().free_bytes)
        self._load(progress)
        if self.draft is not None:
            self.draft._load(None)
        with self.measure_phase("cache"):
            self._build_cache()

    def check_fit(self, free_bytes: int) -> None:
        """Raise CapacityError if the weights take more than so many bytes; see `estimate.check_fit`."""

        def plan_with(**changes: str) -> Runner:
            options = replace(self.options, **changes, lock=None)  # type: ignore[arg-type]  # names of text options
            return self.plan_only(self.files, self.host, self.backend.name, options)

        check_fit(self, free_bytes, plan_with)

    def _load(self, progress: Callable[[int, int], None] | None) -> None:
        """Read and pack the weights, warn about what is odd in them, and link the bound ops with them (`steps`)."""
        with self.measure_phase("load"), contextlib.ExitStack() as opened:
            source: DummySource | SafetensorsFolder | GGUFSource | WithEagle = DummySource()
            if self.options.load_format != "dummy":
                source = self.files.source()
                if self.options.eagle is not None:
                    source = WithEagle(source, self.options.eagle.source())
                opened.enter_context(contextlib.closing(source))
            for what in self.files.complaints():
                warn(what)
            self.loaded = load(
                self.plan,
                source if isinstance(source, DummySource) else self.view(source),
                self.backend.torch_device_indexed,
                readers=self.readers,
                progress=progress,
                ignore=self.ignored,
            )
            if not isinstance(source, DummySource):
                check_frequencies(self.files.config, self.files.source(), self.loaded.ignored)
        warnings = explain_no_savings(self.plan, self.options.quantization)
        for what in (*warnings, *self.loaded.complaints(self.files.name)):
            warn(what)
        with self.measure_phase("link"):
            self.steps = link(self.plan, self.loaded.packed)

    def _bind_draft(self, draft: Draft) -> Runner:
        """The draft model's runner, bound to the same device; UsageError when the draft model cannot draft for this
        model.
        """
        limit = draft.files.config.get("max_position_embeddings")
        if limit and limit < self.max_model_len:
            raise UsageError(
                f"Draft model {draft.files.name} has {limit} positions, {self.files.name} is to run with "
                f"{self.max_model_len}.",
                remedy=f"pass max_model_len={limit}, or another draft model",
            )
        options = replace(draft.options, max_model_len=self.max_model_len, block_tokens=self.block_tokens)
        runner = Runner(draft.files, self.host, self.backend, options)
        runner.state = self.state
        runner.bind_and_check()
        target_vocab, draft_vocab = self.model.vocab, runner.model.vocab
        if target_vocab != draft_vocab:
            raise UsageError(
                f"Draft model {draft.files.name} has a vocabulary of {draft_vocab} tokens, {self.files.name} one of "
                f"{target_vocab}.",
                remedy="use a draft model with the same tokenizer",
            )
        return runner

    # -- cache

    @property
    def tables(self) -> TablePlan:
        """See `PlannedModel.tables`; a draft model's layers read the first table."""
        return super().tables if self.draft is None else self._deal_layers(self.draft.kv_requests())

    def _build_cache(self) -> None:
        """Build the cache, and the draft model's: as many blocks as the budget holds of both together, and no more than
        the largest batch can use. Lowers `max_model_len` if they hold no longer sequence; sets `decode`.
        """
        block_bytes = self.block_bytes() + (self.draft.block_bytes() if self.draft is not None else 0)
        budget, num_sequences = self.options.kv_cache_bytes, self.options.max_num_seqs
        free_bytes, state_bytes = self.backend.memory().free_bytes, num_sequences * self.count_state_bytes()
        check_memory(state_bytes, num_sequences, free_bytes)
        if budget is None:
            budget = int((free_bytes - state_bytes) * KV_SHARE)
        windows = self.windows
        max_blocks = len(windows) * math.ceil(self.max_model_len / self.block_tokens) * num_sequences
        blocks = min(budget // block_bytes, max_blocks) if block_bytes else max_blocks
        if self.ranks is not None:
            blocks = self.ranks.agree(blocks, self._facts(), self.loaded.nbytes)
        memory = CacheMemory(blocks, self.block_tokens, block_bytes, budget, windows)
        limit, options = self.max_model_len, self.options
        self.max_model_len = memory.max_sequence_tokens(
            limit,
            explicit_length=options.max_model_len is not None,
            explicit_budget=options.kv_cache_bytes is not None,
        )
        self.limited_by_cache = self.max_model_len < limit
        for runner in filter(None, (self, self.draft)):
            limit, free_bytes = runner.max_model_len, self.backend.memory().free_bytes
            runner.cache = runner._allocate(blocks)
            sizes = bucket_sizes(runner.plan, runner.options, limit, free_bytes, runner.cache.num_tables)
            reason = runner.why_not_captured()
            vocab, step, report = runner.model.vocab, runner.run_eagerly, self.report_wrong_capture
            num_tables = runner.cache.num_tables
            runner.decode = DecodeSteps(
                self.backend, step, runner.cache, limit, sizes, reason, vocab, report, num_tables
            )

    def _allocate(self, blocks: int) -> KVCache:
        """The cache, whose layers share storages as their tables allow, and the states of recurrent layers."""
        tables, made = self.tables, KVCache((), blocks, self.block_tokens)
        if tables.storages:
            made = self.backend.build_kv_cache(tables.storages, self.plan.layouts, blocks, self.dtype)
        if tables.num_tables > 1:
            stored = [made.layers[storage] for storage in tables.storage_of]
            layers = [kv if kv.request == r else kv.share(r) for kv, r in zip(stored, self.kv_requests())]
            made = replace(made, layers=tuple(layers), tables=tables.table_of)
        requests, numbers = self.layer_requests(), made.list_tables()
        if all(request.keeps_entries_only for request in requests):
            return made
        device, num_sequences = torch.device(self.backend.torch_device_indexed), self.options.max_num_seqs
        return replace(made, by_layer=place_caches(requests, made.layers, numbers, num_sequences, self.dtype, device))

    def _facts(self) -> tuple[object, ...]:
        """What must be equal on all ranks, so that they run the same steps."""
        o, layouts = self.options, sorted((repr(r), x.name) for r, x in self.plan.layouts.items())
        entries = sorted(map(repr, self.files.config.items()))
        limits = o.max_num_seqs, self.max_model_len
        return entries, str(self.dtype), o.quantization, o.load_format, limits, self.backend.name, layouts

    def close(self) -> None:
        """Free weights and cache, also those of the draft model. Ranks that follow end too."""
        if self.ranks is not None:
            self.ranks.close()
        self.steps, self.cache, self.decode, self.captured_speculation = {}, None, None, None
        self.loaded.packed.clear()
        if self.draft is not None:
            self.draft.close()

    # -- steps

    def run(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step, by replaying a capture where there is one; with several ranks, on all of them. Writes the rows'
        entries into the cache. Returns logits float32 `[R, V]` of the rows that need them, and hidden states `[T, D]`.
        """
        if not torch.is_inference_mode_enabled():  # as it is within the engine's steps
            with torch.inference_mode():
                return self.run(batch)
        step = self.run_eagerly if self.decode is None else self.decode
        if self.ranks is None:
            return step(batch)
        assert self.cache is not None
        with self.ranks.step(batch, self.cache.block_tokens):
            return step(batch)

    def run_eagerly(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step like `run`, but always eagerly, without a capture, and without other ranks."""
        return cast(tuple[torch.Tensor, torch.Tensor], self.steps[batch.kind](batch, self.cache))

    def follow(self) -> None:
        """On every rank but 0: run the steps that rank 0 broadcasts; returns when rank 0 closes the model."""
        assert self.ranks is not None and self.cache is not None
        for queries in self.ranks.steps():
            batch = make_batch(queries, block_tokens=self.cache.block_tokens, device=self.backend.torch_device_indexed)
            with torch.inference_mode():
                self.steps[batch.kind](batch, self.cache)

    @property
    def sample(self) -> Callable[..., torch.Tensor]:
        """The bound op `sample`, which turns logits into tokens; for `Sampler`."""
        return cast(Callable[..., torch.Tensor], view_of(self.steps["decode"]).sample)

    def draft_layer(self, index: int) -> dict[str, Callable[..., Any]]:
        """The bound draft layer number `index` (MTP layers first, then an EAGLE head), as a function for each step
        kind.
        """
        return {kind: view_of(step).mtp[index] for kind, step in self.steps.items()}


def check_before_download(
    path: Path, *, model: str, host: PluginHost, device: str, options: RunnerOptions, index: int = 0
) -> None:
    """Refuse what a model's config shows to be in vain, before its weights are downloaded.

    Args:
        path: the folder of the configs, or a GGUF file that has its header alone.
        model: the name that errors have.
        host, device, options, index: as for `Runner.open`.

    Raises:
        UnsupportedModelError: no model family has its architecture. CheckpointError: the config cannot be read.
        CapacityError: its weights are larger than the device's free memory.
    """
    files = ModelFiles(path)
    files.name = model
    constructor(files.config.architecture, host.models())
    try:
        runner = Runner.plan_only(files, host, device, replace(options, lock=None))
        is_here = next(e for e in host.devices() if e.name == runner.backend.name).probe.available
        free_bytes = host.backend(runner.backend.name, index=index).memory().free_bytes if is_here else None
    except InferplaneError:  # what else is wrong is reported where the model is opened
        return
    if free_bytes is not None:
        runner.check_fit(free_bytes)
