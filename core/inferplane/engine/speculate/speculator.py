"""After each step: how many drafts, from whom, for whom."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from inferplane.binding import view_of
from inferplane.engine.request.state import Request
from inferplane.engine.runner.capture import DecodeSteps, Step, why_not, why_not_together
from inferplane.engine.runner.model_runner import Runner
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.schedule.scheduler import Scheduled, Scheduler
from inferplane.engine.speculate.adaptive import AdaptiveLength
from inferplane.engine.speculate.captured_steps import Cycled, Cycles
from inferplane.engine.speculate.config import SpeculativeConfig
from inferplane.engine.speculate.draft_layer import HeadProposer
from inferplane.engine.speculate.draft_model import DraftModelProposer
from inferplane.engine.speculate.ngram import NgramProposer
from inferplane.engine.speculate.proposer import Proposer, Ran
from inferplane.engine.speculate.verify_and_draft import Cycle
from inferplane.errors import UsageError


class Speculator:
    """Asks a proposer for drafts after each step, and hands them to the sequences.

    Args:
        config: the method and its limits.
        runner: the bound model.
        scheduler: gives blocks for drafts; drafts never push a sequence out.

    Attributes: `cycles`, which runs steps together with the drafting behind them where a layer of the model drafts.

    Raises:
        UsageError: the method needs what the model lacks.
    """

    def __init__(self, config: SpeculativeConfig, runner: Runner, scheduler: Scheduler) -> None:
        self.config, self.scheduler = config, scheduler
        self.lengths = AdaptiveLength(config.speculate_max_draft_token_num, config.adaptive)
        self.proposer = make_proposer(config, runner, scheduler)
        self.cycles: Cycles | None = None
        if isinstance(self.proposer, HeadProposer):
            self.cycles = runner.cycles = _cycles(config, runner, scheduler, self.lengths, self.proposer)

    def run(self, chosen: Sequence[Scheduled]) -> Cycled | None:
        """A step and the drafts behind it at once; None, and nothing is done, where these run one after the other."""
        return None if self.cycles is None else self.cycles.run(chosen)

    def take(self, ran: Sequence[Ran], drafts: Sequence[list[int]]) -> None:
        """Put the drafts of `run` on the sequences that live on; `ran` are all of its step."""
        made = {id(r): d for r, d in zip(ran, drafts)}
        alive = [r for r in ran if r.request.finish_reason is None and r.request.blocks]
        for r, want in zip(alive, self._wants(alive)):
            r.request.drafts = made[id(r)][:want]
            held = max(r.first + 1 + r.drafted, r.request.computed + want - 1)
            self.scheduler.shorten(r.request, held)

    def propose(self, ran: Sequence[Ran], hidden: torch.Tensor) -> None:
        """Put drafts for the next step on the sequences that live on and decode."""
        alive = [r for r in ran if r.request.finish_reason is None and r.request.blocks]
        # A sequence that failed may have fewer tokens than rows, and none of its blocks was published.
        ended = [r for r in ran if r.request.finish_reason in ("stop", "length")]
        if ended:
            self.proposer.complete(ended, hidden)
        for r, drafts in zip(alive, self.proposer.propose(alive, self._wants(alive), hidden)):
            r.request.drafts = drafts

    def _wants(self, alive: Sequence[Ran]) -> list[int]:
        """The most drafts of each sequence, its last verification taken in."""
        for r in alive:
            self.lengths.tell(r.request, r.drafted, r.accepted)
        return [
            min(self.lengths.length(r.request), r.request.most_tokens - r.request.tokens)
            if r.request.remaining == 1
            else 0
            for r in alive
        ]

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self.lengths.forget(request)


def make_proposer(config: SpeculativeConfig, runner: Runner, scheduler: Scheduler) -> Proposer:
    """The proposer of a method.

    Raises:
        UsageError: the method needs what the model lacks.
    """
    method = config.speculate_method
    if method == "inference_with_reference":
        return NgramProposer(config)
    if method == "draft_model":
        assert runner.draft is not None, "the runner was opened without the draft model"
        return DraftModelProposer(runner.draft, scheduler.extend)
    if not runner.model.mtp:
        raise UsageError(
            f"speculate_method='mtp', but {runner.files.name} has no multi-token-prediction layer.",
            there_is="'inference_with_reference', which needs none",
            remedy="load a checkpoint that has one",
        )
    place = 0 if method == "mtp" else len(runner.model.mtp) - 1  # an EAGLE head stands behind them
    layers: dict[str, Any] = {}
    for kind, step in runner.steps.items():
        layers[kind] = view_of(step).mtp[place]
    assert runner.cache is not None
    index, device = len(runner.model.layers) + place, runner.backend.torch_device_indexed
    return HeadProposer(layers, runner.cache, index, device, scheduler.extend, partial(_recording, runner))


def _recording(runner: Runner, step: Step) -> DecodeSteps:
    """What runs a drafting layer's steps, recorded in the sizes of the model's own."""
    assert runner.cache is not None and runner.decode is not None
    off = why_not(runner.plan, runner.options, "mtp")
    return DecodeSteps(runner.backend, step, runner.cache, runner.max_model_len, runner.decode.sizes, off)


def _cycles(
    config: SpeculativeConfig, runner: Runner, scheduler: Scheduler, lengths: AdaptiveLength, proposer: HeadProposer
) -> Cycles:
    """What runs the model's steps together with its drafting layer's, in the sizes of the model's own."""
    assert runner.decode is not None
    sampler = Sampler(runner.sample, runner.model.vocab, runner.backend.torch_device_indexed)
    cycle = Cycle(runner._step, proposer.layer, sampler, config, proposer.block_tokens)
    off = runner.decode.off or why_not_together(runner.plan, runner.options)
    return Cycles(runner.backend, cycle, scheduler, lengths, runner.decode.sizes, runner.max_model_len, off)
