"""Formulas in float64 that several tests hold ops against."""

from __future__ import annotations

import torch

from inferplane.types import Weight

SEQUENCES = [(1, 0), (1, 33), (3, 14), (8, 40), (9, 0), (40, 0), (17, 29)]
"""`(query tokens, tokens before)` of a ragged step."""


def norm(x, weight, eps):
    """RMS norm over the last dimension."""
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def silu(x):
    """`x sigmoid(x)`."""
    return x / (1 + torch.exp(-x))


def rope_table(dim, positions=600):
    """A rotary table as a weight, and the same as complex numbers of modulus 1, `[positions, dim / 2]`."""
    angle = torch.arange(positions).double()[:, None] / 10000 ** (torch.arange(0, dim, 2).double() / dim)
    table = torch.stack((angle.cos(), angle.sin()), 1).float()
    return Weight((), tuple(table.shape), torch.float32, make=lambda: table), torch.polar(torch.ones_like(angle), angle)


def rotate(x, turn, *, interleaved):
    """Turn pairs of entries by complex numbers; each result stands where its input stood."""
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = torch.complex(a.double(), b.double()) * turn
    return torch.view_as_real(turned).flatten(-2) if interleaved else torch.cat((turned.real, turned.imag), -1)
