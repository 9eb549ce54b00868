"""Speculation: proposing drafts, and verifying them in one ragged step."""

from inferplane.engine.speculate.config import SpeculativeConfig
from inferplane.engine.speculate.ngram import ngram_drafts
from inferplane.engine.speculate.verify import Verified, draw, verify

__all__ = ["SpeculativeConfig", "Verified", "draw", "ngram_drafts", "verify"]
