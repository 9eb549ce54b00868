"""Drafts from text, on the host: the request's own by n-grams, or also earlier answers by their suffixes."""

from inferplane.engine.speculate.text.ngram import NgramProposer, ngram_drafts
from inferplane.engine.speculate.text.suffix import EarlierAnswers, SuffixProposer
from inferplane.engine.speculate.text.suffix_index import SuffixIndex

__all__ = ["EarlierAnswers", "NgramProposer", "SuffixIndex", "SuffixProposer", "ngram_drafts"]
