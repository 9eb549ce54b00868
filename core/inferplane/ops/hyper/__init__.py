"""Hyper-connections: several residual streams a token, mixed around each block."""
