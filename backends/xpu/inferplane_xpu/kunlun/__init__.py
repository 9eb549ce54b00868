"""Kunlun cards. Importing this package imports nothing else."""
