"""Hyper-connections on native kernels: against their bodies in odd sizes, row by row, with numbers that are none."""

import pytest
import torch

from inferplane.ops import HyperCollapse, HyperHead, HyperPost, HyperPre, Sinkhorn
from inferplane_cpu.kernels.hyper import hyper_collapse, hyper_head, hyper_post, hyper_pre, sinkhorn
from inferplane_cpu.native import instruction_sets, native, use_instruction_set

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
SIZES = [(4, 4096), (4, 1030), (1, 5), (2, 96), (3, 45), (8, 130)]
DTYPES = [torch.bfloat16, torch.float32]
TOKENS = 11


def numbers(*shape, seed, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def collapse(streams, width):
    rows, columns = 2 * streams + streams**2, streams * width
    fn, base = numbers(rows, columns, seed=1, scale=columns**-0.5), numbers(rows, seed=2)
    return HyperCollapse(fn, base, numbers(3, seed=3), streams, 1e-6, 1e-6)


def head(streams, width):
    fn = numbers(streams, streams * width, seed=1, scale=(streams * width) ** -0.5)
    return HyperHead(fn, numbers(streams, seed=2), numbers(1, seed=3), streams, 1e-6, 1e-6)


def pre(streams, width):
    return HyperPre(collapse(streams, width), Sinkhorn(20, 1e-6))


def near(got, want, dtype):
    limit = 4e-3 if got.dtype is torch.bfloat16 else 2e-5
    assert got.dtype is want.dtype
    return (got.double() - want.double()).abs().max() <= limit * want.double().abs().max()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_results_are_the_bodies(size, dtype, name):
    streams, width = size
    x, y = numbers(TOKENS, *size, seed=4).to(dtype), numbers(TOKENS, width, seed=5).to(dtype)
    post, mix = numbers(TOKENS, streams, seed=6), numbers(TOKENS, streams, streams, seed=7)
    after = HyperPost(streams, width)
    with use_instruction_set(name):
        for make, run in ((collapse, hyper_collapse), (pre, hyper_pre)):
            op = make(*size)
            assert all(near(g, w, dtype) for g, w in zip(run(op, x), op(x), strict=True))
        assert near(hyper_head(head(*size), x), head(*size)(x), dtype)
        assert near(hyper_post(after, y, x, post, mix), after(y, x, post, mix), dtype)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_the_same_whoever_is_beside_it(dtype, name):
    size = 4, 1030
    x, y = numbers(TOKENS, *size, seed=4).to(dtype), numbers(TOKENS, size[1], seed=5).to(dtype)
    before, last, after = pre(*size), head(*size), HyperPost(*size)
    with use_instruction_set(name):
        made, one = hyper_pre(before, x), hyper_head(last, x)
        streams = hyper_post(after, y, x, *made[1:])
        for part in (slice(0, 1), slice(3, 5), slice(2, 9)):
            again = hyper_pre(before, x[part])
            assert all(torch.equal(a, b[part]) for a, b in zip(again, made, strict=True))
            assert torch.equal(hyper_head(last, x[part]), one[part])
            assert torch.equal(hyper_post(after, y[part], x[part], *again[1:]), streams[part])


@pytest.mark.parametrize("name", SETS)
def test_nan_stays_in_its_token(name):
    size = 4, 96
    x, y = numbers(TOKENS, *size, seed=4).bfloat16(), numbers(TOKENS, 96, seed=5).bfloat16()
    x[2, 1, 7], x[6, 0, 0] = torch.nan, torch.inf
    others = [t for t in range(TOKENS) if t not in (2, 6)]
    with use_instruction_set(name):
        made = hyper_pre(pre(*size), x)
        streams, one = hyper_post(HyperPost(*size), y, x, *made[1:]), hyper_head(head(*size), x)
    for got in (*made, streams, one):
        assert got[others].isfinite().all()
        assert got[2].isnan().any()
    assert all(got[2].isnan().all() for got in (*made, streams, one))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("streams", [1, 3, 4, 19])
def test_matrices(streams, iterations, name):
    op, logits = Sinkhorn(iterations, 1e-6), numbers(33, streams, streams, seed=8, scale=6.0)
    logits[3, 0, 0] = torch.nan
    held = logits.clone()
    with use_instruction_set(name):
        got = sinkhorn(op, logits)
    want = op(logits)
    assert torch.equal(logits.nan_to_num(), held.nan_to_num())
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.allclose(got.nan_to_num(), want.nan_to_num(), rtol=1e-4, atol=1e-6)
