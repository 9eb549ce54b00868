"""Speculative decoding: a proposer drafts tokens, the next step verifies them for all sequences together."""

from inferplane.engine.speculate.adaptive import AdaptiveLength
from inferplane.engine.speculate.config import SpeculativeConfig, with_draft
from inferplane.engine.speculate.network import DraftLayerProposer, DraftModelProposer
from inferplane.engine.speculate.proposer import Proposer, ProposerContext, VerifiedChunk
from inferplane.engine.speculate.speculator import Speculator
from inferplane.engine.speculate.text import NgramProposer, SuffixIndex, SuffixProposer, ngram_drafts
from inferplane.engine.speculate.verify import Verified, needs_probabilities, verify

__all__ = [
    "AdaptiveLength",
    "DraftLayerProposer",
    "DraftModelProposer",
    "NgramProposer",
    "Proposer",
    "ProposerContext",
    "SpeculativeConfig",
    "Speculator",
    "SuffixIndex",
    "SuffixProposer",
    "Verified",
    "VerifiedChunk",
    "needs_probabilities",
    "ngram_drafts",
    "verify",
    "with_draft",
]
