"""Checkpoints that are written: quantized ones."""
