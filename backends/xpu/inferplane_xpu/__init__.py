"""Intel GPUs and Kunlun cards for Inferplane. Importing this package imports nothing else."""
