"""What every quantizer makes of numbers that a scale or a format cannot carry: NaN, infinities, zeros, tiny numbers."""

from __future__ import annotations

import pytest
import torch

from inferplane.kvcache import paged_layout
from inferplane.ops import FORMATS, encode
from inferplane.ops.formats import MINIMUMS, dequantize_rows
from inferplane.ops.quantize import Quantize
from inferplane.types import HOST, KVRequest

WIDTH = 128
TINY = (1e-38, 1e-40, 1e-41, 4e-43, 3e-43, 190 * 2.0**-149, 2.3e-43, 2e-43, 2.0**-149)
"""Down to the smallest number; from 1e-41 on a scale of a 127th has few significant bits, or none."""


def by_weight_format(format):
    return lambda x: encode(x, format).dequantize()


def by_activation_format(format, group):
    return lambda x: dequantize_rows(*Quantize(format, group)(x), group)


def by_cache(kv_dtype, power_of_two):
    def through(x):
        layout = paged_layout(16, kv_dtype, power_of_two=power_of_two)
        kv = layout.build(KVRequest("gqa", 1, WIDTH, WIDTH), 9, torch.float32, torch.device(HOST))
        rows = x.view(len(x), 1, WIDTH)
        kv.write(torch.arange(len(x)), rows, rows)
        k, v = kv.read(torch.arange(9, dtype=torch.int32), len(x))
        assert torch.equal(k, v) or not k.isfinite().all()
        return k.view(len(x), WIDTH)

    return through


def by_latent_cache(kv_dtype):
    def through(x):
        layout = paged_layout(16, kv_dtype)
        kv = layout.build(KVRequest("mla", 1, WIDTH, WIDTH // 2), 9, torch.float32, torch.device(HOST))
        kv.write(torch.arange(len(x)), x)
        return kv.read(torch.arange(9, dtype=torch.int32), len(x))[0]

    return through


QUANTIZERS = {
    **{f"weight {format}": by_weight_format(format) for format in FORMATS},
    **{
        f"activation {format} {group}": by_activation_format(format, group)
        for format in ("fp8", "int8")
        for group in (0, 64)
    },
    **{f"cache {kv} {p2}": by_cache(kv, p2) for kv in ("fp8", "int8") for p2 in (False, True)},
    **{f"latents {kv}": by_latent_cache(kv) for kv in ("fp8", "int8")},
}


def drawn(rows=4):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(name, bad):
    x = drawn()
    x[1, 5] = bad
    assert not QUANTIZERS[name](x)[1, 5].isfinite()


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_stay_zeros(name, zero):
    assert (QUANTIZERS[name](torch.full((4, WIDTH), zero)) == 0).all()


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("size", TINY)
def test_tiny_numbers_neither_wrap_nor_grow(name, size):
    """Signs remain or become 0, and no entry exceeds twice the largest. Steps from a minimum need not meet 0: there
    numbers within a step of it may change their signs."""
    x = drawn() * 0 + size * torch.linspace(-1, 1, WIDTH)
    found = QUANTIZERS[name](x)
    assert found.isfinite().all() and (found.abs() <= 2 * x.abs().max()).all()
    step = 2 * x.abs().max() / MINIMUMS.get(name.rpartition(" ")[2], torch.inf)
    assert ((found * x.sign() >= 0) | (x.abs() <= step)).all()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_bad_row_leaves_others_alone(name):
    x = drawn(130)
    want = QUANTIZERS[name](x)[128:]
    x[3, 7] = torch.nan
    assert torch.equal(QUANTIZERS[name](x)[128:], want)
