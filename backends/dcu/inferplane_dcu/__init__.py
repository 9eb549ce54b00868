"""Hygon DCUs for Inferplane. Importing this package imports nothing else."""
