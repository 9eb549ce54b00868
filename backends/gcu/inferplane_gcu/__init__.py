"""Enflame GCUs for Inferplane. Importing this package imports nothing else."""
