"""QTensor against blocks written out one by one."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inferplane.errors import UsageError
from inferplane.ops import FORMATS, encode
from inferplane.ops.formats import MINIMUMS
from inferplane.types import QTensor
from inferplane.types.qtensor import scale_shape

SHAPES = [(128, 256), (200, 320), (1, 5), (3, 130, 72), (2, 3, 7, 129)]


def blocks_of(q):
    """`(slices of data, index of scale)` of every block, the last ones of a row or column partial."""
    *lead, n, k = q.shape
    rows, columns = q.block
    for where in product(*map(range, lead)):
        for i in range(math.ceil(n / rows)):
            for j in range(math.ceil(k / columns)):
                cut = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                yield (*where, *cut), (*where, i, j)


def random_qtensor(n, k, block, *, zero=False, minimum=False, seed=0, lead=(), dtype=torch.int8, bits=8):
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(-127, 128, (*lead, n, k), generator=g).to(torch.int8)
    if dtype is not torch.int8:
        data = data.float().to(dtype)
    shape = scale_shape((*lead, n, k), block)
    points = torch.randint(-8, 8, shape, generator=g).to(torch.int8) if zero else None
    least = torch.randn(shape, generator=g) if minimum else None
    return QTensor(data, torch.rand(shape, generator=g) + 0.1, points, block, bits, minimum=least)


@pytest.mark.parametrize("format", sorted(FORMATS.keys() - {"mxfp4", "mxfp8", "nvfp4"} - MINIMUMS.keys()))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_formats_round_trip_within_half_a_step(format, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    q = encode(weight, format)
    dtype, bits, _ = FORMATS[format]
    top = {8: 127, 4: 7}[bits] if dtype is torch.int8 else 448
    assert q.data.dtype is dtype and q.bits == bits and q.shape == shape and q.zero is None
    back = q.dequantize()
    for cut, at in blocks_of(q):
        amax = weight[cut].abs().max()
        torch.testing.assert_close(q.scale[at], amax / top)
        if dtype is torch.int8:
            step = q.scale[at].expand(back[cut].shape)
            assert q.data[cut].abs().max() == top, "the scale wastes the format's range"
        else:  # 3 bits of mantissa; below 2^-6 the step stays 2^-9
            step = torch.maximum(weight[cut].abs() / 8, q.scale[at] * 2**-9)
        assert ((back[cut] - weight[cut]).abs() <= step * 0.501).all()


@pytest.mark.parametrize("format", MINIMUMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_from_a_minimum(format, shape):
    """They reach from the smallest entry, or zero, to the largest, in float16."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    q, top = encode(weight, format), MINIMUMS[format]
    assert q.shape == shape and q.zero is None and q.data.min() >= 0 and q.data.max() == top
    assert torch.equal(q.scale, q.scale.half().float()) and torch.equal(q.minimum, q.minimum.half().float())
    for cut, at in blocks_of(q):
        torch.testing.assert_close(q.minimum[at], weight[cut].min().clamp(max=0), rtol=1e-3, atol=0)
    step = q.expand_scale() * (0.501 + top * 2**-11)
    assert ((q.dequantize() - weight).abs() <= step + weight.abs().max() * 2**-11).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mxfp4_rounds_to_the_nearest_of_its_values(shape):
    """The scale is a power of two; entries are twice e2m1's: steps of 1 up to 4, of 2 up to 8, of 4 up to 12."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    q = encode(weight, "mxfp4")
    assert q.data.dtype is torch.int8 and q.shape == shape and q.zero is None
    assert set(q.data.abs().unique().tolist()) <= {0, 1, 2, 3, 4, 6, 8, 12}
    assert (torch.frexp(q.scale)[0] == 0.5).all(), "a scale is no power of two"
    entries = (weight / q.expand_scale()).abs()
    assert entries.max() < 16 and q.data.abs().max() >= 8, "the scale wastes the format's range"
    half_step = torch.where(entries < 4, 0.5, torch.where(entries < 8, 1.0, 2.0)).maximum(entries - 12)
    assert ((q.dequantize() - weight).abs() <= half_step * q.expand_scale() * 1.001).all()


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_stay_zeros(format):
    weight = torch.randn(130, 260)
    weight[:, 128:256] = 0
    weight[5] = 0
    q = encode(weight, format)
    assert (q.scale > 0).all() and q.scale.isfinite().all()
    back = q.dequantize()
    assert back.isfinite().all() and not back[5].any() and not back[:, 128:256].any()
    zero = encode(torch.zeros(3, 7), format)
    # NVFP4's scales are numbers of e4m3 times a power of two, whatever is in their groups.
    assert ((zero.scale > 0) if format == "nvfp4" else (zero.scale == 1)).all() and not zero.dequantize().any()


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("block", [(1, 40), (1, 16), (4, 16), (128, 128)], ids=str)
def test_dequantize_is_the_formula(minimum, zero, lead, block):
    q = random_qtensor(10, 40, block, zero=zero, minimum=minimum, lead=lead)
    want = torch.full(q.shape, torch.nan)
    for cut, at in blocks_of(q):
        want[cut] = (q.data[cut].float() - (q.zero[at].float() if zero else 0)) * q.scale[at]
        want[cut] += q.minimum[at] if minimum else 0
    assert torch.equal(q.dequantize(), want)
    assert torch.equal(q.dequantize(torch.bfloat16), want.bfloat16())
    ones = QTensor(torch.ones_like(q.data), q.scale, block=block)
    assert torch.equal(q.expand_scale(), ones.dequantize())
    assert q.nbytes == q.data.numel() + q.scale.numel() * (4 + (1 if zero else 0) + (4 if minimum else 0))


PART = st.tuples(st.integers(1, 40), st.sampled_from([1, 2, 3, 8, 12, 128]))


@given(parts=st.lists(PART, min_size=1, max_size=4), columns=st.sampled_from([1, 7, 16]), zero=st.booleans())
def test_cat_keeps_every_value(parts, columns, zero):
    form = {"zero": zero, "minimum": not zero}
    qs = [random_qtensor(n, 7, (rows, columns), **form, seed=i) for i, (n, rows) in enumerate(parts)]
    whole = QTensor.cat(qs)
    assert torch.equal(whole.dequantize(), torch.cat([q.dequantize() for q in qs]))
    assert all(rows % whole.block[0] == 0 for _, rows in parts), "blocks are refined, never widened"


def test_cat_of_stacked_experts():
    qs = [random_qtensor(n, 6, (4, 3), lead=(2,), seed=n) for n in (3, 9)]
    assert torch.equal(QTensor.cat(qs).dequantize(), torch.cat([q.dequantize() for q in qs], -2))


def test_cat_of_fp8_blocks_with_ragged_edges():
    parts = [torch.randn(n, 300) for n in (192, 64, 100)]
    qs = [encode(p, "fp8_block") for p in parts]
    whole = QTensor.cat(qs)
    assert whole.data.dtype is torch.float8_e4m3fn and whole.block == (64, 128)
    assert torch.equal(whole.dequantize(), torch.cat([q.dequantize() for q in qs]))


@given(n=st.integers(1, 50), rows=st.sampled_from([1, 4, 6, 128]), zero=st.booleans(), data=st.data())
def test_shard_by_rows(n, rows, zero, data):
    q = random_qtensor(n, 9, (rows, 4), zero=zero)
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    assert torch.equal(q.shard(0, start, stop).dequantize(), q.dequantize()[start:stop])


def test_shard_by_rows_reaches_into_stacks():
    q = random_qtensor(12, 6, (8, 3), lead=(2,), zero=True, minimum=True)
    assert torch.equal(q.shard(0, 4, 10).dequantize(), q.dequantize()[:, 4:10])


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (8, 24), (16, 27), (0, 27)])
def test_shard_by_columns_on_block_bounds(start, stop):
    q = random_qtensor(5, 27, (2, 8), zero=True, minimum=True)
    assert torch.equal(q.shard(1, start, stop).dequantize(), q.dequantize()[:, start:stop])


@pytest.mark.parametrize("columns", [27, 128])
def test_shard_by_columns_within_one_block_a_row(columns):
    q = random_qtensor(5, 27, (1, columns), zero=True)
    parts = [q.shard(1, 0, 10), q.shard(1, 10, 27)]
    assert torch.equal(torch.cat([p.dequantize() for p in parts], 1), q.dequantize())


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (4, 16), (8, 26)])
def test_shard_never_cuts_a_block_of_columns(start, stop):
    with pytest.raises(UsageError, match=f"columns {start}:{stop} divide a block of 8 columns"):
        random_qtensor(5, 27, (2, 8)).shard(1, start, stop)


def test_refine():
    q = random_qtensor(10, 6, (4, 3), zero=True, minimum=True)
    for rows in (4, 2, 1):
        fine = q.refine(rows)
        assert fine.block == (rows, 3) and torch.equal(fine.dequantize(), q.dequantize())
    with pytest.raises(UsageError, match="blocks of 4 rows cannot be refined to 3"):
        q.refine(3)


def test_to_moves_every_part():
    q = random_qtensor(4, 6, (2, 3), zero=True, minimum=True)
    moved = q.to("meta")
    assert {t.device.type for t in (moved.data, moved.scale, moved.zero, moved.minimum)} == {"meta"}


def test_scales_that_do_not_fit_are_refused():
    data, fit = torch.zeros(10, 40, dtype=torch.int8), torch.ones(5, 3)
    with pytest.raises(UsageError, match=r"scale has shape \(3, 5\).* needs \(5, 3\)"):
        QTensor(data, fit.t(), block=(2, 16))
    with pytest.raises(UsageError, match="zero has shape"):
        QTensor(data, fit, torch.zeros(5), block=(2, 16))
    with pytest.raises(UsageError, match="at least one row and one column"):
        QTensor(data, fit, block=(2, 0))


@pytest.mark.parametrize(
    "other",
    [
        random_qtensor(4, 5, (2, 3)),  # columns
        random_qtensor(4, 6, (2, 2)),  # column blocks
        random_qtensor(4, 6, (2, 3), zero=True),
        random_qtensor(4, 6, (2, 3), minimum=True),
        random_qtensor(4, 6, (2, 3), bits=4),
        random_qtensor(4, 6, (2, 3), dtype=torch.float8_e4m3fn),
        random_qtensor(4, 6, (2, 3), lead=(2,)),
    ],
    ids=["columns", "column blocks", "zero points", "minimums", "bits", "dtype", "experts"],
)
def test_cat_refuses_what_differs(other):
    with pytest.raises(UsageError, match="2 parts that differ"):
        QTensor.cat([random_qtensor(4, 6, (2, 3)), other])


def test_cat_of_nothing():
    with pytest.raises(UsageError, match="0 parts"):
        QTensor.cat([])


def test_unknown_format():
    with pytest.raises(UsageError, match=r"'fp5'.*There is: .*int8_row"):
        encode(torch.ones(2, 2), "fp5")
