"""`Runner`: a model that runs on a device. It opens the device, binds, loads, builds the cache, then runs steps."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from inferplane.binding import link, view_of
from inferplane.engine.runner.buckets import bucket_sizes
from inferplane.engine.runner.capture import DecodeSteps
from inferplane.engine.runner.estimate import check_fit
from inferplane.engine.runner.kv_cache import (
    CacheMemory,
    CachePlan,
    build_pools,
    check_memory,
    count_budget,
    place_caches,
)
from inferplane.engine.runner.loading import kv_scales
from inferplane.engine.runner.loading.weight_loading import read_weights
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.options import Draft, RunnerOptions
from inferplane.engine.runner.planned_model import PlannedModel
from inferplane.engine.runner.ranks import Ranks
from inferplane.errors import CapacityError, InferplaneError, UsageError
from inferplane.kvcache import TablePlan, divide_budget
from inferplane.models import constructor
from inferplane.plugins import Event, PluginHost
from inferplane.renamed import old_attributes
from inferplane.types import Backend, Batch, KVCache, KVRequest, LayerCache, Placement, StepKind
from inferplane.types.batch import Query, make_batch


@old_attributes({"offer": "kv_layouts"})
class Runner(PlannedModel):
    """A model loaded on one device. `open` makes one; `plan_only` stops before anything is allocated.

    Attributes, beside those of `PlannedModel`: `loaded`; `steps`, the bound model per step kind; `cache`; `draft`, the
    runner of a draft model or None: it has a plan and weights of its own, and a cache of as many blocks of the same
    size, so that both share block tables; `limited_by_cache`, True if the cache caps `max_model_len`;
    `kv_budget_bytes`, what all caches together may take; `kv_values`, static scales that were read; `spent_s`,
    seconds of each phase of `open`, without those of a draft model.
    """

    draft: Runner | None

    def __init__(self, files: ModelFiles, host: PluginHost, backend: Backend, options: RunnerOptions) -> None:
        super().__init__(files, host, backend, options)
        self.steps: dict[StepKind, Callable[..., Any]] = {}
        self.cache: KVCache | None = None
        self.limited_by_cache = False
        self.kv_values: list[tuple[float, ...]] = []
        self.kv_budget_bytes: int | None = options.kv_cache_bytes

    @classmethod
    def plan_only(cls, files: ModelFiles, host: PluginHost, device: str, options: RunnerOptions) -> Runner:
        """A runner that is bound to a device that need not be here, without opening it, reading weights or allocating:
        for `explain` and `estimate`. It cannot run steps. With several `options.ranks` it is the first rank's part.
        """
        if files.exported is not None and options.ranks == 1:
            options = replace(options, ranks=files.exported.ranks)
        runner = cls(files, host, host.backend_for_explain(device), options)
        runner.placement = Placement.shared(0, options.ranks)
        runner.bind(assumed=True)
        if options.draft is not None:
            runner.draft = runner.bind_draft(options.draft)
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
            self.draft = self.bind_draft(self.options.draft)
        self.check_fit(self.backend.memory().free_bytes)
        self.load_weights(progress)
        if self.draft is not None:
            self.draft.load_weights(None)
        with self.measure_phase("cache"):
            self.build_caches(self.plan_caches())

    def check_fit(self, free_bytes: int) -> None:
        """Raise CapacityError if the weights take more than so many bytes; see `estimate.check_fit`."""

        def plan_with(**changes: str) -> Runner:
            options = replace(self.options, **changes, lock=None)  # type: ignore[arg-type]  # names of text options
            return self.plan_only(self.files, self.host, self.backend.name, options)

        check_fit(self, free_bytes, plan_with)

    def load_weights(self, progress: Callable[[int, int], None] | None) -> None:
        """Read and pack the weights, warn about what is odd in them, and link the bound ops with them (`steps`)."""
        with self.measure_phase("load"):
            kv_scales.warn_if_unused(self, self.plan, self.cached)
            self.kv_values = kv_scales.read_values(self, self.plan, self.cached)
            self.loaded = read_weights(self, progress)
        self.link_weights()

    def link_weights(self) -> None:
        """Bind the ops of the plan to the weights: sets `steps`."""
        with self.measure_phase("link"):
            self.steps = link(self.plan, self.loaded.packed)

    def bind_draft(self, draft: Draft) -> Runner:
        """The draft model's runner, bound to the same device, as the model is; UsageError when the draft model cannot
        draft for this model.
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
        if self.assumed:
            runner.bind(assumed=True)
        else:
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

    def plan_caches(self) -> CachePlan:
        """As many blocks as the budget holds of all caches together, and no more than the largest batch can use. With
        several ranks it waits for all of them.

        Raises:
            CapacityError: the budget is too small.
        """
        pools = self.describe_pools()
        num_sequences, options = self.options.max_num_seqs, self.options
        free_bytes, state_bytes = self.backend.memory().free_bytes, num_sequences * self.count_state_bytes()
        if self.cache is None:
            check_memory(state_bytes, num_sequences, free_bytes)
        block_tokens, budget = self.block_tokens, self.kv_budget_bytes
        if budget is None:
            budget = count_budget(options, free_bytes - state_bytes, block_tokens, pools)
        blocks = divide_budget(pools, budget, block_tokens, self.max_model_len, num_sequences)
        if self.ranks is not None:
            blocks = tuple(self.ranks.agree(count, self.facts(), self.loaded.nbytes) for count in blocks)
        option = "kv_cache_bytes" if options.kv_cache_tokens is None else "kv_cache_tokens"
        memory = CacheMemory(blocks, block_tokens, pools, budget, option)
        length = memory.max_sequence_tokens(
            self.max_model_len,
            explicit_length=options.max_model_len is not None,
            explicit_budget=options.kv_cache_bytes is not None or options.kv_cache_tokens is not None,
        )
        return CachePlan(blocks, budget, length)

    def build_caches(self, plan: CachePlan) -> None:
        """Build the caches. Lowers `max_model_len` to what they hold; sets `cache`, `decode`, also of a draft
        model.
        """
        self.kv_budget_bytes = plan.budget_bytes
        self.limited_by_cache = plan.max_model_len < self.max_model_len
        self.max_model_len = plan.max_model_len
        for each in filter(None, (self, self.draft)):
            each.cache = each._allocate(plan.blocks if each is self else plan.blocks[:1])
            each.make_decode_steps()

    def make_decode_steps(self) -> None:
        """Set `decode`, which runs the decode steps ."""
        assert self.cache is not None
        limit, free_bytes, cache = self.max_model_len, self.backend.memory().free_bytes, self.cache
        sizes = bucket_sizes(self.plan, self.options, limit, free_bytes, cache.num_tables)
        reason, vocab, step = self.why_not_captured(), self.model.vocab, self.run_eagerly
        report, tables = self.report_wrong_capture, cache.num_tables
        self.decode = DecodeSteps(self.backend, step, cache, limit, sizes, reason, vocab, report, tables)

    def _allocate(self, blocks: Sequence[int]) -> KVCache:
        """The cache of so many blocks in each pool, and the states of recurrent layers."""
        made = build_pools(self.tables, self.kv_requests(), blocks, self.block_tokens, self._build_storages)
        made = kv_scales.give_scales(made, self.kv_values)
        requests, numbers = self.layer_requests(), made.list_tables()
        if all(request.keeps_entries_only for request in requests):
            return made
        device, num_sequences = torch.device(self.backend.torch_device_indexed), self.options.max_num_seqs
        return replace(made, by_layer=place_caches(requests, made.layers, numbers, num_sequences, self.dtype, device))

    def _build_storages(self, storages: Sequence[KVRequest], blocks: int) -> KVCache:
        return self.backend.build_kv_cache(storages, self.plan.layouts, blocks, self.dtype)

    def facts(self) -> tuple[object, ...]:
        """What must be equal on all ranks, so that they run the same steps."""
        o, layouts = self.options, sorted((repr(r), x.name) for r, x in self.plan.layouts.items())
        files = [self.files, *(drafter.files for drafter in self.drafters)]
        entries, *of_drafters = (sorted(map(repr, each.config.items())) for each in files)
        # Machines may have the same files in folders of different names.
        drafters = [{**x.data(), "model": config} for x, config in zip(self.drafters, of_drafters)]
        limits = o.max_num_seqs, self.max_model_len
        stored = o.quantization, o.load_format, o.mtp, drafters
        return entries, str(self.dtype), *stored, limits, self.backend.name, layouts

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

    def follow_rank_0(self) -> None:
        """On every rank but 0: run the steps that rank 0 broadcasts, then end the process. On rank 0, and where there
        are no others: nothing, and the ranks end with the process.

        Raises:
            SystemExit: rank 0 closed the model.
        """
        if self.ranks is not None and self.ranks.rank:
            self.follow()
            self.close()
            raise SystemExit(0)
        if self.ranks is not None:
            atexit.register(self.ranks.close)

    def follow(self) -> None:
        """On every rank but 0: run the steps that rank 0 broadcasts; returns when rank 0 closes the model."""
        assert self.ranks is not None and self.cache is not None
        hidden = drafted = torch.empty(0)
        device, block_tokens = self.backend.torch_device_indexed, self.cache.block_tokens
        for queries, draft, unknown in self.ranks.steps():
            with torch.inference_mode():
                batch = make_batch(queries, block_tokens=block_tokens, device=device, non_blocking=True)
                if unknown:
                    self.ranks.fill_ids(batch, unknown)
                if draft is None:
                    hidden = self.steps[batch.kind](batch, self.cache)[1]
                    continue
                layer, kv = self.draft_layer(draft.layer)[batch.kind], self.draft_cache(draft.layer)
                source = drafted if draft.continues else hidden
                drafted = layer(source[torch.tensor(draft.rows, device=source.device)], batch, kv)[1]

    @property
    def sample(self) -> Callable[..., torch.Tensor]:
        """The bound op `sample`, which turns logits into tokens; for `Sampler`."""
        return cast(Callable[..., torch.Tensor], view_of(self.steps["decode"]).sample)

    def draft_layer(self, index: int) -> dict[str, Callable[..., Any]]:
        """The bound draft layer number `index` (MTP layers first, then an EAGLE head), as a function for each step
        kind.
        """
        return {kind: view_of(step).mtp[index] for kind, step in self.steps.items()}

    def draft_cache(self, index: int) -> LayerCache:
        """The cache of draft layer number `index`, whose blocks are those of the first table."""
        assert self.cache is not None
        number = len(self.model.layers) + index
        return self.cache.by_layer[number].cache if self.cache.by_layer else self.cache.layers[number]


def run_behind(
    runner: Runner, batch: Batch, queries: Sequence[Query], rows: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one step like `Runner.run`, behind a step that is in flight; with several ranks, without waiting for that.

    Args:
        runner: the model. batch: the step. queries: those that it was made from.
        rows: token rows of it whose ids the host does not know yet.
    """
    if runner.ranks is None:
        return runner.run(batch)
    with runner.ranks.step_behind(batch, queries, rows):
        return (runner.run_eagerly if runner.decode is None else runner.decode)(batch)


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
