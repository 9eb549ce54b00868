"""Exports: writing one, and comparing one with a start."""
