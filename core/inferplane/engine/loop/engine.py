"""`Engine`: the loop of steps. Each step schedules, runs, chooses tokens, commits and proposes drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from inferplane.engine.loop.accept_tokens import accept_tokens
from inferplane.engine.loop.choose_tokens import ChosenTokens, choose_tokens, with_pooled
from inferplane.engine.loop.metrics import Metrics
from inferplane.engine.loop.overlap import Overlap
from inferplane.engine.loop.why_waited import why_not_overlapped
from inferplane.engine.request.arguments import check_ids
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.results import FinishReason
from inferplane.engine.request.state import Request
from inferplane.engine.request.text import Detokenizer
from inferplane.engine.runner.model_runner import Runner
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.schedule.insertion import UNLIMITED, Insertion, StepWork
from inferplane.engine.schedule.scheduler import Limits, ScheduledChunk, Scheduler, count_work
from inferplane.engine.speculate import SpeculativeConfig, Speculator, VerifiedChunk
from inferplane.errors import CapacityError, EngineError, UsageError, in_words, warn
from inferplane.kvcache import BlockPools, StatePool, root_hash
from inferplane.types import KVCache, ModelOutput
from inferplane.types.batch import make_batch


class Engine:
    """Runs requests to their end, step by step, in the caller's thread.

    Every accepted request ends exactly once, with one of the reasons of `FinishReason`; a request that fails ends
    alone. Between steps `free + cached + used` blocks are all blocks.

    Args:
        runner: the bound model and its cache.
        max_num_seqs: maximum number of sequences in a step.
        max_num_batched_tokens: maximum number of tokens in a step; longer prompts are split into chunks.
        max_waiting: maximum number of waiting requests; None: unlimited.
        enable_prefix_caching: reuse blocks of equal prefixes, and the states of layers that keep any.
        speculative_config: draft and verify several tokens per step; None: one token per step.
        insertion: how prompts join what runs.
        async_scheduling: launch the next step while one runs: "on", "off", or "auto", as the device runs.

    Attributes: `overlap`, the steps in flight; None: each is waited for; `work` of the last step, its number of
    sequences, and its seconds; None: those of the call.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int = 2048,
        max_waiting: int | None = None,
        enable_prefix_caching: bool = True,
        speculative_config: SpeculativeConfig | None = None,
        insertion: Insertion = UNLIMITED,
        async_scheduling: str = "off",
    ) -> None:
        self.runner = runner
        self.device, self.vocab = runner.backend.torch_device_indexed, runner.model.vocab
        self.limits = Limits(max_num_seqs, max_num_batched_tokens, runner.max_model_len, max_waiting, False, insertion)
        facts = (runner.files.name, str(runner.dtype), runner.options.kv_cache_dtype, str(runner.options.quantization))
        caching = enable_prefix_caching
        self.root: Callable[[str], bytes] | None = (lambda tenant: root_hash(*facts, tenant)) if caching else None
        self.speculator: Speculator | None = None
        self.start(speculative_config)
        self.metrics = Metrics()
        self.closed = False
        # Allocated now, so that an out-of-memory device is not mistaken for a dead one.
        self._probe = torch.zeros(1, device=self.device)
        self._ids = count()
        self._host_s = 0.0
        self.work: tuple[StepWork, int, float | None] | None = None
        why_not = why_not_overlapped(runner.backend, async_scheduling)
        self.overlap = None if why_not else Overlap(self)
        self.why_not_overlapped = why_not

    def start(self, config: SpeculativeConfig | None) -> None:
        """Begin with an empty cache, that of the runner, and with a method of speculation; no request runs or waits."""
        runner, cache, tables = self.runner, self.runner.cache, self.runner.tables
        assert cache is not None, "the runner was not opened"
        self.cache, self.pools = cache, BlockPools.of(cache.list_pools(), tables.list_pools())
        self.limits = replace(self.limits, max_model_len=runner.max_model_len, limited_by_cache=runner.limited_by_cache)
        lookahead, states = int(config is not None and config.hash_covers_next_token), StatePool.of(cache)
        self.scheduler = Scheduler(
            self.pools, cache.block_tokens, self.limits, self.root, lookahead, tables.windows, states
        )
        self.sampler = Sampler(runner.sample, self.vocab, self.device)
        self.speculator = Speculator(config, runner, self.scheduler) if config is not None else None

    # -- requests

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        end_ids: frozenset[int],
        text: Detokenizer | None = None,
        **more: Any,
    ) -> Request:
        """Queue a prompt; returns its live request, which later steps run and change.

        Args:
            prompt: token ids.
            params: how to sample, and when to stop.
            end_ids: tokens that end the text.
            text: decodes the generated tokens that are part of the text; it knows the stop strings. None: no text.
            more: other fields of `Request`: request_id, constraint, seed, priority, tenant.

        Raises:
            UsageError: it is empty, or a token id lies outside the vocabulary; the engine is closed.
            CapacityError: it could never run, or too many requests wait.
        """
        try:
            self.check(prompt)
            _check_params(self, params)
            own: Any = params.stop_token_ids  # a tuple, whatever was passed
            stop_ids = (frozenset() if params.ignore_eos else end_ids) | frozenset(own)
            more.setdefault("request_id", next(self._ids))
            request = Request(prompt=list(prompt), params=params, end_ids=stop_ids, text=text, **more)
            self.scheduler.add(request)
        except (UsageError, CapacityError) as error:
            self.metrics.rejected[type(error).__name__] += 1
            raise
        self.metrics.counters["requests_accepted_total"] += 1
        self.metrics.counters["prompt_tokens_total"] += len(request.prompt)
        return request

    def check(self, prompt: Sequence[int]) -> None:
        """Raise UsageError for an empty prompt or token ids outside the vocabulary, or when the engine is closed."""
        if self.closed:
            raise UsageError("The model is closed: its weights and its cache are freed.", remedy="make a new LLM")
        check_ids(prompt, self.vocab)

    def end(self, request: Request, reason: FinishReason, error: str = "") -> None:
        """End a request with a reason, and release its blocks; a request that has ended before does not change."""
        if request.finish_reason is not None:
            return
        request.finish_reason, request.error = reason, error
        request.ended = time.monotonic()
        self.scheduler.remove(request)
        if self.speculator is not None:
            self.speculator.forget(request)
        self.metrics.finished[reason] += 1
        self.metrics.observe("e2e_request_latency_seconds", request.ended - request.arrived)

    def close(self) -> None:
        """End all requests with "abort", release the cache and the draft layer; `add` then raises UsageError."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.end(request, "abort")
        self.settle()
        self.closed = True
        self.speculator = None  # it holds the draft layer and its cache
        self.cache = KVCache((), self.cache.blocks, self.cache.block_tokens)

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs, or a step is in flight."""
        return bool(self.scheduler.waiting or self.scheduler.running or self.scheduler.in_flight.steps)

    def settle(self) -> None:
        """Wait for the steps in flight once every request has ended; before, do nothing. Their results are dropped."""
        if self.overlap is not None and not self.scheduler.running and not self.scheduler.waiting:
            self.overlap.drop()

    # -- one step

    def step(self) -> list[Request]:
        """Run one step and wait for the device; returns the requests that got tokens or ended in it. With `overlap` the
        next step is in flight when this returns.

        The next step repeats what an interrupt leaves unfinished: a sequence does not change until its token is
        accepted, and writing the same cache entries twice has no effect. Only the sequence whose tokens are being
        accepted at that moment cannot go on; it ends with "abort". EngineError: the device or a rank is lost for good.
        """
        begun, self._host_s = time.monotonic(), 0.0
        touched, made = self._expire(begun), self.metrics.counters["generation_tokens_total"]
        if self.overlap is not None:
            self.work = None
            found = self.overlap.step()
        else:
            chunks = self.schedule()
            self.work = (count_work(chunks), len(chunks), None) if _observes_times(self) else None
            found = self.run_chunks(chunks) if chunks else None
        if found is None:
            return touched
        seconds = time.monotonic() - begun
        if self.work is not None:
            work, sequences, measured = self.work
            seconds = seconds if measured is None else measured
            _observe_times(self, work, sequences, made, seconds)
        self.metrics.observe("schedule_commit_time_seconds", self._host_s)
        self.metrics.observe("step_time_seconds", seconds)
        self.metrics.counters["steps_total"] += 1
        return touched + found

    def schedule(self) -> list[ScheduledChunk]:
        """The chunks of the next step; empty if there is none."""
        begun = time.monotonic()
        chunks = self.scheduler.schedule()
        assert chunks or self.scheduler.in_flight.steps or not self.busy, (
            "nothing runs, and what waits does not fit: blocks were lost"
        )
        for c in chunks:
            if c.request.started is None:
                c.request.started = begun
                self.metrics.observe("request_queue_time_seconds", begun - c.request.arrived)
        self._host_s += time.monotonic() - begun
        return chunks

    def _expire(self, now: float) -> list[Request]:
        """End the requests whose deadline is over with "timeout"; returns them."""
        alive = (*self.scheduler.running, *self.scheduler.waiting)
        late = [r for r in alive if r.deadline is not None and r.deadline <= now]
        for request in late:
            self.end(request, "timeout")
        return late

    def run_chunks(self, chunks: list[ScheduledChunk]) -> list[Request]:
        """Run chunks as one step, or each alone if that fails; a sequence that fails alone ends with "error"."""
        try:
            return self._run(chunks)
        except Exception as error:
            if len(chunks) == 1:
                return self.fail(chunks[0].request, error)
        finally:
            for c in chunks:
                self.scheduler.release_out_of_window(c.request)
        return self.run_each_alone(chunks)

    def run_each_alone(self, chunks: list[ScheduledChunk]) -> list[Request]:
        """After a step failed, which one sequence caused: each runs alone, and only those that fail again end. None has
        changed yet, since a step changes them only after everything that can fail.
        """
        touched = []
        for c in chunks:
            if c.request.finish_reason is None and c.request in self.scheduler.running:
                touched += self.run_chunks([c])
        return touched

    def fail(self, request: Request, error: Exception) -> list[Request]:
        """End a request whose step failed though it ran alone; EngineError if every other step would fail too."""
        self.end(request, "error", request.record_error(error))
        check_alive(self.runner, self._probe)
        return [request]

    def _run(self, chunks: list[ScheduledChunk]) -> list[Request]:
        """Run chunks, choose and accept their tokens, draft for the next step; returns requests with new tokens."""
        self.metrics.counters["forward_rows_total"] += sum(c.rows for c in chunks)
        drafted = self.speculator.run(chunks) if self.speculator is not None else None
        if drafted is None:
            queries = self.scheduler.queries(chunks)
            batch = make_batch(queries, block_tokens=self.cache.block_tokens, device=self.device)
            with torch.inference_mode():
                output = self.runner.run(batch)
                config = self.speculator.config if self.speculator is not None else None
                argmax = output.argmax if isinstance(output, ModelOutput) else None
                hidden = output[1]
                chosen = choose_tokens(chunks, queries, output[0], self.sampler, config, argmax)
                chosen = with_pooled(chunks, chosen, hidden)
        else:  # of sequences that need nothing but tokens
            chosen = [ChosenTokens(tokens) for tokens in drafted.tokens]
        decided = time.monotonic()
        verified: list[VerifiedChunk] = []
        row = 0
        for chunk, new in zip(chunks, chosen):
            verified.append(self.commit(chunk, new, row))
            row += chunk.rows
        self._host_s += time.monotonic() - decided
        if drafted is None:
            self.propose(verified, hidden)
        elif self.speculator is not None:
            self.speculator.set_drafts(verified, drafted.drafts)
        return [c.request for c, new in zip(chunks, chosen) if new.tokens]

    def commit(self, chunk: ScheduledChunk, chosen: ChosenTokens, row: int, sent: int | None = None) -> VerifiedChunk:
        """Accept a sequence's new tokens, and end it if they end it; `row` is its first row in the step. `sent`: of a
        step in flight, which is recorded already, the number of the sequence's tokens before it.
        """
        r, blocks = chunk.request, chunk.request.blocks
        first = r.computed if sent is None else sent
        num_drafts, verified = len(chunk.drafts), max(0, len(chosen.tokens) - 1)
        if chosen.prompt_logprobs and r.prompt_logprobs is not None:
            r.prompt_logprobs[first + 1 : first + 1 + len(chosen.prompt_logprobs)] = chosen.prompt_logprobs
        if chosen.pooled is not None:
            r.pooled = chosen.pooled
        before, accepted = len(r.generated), 0
        try:
            reason = accept_tokens(r, chosen, self.metrics)
            accepted = max(0, len(r.generated) - before - 1)
            if sent is None:
                self.scheduler.commit(chunk, accepted)
            else:
                r.computed += accepted
                self.scheduler.publish(r, first, first + chunk.count + accepted)
            if reason is not None:
                self.end(r, reason)
        except Exception as error:  # its text or its constraint failed, which concerns no other sequence
            self.end(r, "error", r.record_error(error))
        except BaseException:  # some of its tokens are accepted and others not, or its text lacks one
            self.end(r, "abort", "interrupted")
            raise
        if num_drafts:
            self.metrics.count_drafts(num_drafts, verified)
        return VerifiedChunk(r, first, row, chunk.count + accepted, num_drafts, verified, blocks)

    def propose(self, verified: list[VerifiedChunk], hidden: torch.Tensor) -> None:
        """Draft for the next step. The tokens are accepted already, so a failure loses nothing but the drafts."""
        if self.speculator is None:
            return
        try:
            self.speculator.propose(verified, hidden)
        except Exception as error:
            if not self.metrics.counters["spec_decode_failures_total"]:
                warn(f"Drafting failed ({in_words(error)}); going on without.")
            self.metrics.counters["spec_decode_failures_total"] += 1

    # -- numbers

    def stats(self) -> dict[str, Any]:
        """Counters, gauges and histograms as of now (`inferplane.engine.loop.metrics`), JSON-ready."""
        return self.metrics.snapshot(**_list_gauges(self))


def _list_gauges(engine: Engine) -> dict[str, float]:
    """What is measured as of now, by name."""
    s, a = engine.scheduler, engine.pools
    return dict(
        num_requests_running=len(s.running),
        num_requests_waiting=len(s.waiting),
        kv_cache_usage_perc=a.usage,
        kv_blocks_total=a.total,
        kv_blocks_free=a.free,
        kv_blocks_cached=a.cached,
        num_preemptions_total=s.preemptions,
        prefix_cache_queries_total=s.prefix_queries_tokens,
        prefix_cache_hits_total=s.prefix_hits_tokens,
    )


def _observes_times(engine: Engine) -> bool:
    """Whether anything depends on how long steps take: limits of prompts, or of drafts."""
    return engine.speculator is not None or engine.scheduler.limits.insertion.max_inter_token_ms is not None


def _check_params(engine: Engine, params: SamplingParams) -> None:
    """Raise UsageError for token ids outside the vocabulary, and for an embedding that the model cannot give now."""
    params.check_ids(engine.vocab)
    if params.pooling is not None and engine.speculator is not None and engine.speculator.has_own_states:
        raise UsageError("No embeddings while an EAGLE-3 head drafts.", remedy="load the model without it")


def _observe_times(engine: Engine, work: StepWork, sequences: int, made: int, seconds: float) -> None:
    """Let what limits prompts and drafts know how long a step took; `made` counts tokens generated before it."""
    if engine.scheduler.limits.insertion.max_inter_token_ms is not None:
        engine.scheduler.times.observe(work, seconds)
    tokens = engine.metrics.counters["generation_tokens_total"] - made
    if engine.speculator is not None and tokens and not work.prompt_tokens:  # a surplus step gives none
        engine.speculator.observe_step(sequences, tokens, seconds)


def check_alive(runner: Runner, probe: torch.Tensor) -> None:
    """Called after a step failed: raise EngineError if every other step would fail too. `probe` is on the device."""
    ranks = runner.ranks
    if ranks is not None and ranks.broken:
        raise EngineError(f"The ranks are out of step: {ranks.broken}.", remedy="start the model anew")
    try:
        probe.zero_().item()
    except Exception as error:  # the device was lost, or its context holds an error for good
        raise EngineError(
            f"The device does not answer any more: {type(error).__name__}: {error}.", remedy="start the model anew"
        ) from error
