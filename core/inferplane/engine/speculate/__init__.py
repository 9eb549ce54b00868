"""Speculation: proposing drafts, and verifying them in one ragged step."""

from inferplane.engine.speculate.config import SpeculativeConfig
from inferplane.engine.speculate.ngram import ngram_drafts
from inferplane.engine.speculate.proposer import (
    AdaptiveLength,
    MTPProposer,
    NgramProposer,
    Proposer,
    Ran,
    Speculator,
)
from inferplane.engine.speculate.verify import Verified, needs_probabilities, verify

__all__ = [
    "AdaptiveLength",
    "MTPProposer",
    "NgramProposer",
    "Proposer",
    "Ran",
    "SpeculativeConfig",
    "Speculator",
    "Verified",
    "needs_probabilities",
    "ngram_drafts",
    "verify",
]
