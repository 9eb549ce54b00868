"""`Speculator`: between two steps, it requests drafts from a proposer and gives them to the sequences."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from inferplane.engine.request.arguments import NETWORK_METHODS
from inferplane.engine.request.state import Request
from inferplane.engine.runner.capture import why_not_captured_together
from inferplane.engine.runner.model_runner import Runner
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.schedule.scheduler import ScheduledChunk, Scheduler
from inferplane.engine.speculate.adaptive import AdaptiveLength
from inferplane.engine.speculate.captured.captured_steps import CapturedSteps, DraftedStep
from inferplane.engine.speculate.captured.drafts_in_flight import DraftsInFlight
from inferplane.engine.speculate.captured.verify_and_draft import VerifyAndDraft
from inferplane.engine.speculate.config import SpeculativeConfig
from inferplane.engine.speculate.control import DraftControl
from inferplane.engine.speculate.network import DraftLayerProposer, DraftModelProposer
from inferplane.engine.speculate.proposer import Proposer, ProposerContext, VerifiedChunk
from inferplane.engine.speculate.registered import make_registered
from inferplane.engine.speculate.verify import needs_probabilities
from inferplane.errors import UsageError


class Speculator:
    """Requests drafts from a proposer after each step, and gives them to the sequences.

    Args:
        config: the method and its limits.
        runner: the bound model.
        scheduler: gives blocks for drafts; drafts never preempt a sequence.

    Attributes: `captured_steps`, which runs steps together with the drafting if a layer of the model drafts;
    `drafting_s`, the seconds that drafting took after the last step, 0 if they ran together; `has_own_states`, whether
    steps give the states that an EAGLE-3 head reads in place of those after the final norm.

    Raises:
        UsageError: the model lacks something that the method needs.
    """

    def __init__(self, config: SpeculativeConfig, runner: Runner, scheduler: Scheduler) -> None:
        self.config, self.scheduler = config, scheduler
        self.proposer = make_proposer(config, runner, scheduler)
        most, preserves = config.num_speculative_tokens, not needs_probabilities(config)
        control = (
            DraftControl(most, self.proposer.trial_tokens, preserves)
            if config.adaptive and config.only_if_faster
            else None
        )
        self.lengths = AdaptiveLength(most, config.adaptive, control)
        self._likely: set[int | str] = set()
        self.captured_steps: CapturedSteps | None = None
        self.drafting_s = 0.0
        self.has_own_states = isinstance(self.proposer, DraftLayerProposer) and (
            runner.model.fuse is not None or runner.model.returns_streams
        )
        if isinstance(self.proposer, DraftLayerProposer):
            assert runner.decode is not None
            sampler = Sampler(runner.sample, runner.model.vocab, runner.backend.torch_device_indexed)
            layer, block_tokens = self.proposer.layer, self.proposer.block_tokens
            function = VerifyAndDraft(runner.run_eagerly, layer, sampler, config, block_tokens)
            reason = runner.decode.disabled_reason or why_not_captured_together(runner.plan, runner.options)
            self.captured_steps = CapturedSteps(runner.decode, function, scheduler, self.lengths, reason)
            runner.captured_speculation = self.captured_steps

    def run(self, chunks: Sequence[ScheduledChunk]) -> DraftedStep | None:
        """Run a step together with its drafting as one capture; None if they have to run one by one, by the caller:
        then nothing is done. Pass the result's drafts to `set_drafts` once its tokens are accepted.
        """
        self.drafting_s = 0.0
        return None if self.captured_steps is None else self.captured_steps.run(chunks)

    def launch(self, chunks: Sequence[ScheduledChunk], before: DraftsInFlight | None) -> DraftsInFlight | None:
        """As `run`, without waiting: `CapturedSteps.launch`."""
        return None if self.captured_steps is None else self.captured_steps.launch(chunks, before)

    def observe(self, chunks: Sequence[VerifiedChunk]) -> None:
        """Record the verifications of a step behind which another one was launched, so that nothing is drafted now."""
        for c in chunks:
            if c.request.finish_reason is None:
                self.lengths.observe(c.request, c.num_drafts, c.num_accepted)

    def set_drafts(self, chunks: Sequence[VerifiedChunk], drafts: Sequence[list[int]]) -> None:
        """Give the drafts that `run` returned to the sequences that go on, and release blocks that were reserved for
        more.

        Args:
            chunks: all sequences of the step, after it.
            drafts: of the same sequences, possibly more than a sequence may use.
        """
        by_chunk = {id(c): d for c, d in zip(chunks, drafts)}
        alive = [c for c in chunks if c.request.finish_reason is None and c.request.blocks]
        for c, limit in zip(alive, self._max_drafts(alive)):
            c.request.drafts = by_chunk[id(c)][:limit]
            needed = max(c.first + 1 + c.num_drafts, c.request.computed + limit - 1)
            self.scheduler.release_beyond(c.request, needed)

    def propose(self, chunks: Sequence[VerifiedChunk], hidden: torch.Tensor) -> None:
        """Draft for the sequences that go on and decode, and set their `drafts` for the next step. `hidden` `[T, D]`
        are the hidden states of the step that `chunks` describe. For steps that were not run by `run`.
        """
        begun = time.monotonic()
        alive = [c for c in chunks if c.request.finish_reason is None and c.request.blocks]
        self.proposer.is_paused = self.lengths.is_paused
        # A sequence that failed may have fewer tokens than rows, and none of its blocks was published.
        ended = [c for c in chunks if c.request.finish_reason in ("stop", "length")]
        if ended:
            self.proposer.complete(ended, hidden)
        for c, drafts in zip(alive, self.proposer.propose(alive, self._max_drafts(alive), hidden)):
            self._note(c.request, drafts)
        self.drafting_s = time.monotonic() - begun

    def observe_step(self, sequences: int, tokens: int, seconds: float) -> None:
        """Let what limits drafts know of a step and the drafting after it: see `DraftControl.observe_step`."""
        self.lengths.observe_step(sequences, tokens, seconds, self.drafting_s)

    def _note(self, request: Request, drafts: list[int]) -> None:
        """Give drafts to a sequence. While a step is in flight they come one token late: that there are any says that
        there will be more, for which the next step is to wait.
        """
        request.drafts = [] if request.pending else drafts
        (self._likely.add if drafts else self._likely.discard)(request.request_id)

    def needs_step(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether a step has to be over before anything else is scheduled: it verifies drafts, or what drafts needs its
        hidden states.
        """
        if any(c.drafts for c in chunks):
            return True
        self.proposer.is_paused = self.lengths.is_paused
        return self.proposer.needs_step(chunks, [self.lengths.length(c.request) for c in chunks])

    def is_awaited(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether the step behind these chunks waits for them: as `needs_step`, or its sequences are likely to get
        drafts, as they did last time.
        """
        return self.needs_step(chunks) or any(
            c.request.request_id in self._likely and self.lengths.length(c.request) for c in chunks
        )

    def _max_drafts(self, alive: Sequence[VerifiedChunk]) -> list[int]:
        """The maximum number of drafts of each sequence, adapted to its last verification, which is recorded here; 0
        while a prompt is read, or tokens are computed once more.
        """
        for c in alive:
            self.lengths.observe(c.request, c.num_drafts, c.num_accepted)
        return [
            min(self.lengths.length(c.request), self.scheduler.max_drafts(c.request)) if c.request.remaining == 1 else 0
            for c in alive
        ]

    def forget(self, request: Request) -> None:
        """Drop what is known about a request that has ended."""
        self._likely.discard(request.request_id)
        self.lengths.forget(request)
        self.proposer.forget(request)


def make_proposer(config: SpeculativeConfig, runner: Runner, scheduler: Scheduler) -> Proposer:
    """The proposer of the method in `config`, over the runner's draft model or draft layer if it loads a network.

    Raises:
        UsageError: the model lacks something that the method needs.
    """
    if config.method not in NETWORK_METHODS:
        return make_registered(ProposerContext(config, runner.model.vocab))
    if config.method == "draft_model":
        assert runner.draft is not None, "the runner was opened without the draft model"
        return DraftModelProposer(runner.draft, scheduler.extend)
    if not runner.model.mtp:
        raise UsageError(
            f"method='mtp', but {runner.files.name} has no multi-token-prediction layer.",
            there_is="'ngram', which needs none",
            remedy="load a checkpoint that has one",
        )
    index = 0 if config.method == "mtp" else len(runner.model.mtp) - 1  # an EAGLE head comes after them
    return DraftLayerProposer(runner, index, scheduler.extend)
