"""Kernels that several backends share. They name no device; backends declare them, core itself never uses them.

| package | holds |
|---|---|
| `composed` | kernels of every op from torch's own operators, rank 10: what a backend declares first |
| `triton` | portable kernels in Triton, rank 50 |
| `fused` | what kernels that call a vendor's fused operators have in common |
| `graphs` | capture of decode steps as graphs of the device's runtime |

Promised to backends: `composed_kernels()`, the names that `inferplane.kernels.triton` exports, `fused` and `graphs`.
"""
