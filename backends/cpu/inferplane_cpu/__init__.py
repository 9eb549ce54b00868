"""Inferplane's backend for processors: x86 and Arm, on torch's own operators."""
