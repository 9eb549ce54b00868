"""Portable kernels of mixture-of-experts layers: routing, experts, whole layers."""
