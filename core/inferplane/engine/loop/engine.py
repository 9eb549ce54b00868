"""The loop: schedule, run, sample or verify, commit, propose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from inferplane.engine.loop.choose_tokens import Decided, decide, parts
from inferplane.engine.loop.metrics import Metrics
from inferplane.engine.request.arguments import check_ids
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.results import FinishReason, TokenLogprob
from inferplane.engine.request.state import Request
from inferplane.engine.request.text import Detokenizer
from inferplane.engine.runner.model_runner import Runner
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.schedule.scheduler import Limits, Scheduled, Scheduler
from inferplane.engine.speculate import Ran, SpeculativeConfig, Speculator
from inferplane.errors import CapacityError, EngineError, UsageError, warn
from inferplane.kvcache import BlockAllocator, root_hash
from inferplane.types import HOST, KVCache, ModelOutput
from inferplane.types.batch import Query, make_batch

DEFAULT_STEP_TOKENS = 2048


class Engine:
    """Runs requests to their end, step by step, in the caller's thread.

    Every accepted request ends exactly once, with one of the reasons of `FinishReason`; a request that fails ends
    alone. Between steps `free + cached + used` blocks are all blocks.

    Args:
        runner: the bound model and its cache.
        max_batch: sequences in a step.
        max_step_tokens: tokens in a step; longer prompts are cut into chunks.
        max_new_sequences: sequences that may join in one step.
        max_waiting: requests that may wait; None: any number.
        prefix_cache: reuse blocks of equal prefixes.
        speculative: draft and verify several tokens a step; None: one token a step.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_batch: int,
        max_step_tokens: int = DEFAULT_STEP_TOKENS,
        max_new_sequences: int = 64,
        max_waiting: int | None = None,
        prefix_cache: bool = True,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        assert runner.cache is not None, "the runner was not opened"
        self.runner, self.cache = runner, runner.cache
        self.device = runner.backend.torch_device_indexed
        self.vocab = runner.model.vocab
        self.allocator = BlockAllocator(self.cache.blocks)
        limits = Limits(max_batch, max_step_tokens, runner.max_model_len, max_new_sequences, max_waiting, runner.cut)
        facts = (runner.files.name, str(runner.dtype), runner.options.kv_dtype, str(runner.options.quantization))
        root: Callable[[str], bytes] | None = (lambda tenant: root_hash(*facts, tenant)) if prefix_cache else None
        lookahead = 1 if speculative is not None and speculative.keys_next_token else 0
        self.scheduler = Scheduler(self.allocator, self.cache.block_tokens, limits, root, lookahead, runner.window)
        self.sampler = Sampler(runner.sample, self.vocab, self.device)
        self.speculator = Speculator(speculative, runner, self.scheduler) if speculative is not None else None
        self.metrics = Metrics()
        self.closed = False
        self._probe = torch.zeros(1, device=self.device)  # now: a device that is full is not a lost one
        self._ids = count()
        self._commit_s = 0.0

    # -- requests

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        end_ids: frozenset[int],
        text: Detokenizer | None = None,
        **more: Any,
    ) -> Request:
        """Queue a prompt.

        Args:
            prompt: token ids.
            params: how to sample, and when to stop.
            end_ids: tokens that end the text.
            text: told every generated token that is part of the text; it knows the stop strings.
            more: other fields of `Request`: request_id, constraint, seed, priority, tenant.

        Raises:
            UsageError: it is empty, or a token id lies outside the vocabulary; the engine is closed.
            CapacityError: it could never run, or too many requests wait.
        """
        try:
            self.check(prompt)
            params.check_ids(self.vocab)
            own: Any = params.stop_token_ids  # a tuple, whatever was passed
            ends = (frozenset() if params.ignore_eos else end_ids) | frozenset(own)
            more.setdefault("request_id", next(self._ids))
            request = Request(prompt=list(prompt), params=params, end_ids=ends, text=text, **more)
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
        """End a request and take back its blocks; a request that has ended stays as it is."""
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
        """End all requests and let go of the cache; nothing can be added any more."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.end(request, "abort")
        self.closed = True
        self.speculator = None  # it holds the prediction layer and its cache
        self.cache = KVCache((), self.cache.blocks, self.cache.block_tokens)

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    # -- one step

    def step(self) -> list[Request]:
        """One step; returns the requests that got tokens or ended in it.

        What an interrupt leaves half done is done again by the next step: until its token is accepted a sequence stands
        where it stood, and writing the same cache entries twice changes nothing. Only the sequence whose tokens were
        just being accepted cannot go on; it ends with "abort".
        """
        begun, self._commit_s = time.monotonic(), 0.0
        touched = self._expire(begun)
        chosen = self.scheduler.schedule()
        if not chosen:
            assert not self.busy, "nothing runs, and what waits does not fit: blocks were lost"
            return touched
        for s in chosen:
            if s.request.started is None:
                s.request.started = begun
                self.metrics.observe("request_queue_time_seconds", begun - s.request.arrived)
        scheduled = time.monotonic()
        touched += self._step(chosen)
        ended = time.monotonic()
        self.metrics.observe("schedule_commit_time_seconds", scheduled - begun + self._commit_s)
        self.metrics.observe("step_time_seconds", ended - begun)
        self.metrics.counters["steps_total"] += 1
        return touched

    def _expire(self, now: float) -> list[Request]:
        alive = (*self.scheduler.running, *self.scheduler.waiting)
        late = [r for r in alive if r.deadline is not None and r.deadline <= now]
        for request in late:
            self.end(request, "timeout")
        return late

    def _step(self, chosen: list[Scheduled]) -> list[Request]:
        try:
            return self._run(chosen)
        except Exception as error:
            if len(chosen) == 1:
                self.end(chosen[0].request, "error", f"{type(error).__name__}: {error}")
                self._check_alive()
                return [chosen[0].request]
        finally:
            for s in chosen:
                self.scheduler.let_go(s.request)
        # One of them is to blame: each runs alone, and only those that fail again end. Sequences stand where they
        # stood, since a step changes them only after everything that can fail.
        touched = []
        for s in chosen:
            if s.request.finish_reason is None and s.request in self.scheduler.running:
                touched += self._step([s])
        return touched

    def _check_alive(self) -> None:
        """After a step failed: raise EngineError if every other one would fail too, whatever it is asked for."""
        ranks = self.runner.ranks
        if ranks is not None and ranks.broken:
            raise EngineError(f"The ranks are at odds: {ranks.broken}.", remedy="start the model anew")
        try:
            self._probe.zero_().item()
        except Exception as error:  # a device that was lost, or whose context holds an error for good
            raise EngineError(
                f"The device does not answer any more: {type(error).__name__}: {error}.", remedy="start the model anew"
            ) from error

    def _run(self, chosen: list[Scheduled]) -> list[Request]:
        self.metrics.counters["forward_rows_total"] += sum(s.rows for s in chosen)
        cycled = self.speculator.run(chosen) if self.speculator is not None else None
        if cycled is None:
            queries = self.scheduler.queries(chosen)
            batch = make_batch(queries, block_tokens=self.cache.block_tokens, device=self.device)
            with torch.inference_mode():
                output = self.runner.run(batch)
                hidden = output[1]
                tokens, scores, prompts = self._decide(chosen, queries, output)
                pooled = parts(chosen, hidden)
        else:  # of sequences that ask for tokens alone
            nothing: list[list[Any]] = [[] for _ in chosen]
            tokens, scores, prompts, pooled = cycled.tokens, nothing, nothing, [s.request.pooled for s in chosen]
        decided = time.monotonic()
        ran, touched, row = [], [], 0
        for s, new, scored, prompt_scores, vector in zip(chosen, tokens, scores, prompts, pooled):
            r, first, stood = s.request, s.request.computed, max(0, len(new) - 1)
            blocks = r.blocks
            if prompt_scores and r.prompt_logprobs is not None:
                r.prompt_logprobs[first + 1 : first + 1 + len(prompt_scores)] = prompt_scores
            r.pooled, before, accepted = vector, len(r.generated), 0
            try:
                reason = self._accept(s, new, scored)
                accepted = max(0, len(r.generated) - before - 1)
                self.scheduler.commit(s, accepted)
                if reason is not None:
                    self.end(r, reason)
            except Exception as error:  # its text or its constraint: nobody else's business
                self.end(r, "error", f"{type(error).__name__}: {error}")
            except BaseException:  # half of its tokens are accepted, or its text lacks one
                self.end(r, "abort", "interrupted")
                raise
            if s.drafts:
                self.metrics.drafted(len(s.drafts), stood)
            ran.append(Ran(r, first, row, s.count + accepted, len(s.drafts), stood, blocks))
            row += s.rows
            if new:
                touched.append(r)
        self._commit_s += time.monotonic() - decided
        if cycled is None:
            self._propose(ran, hidden)
        elif self.speculator is not None:
            self.speculator.take(ran, cycled.drafts)
        return touched

    def _propose(self, ran: list[Ran], hidden: torch.Tensor) -> None:
        """Drafts for the next step. The tokens are accepted already, so a failure costs the drafts and nothing else."""
        if self.speculator is None:
            return
        try:
            self.speculator.propose(ran, hidden)
        except Exception as error:
            if not self.metrics.counters["spec_decode_failures_total"]:
                warn(f"Drafting failed ({type(error).__name__}: {error}); going on without.")
            self.metrics.counters["spec_decode_failures_total"] += 1

    def _decide(
        self, chosen: list[Scheduled], queries: list[Query], output: tuple[torch.Tensor, torch.Tensor]
    ) -> Decided:
        config = self.speculator.config if self.speculator is not None else None
        argmax = output.argmax if isinstance(output, ModelOutput) else None
        return decide(chosen, queries, output[0], self.sampler, config, argmax)

    def _accept(self, s: Scheduled, new: list[int], scored: list[TokenLogprob]) -> FinishReason | None:
        """Append a sequence's new tokens up to its end; why it ends, None while it goes on."""
        request, now = s.request, time.monotonic()
        for i, token in enumerate(new):
            request.generated.append(token)
            self.metrics.counters["generation_tokens_total"] += 1
            if request.logprobs is not None:
                request.logprobs.append(scored[i])
            if request.history is not None:
                request.history.extend([token])
            if request.constraint is not None:
                request.constraint.accept([token])
            self._time(request, now)
            ended = token in request.end_ids or (request.constraint is not None and request.constraint.ended)
            if ended or (request.text is not None and request.text.push([token])):
                return "stop"
            if len(request.generated) >= request.params.max_tokens:
                return "length"
        return None

    def _time(self, request: Request, now: float) -> None:
        if request.first_token is None:
            request.first_token = now
            self.metrics.observe("time_to_first_token_seconds", now - request.arrived)
        elif request.last_token is not None:
            self.metrics.observe("inter_token_latency_seconds", now - request.last_token)
        request.last_token = now

    # -- numbers

    def stats(self) -> dict[str, Any]:
        """Counters, gauges and histograms (`inferplane.engine.loop.metrics`), JSON-ready."""
        s, a = self.scheduler, self.allocator
        return self.metrics.snapshot(
            num_requests_running=len(s.running),
            num_requests_waiting=len(s.waiting),
            kv_cache_usage_perc=a.used / a.total,
            kv_blocks_total=a.total,
            kv_blocks_free=a.free,
            kv_blocks_cached=a.cached,
            num_preemptions_total=s.preemptions,
            prefix_cache_queries_total=s.prefix_queries_tokens,
            prefix_cache_hits_total=s.prefix_hits_tokens,
        )

    # -- without sampling

    @contextmanager
    def _blocks(self, tokens: int) -> Iterator[list[int]]:
        blocks = self.allocator.allocate(self.scheduler.blocks_for(tokens))
        try:
            yield blocks
        finally:
            self.allocator.release(blocks)

    def logits(self, prompt: Sequence[int], chunk_tokens: int | None = None) -> torch.Tensor:
        """Logits after every token of a prompt: float32 `[tokens, vocab]` on the host.

        Args:
            prompt: token ids.
            chunk_tokens: tokens a step; None takes the engine's.

        Raises:
            UsageError, CapacityError: as for `add`.
        """
        self.check(prompt)
        if chunk_tokens is not None and chunk_tokens < 1:
            raise UsageError(f"chunk_tokens = {chunk_tokens}.", there_is="values of 1 and more")
        if len(prompt) > self.scheduler.limits.max_model_len:
            raise CapacityError(
                f"A prompt of {len(prompt)} tokens exceeds the {'cache' if self.scheduler.limits.cut else 'model'}'s "
                f"{self.scheduler.limits.max_model_len}.",
                remedy=f"shorten it, or {self.scheduler.limits.longer}",
            )
        step = chunk_tokens or self.scheduler.limits.max_step_tokens
        out = []
        with self._blocks(len(prompt)) as blocks:
            for start in range(0, len(prompt), step):
                ids = list(prompt[start : start + step])
                have = blocks[: self.scheduler.blocks_for(start + len(ids))]
                batch = make_batch([Query(ids, start, have)], block_tokens=self.cache.block_tokens, device=self.device)
                out.append(self.runner.run(batch)[0].to(HOST))
        return torch.cat(out)
