"""Speculation: proposing drafts, and verifying them in one ragged step."""

from inferplane.engine.speculate.adaptive import AdaptiveLength
from inferplane.engine.speculate.config import METHODS, SpeculativeConfig, with_drafter
from inferplane.engine.speculate.draft_layer import HeadProposer
from inferplane.engine.speculate.draft_model import DraftModelProposer
from inferplane.engine.speculate.ngram import NgramProposer, ngram_drafts
from inferplane.engine.speculate.proposer import Proposer, Ran
from inferplane.engine.speculate.speculator import Speculator
from inferplane.engine.speculate.verify import Verified, needs_probabilities, verify

__all__ = [
    "METHODS",
    "AdaptiveLength",
    "DraftModelProposer",
    "HeadProposer",
    "NgramProposer",
    "Proposer",
    "Ran",
    "SpeculativeConfig",
    "Speculator",
    "Verified",
    "needs_probabilities",
    "ngram_drafts",
    "verify",
    "with_drafter",
]
