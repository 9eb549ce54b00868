"""Kernels in Gluon for Hopper's own instructions: TMA, warpgroup products, warp specialization."""
