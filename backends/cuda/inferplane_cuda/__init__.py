"""NVIDIA GPUs for Inferplane. Importing this package imports nothing else."""
