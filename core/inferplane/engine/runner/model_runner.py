"""From a name and a device to a model that runs: probe, bind, canary, load, link, cache; then step after step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from inferplane.binding import (
    DummySource,
    Loaded,
    Options,
    Plan,
    PlanSettings,
    Verdict,
    bind,
    link,
    load,
    read_lock,
    run_canary,
    view_of,
)
from inferplane.engine.runner.buckets import sizes_for
from inferplane.engine.runner.capture import DecodeSteps, why_not
from inferplane.engine.runner.kv_cache import DEFAULT_BLOCK_TOKENS, Room, offered
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.options import DTYPES, Draft, InferplaneWarning, RunnerOptions, pick_dtype
from inferplane.engine.runner.ranks import Ranks
from inferplane.errors import UsageError, warn
from inferplane.models import Build, SafetensorsFolder, build
from inferplane.models.families.eagle import WithEagle, with_eagle
from inferplane.ops import CausalLM
from inferplane.plugins import Event, PluginHost
from inferplane.quant import (
    READERS,
    explain_no_savings,
    formats_read_by_row,
    latent_formats,
    latent_request,
    quantize_on_load,
    read_quant_config,
)
from inferplane.types import Backend, Batch, DeviceState, Kernel, KVCache, KVLayout, KVRequest, Placement, StepKind
from inferplane.types.batch import make_batch

if TYPE_CHECKING:
    from inferplane.engine.speculate.captured_steps import Cycles

__all__ = ["DEFAULT_BLOCK_TOKENS", "DTYPES", "Draft", "InferplaneWarning", "Runner", "RunnerOptions"]

KV_SHARE = 0.3
"""Share of free device memory that the cache may take unless told otherwise."""


class Runner:
    """A model bound to one device. `open` makes one; `plan_only` stops before anything is allocated.

    Attributes: `backend`, `state` (None when not opened), `plan`, `steps` (step kind -> bound model), `cache`,
    `max_model_len`, `verdicts` (the canary's), `loaded`, `ranks` (who shares the model, None: nobody), `draft` (a draft
    model's runner, or None: a plan and weights of its own, and a cache of as many blocks of the same size, so that
    block tables are shared), `cut` (`max_model_len` is the cache's), `decode` (runs decode steps), `cycles` (runs them
    with the drafting layer's), `spent_s` (seconds of each phase of `open`, a draft model's left out).
    """

    def __init__(self, files: ModelFiles, host: PluginHost, backend: Backend, options: RunnerOptions) -> None:
        self.files, self.host, self.backend, self.options = files, host, backend, options
        self.dtype = pick_dtype(options.dtype, files)
        self.state: DeviceState | None = None
        self.verdicts: list[Verdict] = []
        self.spent_s: dict[str, float] = {}
        self.demoted: dict[Kernel, str] = {}
        self.loaded = Loaded()
        self.steps: dict[StepKind, Callable[..., Any]] = {}
        self.cache: KVCache | None = None
        self.draft: Runner | None = None
        self.ranks: Ranks | None = None
        self.decode: DecodeSteps | None = None
        self.cycles: Cycles | None = None
        self.cut = False
        limit = files.config.positions
        if options.max_model_len is not None:
            if options.max_model_len < 1 or (limit and options.max_model_len > limit):
                raise UsageError(
                    f"max_model_len = {options.max_model_len}.", there_is=f"1 to {limit}, the model's own positions"
                )
            limit = options.max_model_len
        self.max_model_len: int = limit or 4096
        self.kernels = host.kernels(backend)

    @classmethod
    def plan_only(cls, files: ModelFiles, host: PluginHost, device: str, options: RunnerOptions) -> Runner:
        """Everything that can be decided on a machine without the device."""
        runner = cls(files, host, host.backend_for_explain(device), options)
        runner._bind(assumed=True)
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
        """Open the device, bind, check the kernels, read the weights, build the cache.

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
        runner.ranks = ranks
        try:
            runner._open(progress)
        except BaseException:
            if ranks is not None and not ranks.weight_bytes:
                ranks.fail()
            raise
        return runner

    def _open(self, progress: Callable[[int, int], None] | None) -> None:
        with self._spending("open"):
            self.state = self.host.open(self.backend)
        self.host.emit(Event("device.opened", {"device": self.backend.name, "name": self.state.name}))
        self._prepare()
        if self.options.draft is not None and (self.ranks is None or self.ranks.rank == 0):  # who drafts, does it alone
            self.draft = self._bind_draft(self.options.draft)
        self._load(progress)
        if self.draft is not None:
            self.draft._load(None)
        with self._spending("cache"):
            self._build_cache()

    @contextlib.contextmanager
    def _spending(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.spent_s[phase] = time.perf_counter() - begun

    def _prepare(self) -> None:
        """Bind, and check the kernels; nothing is read."""
        with self._spending("bind"):
            self._bind(assumed=False)
        with self._spending("canary"):
            self._canary()
        self._warn()
        self.host.emit(Event("plan.bound", {"device": self.backend.name, "model": self.files.name}))

    def _load(self, progress: Callable[[int, int], None] | None) -> None:
        """Read the weights, and link."""
        with self._spending("load"), contextlib.ExitStack() as opened:
            source: DummySource | SafetensorsFolder | WithEagle = DummySource()
            if self.options.load_format != "dummy":
                source = self.files.source()
                if self.options.eagle is not None:
                    source = WithEagle(source, self.options.eagle.source())
                opened.enter_context(contextlib.closing(source))
            self.loaded = load(
                self.plan,
                source if isinstance(source, DummySource) else self.view(source),
                self.backend.torch_device_indexed,
                readers=self._readers(),
                progress=progress,
                ignore=self.ignored,
            )
        self._warn_loaded()
        with self._spending("link"):
            self.steps = link(self.plan, self.loaded.packed)

    def _bind_draft(self, draft: Draft) -> Runner:
        """The draft model's runner, bound to the same device; one clear error when it cannot draft for this model."""
        blocks = next(iter(self.plan.layouts.values())).block_tokens
        limit = draft.files.config.get("max_position_embeddings")
        if limit and limit < self.max_model_len:
            raise UsageError(
                f"Draft model {draft.files.name} has {limit} positions, {self.files.name} is to run with "
                f"{self.max_model_len}.",
                remedy=f"pass max_model_len={limit}, or another draft model",
            )
        options = replace(draft.options, max_model_len=self.max_model_len, block_tokens=blocks)
        runner = Runner(draft.files, self.host, self.backend, options)
        runner.state = self.state
        runner._prepare()
        mine, theirs = self.model.vocab, runner.model.vocab
        if mine != theirs:
            raise UsageError(
                f"Draft model {draft.files.name} has a vocabulary of {theirs} tokens, {self.files.name} one of {mine}.",
                remedy="use a draft model with the same tokenizer",
            )
        return runner

    # -- binding

    def offer(self, request: KVRequest) -> Sequence[KVLayout]:
        """Layouts for one kind of layer, in the KV dtype that was asked for."""
        return offered(self.backend, request, self.dtype, self.options, self.files.name)

    def _bind(self, *, assumed: bool) -> None:
        names = None if self.options.load_format == "dummy" or not self.files.has_weights else set(self.files.names())
        scheme, config = self.options.quantization, self.files.config
        settings = self._settings(assumed)
        if scheme is None:
            found = read_quant_config(config.get("quantization_config"), names)
        else:
            request = latent_request(config)
            layouts = [x.name for x in self.offer(request)] if request is not None else []
            found = quantize_on_load(scheme, config, latent_formats(self.kernels, settings, layouts, self.options.ops))
        self.readers, self.view = {**READERS, **found.readers}, found.view
        placement = Placement() if self.ranks is None else self.ranks.placement
        rows = formats_read_by_row(self.kernels, settings) if self.ranks is None else frozenset()
        unread, length = list(found.unread), self.max_model_len
        plans = Build(
            config, placement, found.format_of, length, self.options.mtp, unread, found.activation_quants, rows
        )
        self.model: CausalLM = build(plans, self.host.models())
        self.ignored = plans.ignored
        if (head := self.options.eagle) is not None:
            names = set(head.names()) if head.has_weights else None
            self.model, more = with_eagle(self.model, head.config, names, self.max_model_len)
            self.ignored = [*self.ignored, *more]
        if self.options.mtp and not self.model.mtp:
            raise UsageError(
                f"mtp (of mtp=True or speculate_method='mtp'): {self.files.name} has no multi-token-prediction layers.",
                remedy="leave it out, or load a checkpoint whose config has num_nextn_predict_layers",
            )
        self._bind_again(assumed=assumed)

    def _settings(self, assumed: bool) -> PlanSettings:
        arch = self.options.arch or next(iter(self.backend.architectures), "")
        features = self.backend.features(self.options.arch)
        if self.state is not None and self.options.arch is None:
            arch, features = self.state.arch, self.state.features
        deterministic, copies = self.options.deterministic, self.options.copies
        return PlanSettings(self.backend.name, self.dtype, arch, features, deterministic, copies, assumed)

    def _bind_again(self, *, assumed: bool) -> None:
        choices = read_lock(self.options.lock, self.fingerprint()) if self.options.lock else {}
        self.plan: Plan = bind(
            self.model,
            self.kernels,
            self._settings(assumed),
            self.offer,
            options=Options(self.options.ops, choices, self.demoted),
            strict=self.options.strict,
        )

    def fingerprint(self) -> dict[str, str]:
        """What a lock file must agree with: device, architecture, torch."""
        return {
            "device": self.backend.name,
            "arch": self.state.arch if self.state else "",
            "name": self.state.name if self.state else "",
            "torch": torch.__version__,
        }

    def _canary(self) -> None:
        """Check the chosen kernels; demote those that are wrong, and bind again, until all that is chosen is right."""
        checked: set[int] = set()
        while True:
            verdicts = [*run_canary(self.plan, self.backend.torch_device_indexed, self.offer, checked)]
            self.verdicts += verdicts
            checked |= {id(v.kernel) for v in verdicts}
            for v in verdicts:
                if v.outcome is None:
                    warn(f"{self._described(v.kernel)} could not be checked: it serves none of its op's samples.")
            failed = [v for v in verdicts if v.failed]
            if not failed:
                return
            for v in failed:
                self.demoted[v.kernel] = v.reason
                warn(f"{self._described(v.kernel)} gives wrong results and is not used: {v.reason}.")
                self.host.emit(
                    Event("canary.demoted", {"kernel": v.kernel.name, "op": v.kernel.op, "reason": v.reason})
                )
            self._bind_again(assumed=False)

    def _described(self, kernel: Kernel) -> str:
        """A kernel with whom it comes from."""
        origin = self.host.origin(kernel, self.backend)
        return f"Kernel {kernel.name} for op {kernel.op!r} on device {self.backend.name!r} (from {origin})"

    def _warn(self) -> None:
        if left := self.plan.hot_references():
            ops = sorted({op for _, _, op in left})
            warn(
                f"On device {self.backend.name!r} {len(left)} hot op(s) run on their slow reference: {', '.join(ops)}. "
                "See explain for the reasons; strict=True refuses such a plan."
            )

    def _warn_loaded(self) -> None:
        told = explain_no_savings(self.plan, self.options.quantization)
        for what in (*told, *self.files.complaints(), *self.loaded.complaints(self.files.name)):
            warn(what)

    def _readers(self) -> dict[str, Any]:
        from inferplane.models.registry import resolve

        return {**{name: resolve(target) for name, target in self.host.quantization().items()}, **self.readers}

    # -- cache

    def _kv_requests(self) -> list[KVRequest]:
        """What each layer remembers: the model's own, then those that draft."""
        return [layer.kv_requests()[0] for layer in (*self.model.layers, *self.model.mtp)]

    @property
    def window(self) -> int | None:
        """The most last tokens that any layer attends to, those that draft included; None: all."""
        requests = self._kv_requests() + (self.draft._kv_requests() if self.draft is not None else [])
        return None if any(r.window is None for r in requests) else max(r.window or 0 for r in requests)

    def block_bytes(self, *, windowed: bool = False) -> int:
        """Bytes of one block of the cache, all layers together, or those with a window."""
        requests = [r for r in self._kv_requests() if r.window is not None or not windowed]
        return sum(self.plan.layouts[r].bytes_per_block(r, self.dtype) for r in requests)

    def _build_cache(self) -> None:
        """The cache, and the draft model's: as many blocks as the budget holds of both together."""
        block_tokens = next(iter(self.plan.layouts.values())).block_tokens
        block_bytes = self.block_bytes() + (self.draft.block_bytes() if self.draft is not None else 0)
        budget = self.options.kv_cache_bytes
        if budget is None:
            budget = int(self.backend.memory().free_bytes * KV_SHARE)
        blocks = min(budget // block_bytes, math.ceil(self.max_model_len / block_tokens) * self.options.max_batch)
        if self.ranks is not None:
            blocks = self.ranks.agree(blocks, self._facts(), self.loaded.nbytes)
        room = Room(blocks, block_tokens, block_bytes, budget, self.window)
        allowed, asked = self.max_model_len, self.options.max_model_len is not None
        self.max_model_len = room.longest(allowed, asked=asked, told=self.options.kv_cache_bytes is not None)
        self.cut = self.max_model_len < allowed
        for runner in filter(None, (self, self.draft)):
            requests, limit = runner._kv_requests(), runner.max_model_len
            runner.cache = self.backend.build_kv_cache(requests, runner.plan.layouts, blocks, runner.dtype)
            sizes = sizes_for(runner.plan, runner.options, limit, self.backend.memory().free_bytes)
            off = why_not(runner.plan, runner.options)
            runner.decode = DecodeSteps(self.backend, runner._step, runner.cache, limit, sizes, off)

    def _facts(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        o, layouts = self.options, sorted((repr(r), x.name) for r, x in self.plan.layouts.items())
        entries = sorted(map(repr, self.files.config.items()))
        limits = o.max_batch, self.max_model_len
        return entries, str(self.dtype), o.quantization, o.load_format, limits, self.backend.name, layouts

    def close(self) -> None:
        """Let go of weights and cache, the draft model's too; ranks that follow end."""
        if self.ranks is not None:
            self.ranks.close()
        self.steps, self.cache, self.decode, self.cycles = {}, None, None, None
        self.loaded.packed.clear()
        if self.draft is not None:
            self.draft.close()

    # -- steps

    def run(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """One step: logits float32 `[R, V]` of the rows that want them, and hidden states `[T, D]`."""
        if not torch.is_inference_mode_enabled():  # as it is within the engine's steps
            with torch.inference_mode():
                return self.run(batch)
        step = self._step if self.decode is None else self.decode
        if self.ranks is None:
            return step(batch)
        assert self.cache is not None
        with self.ranks.step(batch, self.cache.block_tokens):
            return step(batch)

    def _step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return cast(tuple[torch.Tensor, torch.Tensor], self.steps[batch.kind](batch, self.cache))

    def follow(self) -> None:
        """Run the steps that rank 0 runs, until it closes the model."""
        assert self.ranks is not None and self.cache is not None
        for queries in self.ranks.steps():
            batch = make_batch(queries, block_tokens=self.cache.block_tokens, device=self.backend.torch_device_indexed)
            with torch.inference_mode():
                self.steps[batch.kind](batch, self.cache)

    @property
    def sample(self) -> Callable[..., torch.Tensor]:
        """The bound op that turns logits into tokens."""
        return cast(Callable[..., torch.Tensor], view_of(self.steps["decode"]).sample)
