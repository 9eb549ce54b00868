"""Sparse latent attention: rotated index keys, index scores, the selection of the largest, attention over these."""
