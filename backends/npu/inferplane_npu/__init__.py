"""Huawei Ascend NPUs for Inferplane. Importing this package imports nothing else."""
