"""After each step: how many drafts, from whom, for whom."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from inferplane.engine.capture import DecodeSteps, Step, why_not
from inferplane.engine.request import Request
from inferplane.engine.runner import Runner
from inferplane.engine.scheduler import Scheduler
from inferplane.engine.speculate.config import SpeculativeConfig
from inferplane.engine.speculate.draft_model import DraftModelProposer
from inferplane.engine.speculate.heads import HeadProposer
from inferplane.engine.speculate.ngram import NgramProposer
from inferplane.engine.speculate.proposer import Proposer, Ran
from inferplane.errors import UsageError


class AdaptiveLength:
    """How many drafts to ask for: two more after all were accepted, one fewer after a rejection, at least one."""

    def __init__(self, most: int, adaptive: bool) -> None:
        self.most, self.adaptive = most, adaptive
        self._length: dict[int | str, int] = {}

    def length(self, request: Request) -> int:
        """Drafts to ask for now."""
        return self._length.get(request.request_id, self.most)

    def tell(self, request: Request, drafted: int, accepted: int) -> None:
        """Take in the outcome of a verification."""
        if self.adaptive and drafted:
            now = self.length(request)
            self._length[request.request_id] = min(self.most, now + 2) if accepted == drafted else max(1, now - 1)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._length.pop(request.request_id, None)


class Speculator:
    """Asks a proposer for drafts after each step, and hands them to the sequences.

    Args:
        config: the method and its limits.
        runner: the bound model.
        scheduler: gives blocks for drafts; drafts never push a sequence out.

    Raises:
        UsageError: the method needs what the model lacks.
    """

    def __init__(self, config: SpeculativeConfig, runner: Runner, scheduler: Scheduler) -> None:
        self.config = config
        self.lengths = AdaptiveLength(config.speculate_max_draft_token_num, config.adaptive)
        self.proposer = make_proposer(config, runner, scheduler)

    def propose(self, ran: Sequence[Ran], hidden: torch.Tensor) -> None:
        """Put drafts for the next step on the sequences that live on and decode."""
        alive = [r for r in ran if r.request.finish_reason is None and r.request.blocks]
        # A sequence that failed may have fewer tokens than rows, and none of its blocks was published.
        ended = [r for r in ran if r.request.finish_reason in ("stop", "length")]
        if ended:
            self.proposer.complete(ended, hidden)
        for r in alive:
            self.lengths.tell(r.request, r.drafted, r.accepted)
        wants = [
            min(self.lengths.length(r.request), r.request.most_tokens - r.request.tokens)
            if r.request.remaining == 1
            else 0
            for r in alive
        ]
        for r, drafts in zip(alive, self.proposer.propose(alive, wants, hidden)):
            r.request.drafts = drafts

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
        layers[kind] = step.__self__.mtp[place]  # type: ignore[attr-defined]
    assert runner.cache is not None
    index, device = len(runner.model.layers) + place, runner.backend.torch_device_indexed
    return HeadProposer(layers, runner.cache, index, device, scheduler.extend, partial(_recording, runner))


def _recording(runner: Runner, step: Step) -> DecodeSteps:
    """What runs a drafting layer's steps, recorded in the sizes of the model's own."""
    assert runner.cache is not None and runner.decode is not None
    off = why_not(runner.plan, runner.options, "mtp")
    return DecodeSteps(runner.backend, step, runner.cache, runner.max_model_len, runner.decode.sizes, off)
