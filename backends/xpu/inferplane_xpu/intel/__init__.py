"""Intel GPUs. Importing this package imports nothing else."""
