"""Numerics of post-training quantization: matrices in, scales and quantized matrices out. No model is known here."""
