"""Constraints of parts of a text: the thought before an answer, and what follows triggers; tokens as bytes."""
