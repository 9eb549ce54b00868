"""Caches with entries of 4 bits: what they hold, what they take, and how far values are from those written."""

from __future__ import annotations

import pytest
import torch

from inferplane.errors import UsageError
from inferplane.kvcache import paged_layout
from inferplane.kvcache.int4 import FINE_GROUP, GROUP, SPAN
from inferplane.types import KVRequest
from tests.unit.support.small import F32

CPU = torch.device("cpu")
REQUESTS = [
    KVRequest("gqa", 2, 64, 64),
    KVRequest("gqa", 3, 33, 33),
    KVRequest("gqa", 2, 48, 32),
    KVRequest("gqa", 1, 256, 256),
    KVRequest("mla", 1, 576, rope=64),
    KVRequest("mla", 1, 96),
]


def build(request, kv_dtype="int4", block_tokens=16, blocks=3, dtype=F32):
    return paged_layout(block_tokens, kv_dtype).build(request, blocks, dtype, torch.device("cpu"))


def random_rows(request, count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(count, *shape, generator=draw) for shape in request.entry_shapes]


def expect(x: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """The values of rows `[T, heads, dim]`, group by group as the layout is described."""
    out = torch.empty_like(x)
    for first in range(0, x.shape[-1], group):
        part = x[..., first : first + group]
        least, largest = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
        scale, minimum = ((largest - least) / 15).half().float(), least.half().float()
        scale = torch.where(scale == 0, 1.0, scale)
        out[..., first : first + group] = ((part - minimum) / scale).round().clamp(0, 15) * scale + minimum
    return out


def expect_keys(x: torch.Tensor) -> torch.Tensor:
    """The values of keys `[T, heads, dim]` from slot 0 on."""
    scale = x[::SPAN].abs().amax(-1, keepdim=True) / 127
    first = ((x[::SPAN] / scale).round() * scale).repeat_interleave(SPAN, 0)[: len(x)]
    return first + expect(x - first, FINE_GROUP)


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_values_are_those_of_groups_of_four_bits(request_):
    kv, rows = build(request_), random_rows(request_, 20)
    kv.write(torch.arange(20), *rows)
    found = kv.read(torch.tensor([0, 1]), 20)
    if request_.kind == "gqa":
        want = [expect_keys(rows[0]), expect(rows[1])]
    else:
        latents = expect(rows[0][:, None, : 96 if not request_.rope else 512])[:, 0]
        want = [torch.cat((latents, rows[0][:, latents.shape[1] :]), -1)]
    for got, values in zip(found, want, strict=True):
        assert (got - values).abs().max() <= 1e-5


def test_the_rotated_part_of_a_latent_stays():
    request = KVRequest("mla", 1, 576, rope=64)
    kv, (rows,) = build(request), random_rows(request, 5)
    rows[:, 512:] *= 1000
    kv.write(torch.arange(5), rows)
    (found,) = kv.read(torch.tensor([0]), 5)
    assert torch.equal(found[:, 512:], rows[:, 512:])
    assert (found[:, :512] - rows[:, :512]).abs().max() < 0.3


def test_keys_in_8_bits_beside_values_in_4():
    request = KVRequest("gqa", 2, 64, 64)
    rows = random_rows(request, 16)
    both, keys = build(request, "k8v4"), build(request, "int8")
    for kv in (both, keys):
        kv.write(torch.arange(16), *rows)
    found, plain = both.read(torch.tensor([0]), 16), keys.read(torch.tensor([0]), 16)
    assert torch.equal(found[0], plain[0])
    assert (found[1] - expect(rows[1], FINE_GROUP)).abs().max() <= 1e-5


def test_what_the_keys_of_a_span_share_costs_nothing():
    """Channels 30 times the others that hardly differ by token, as keys have them."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(64, 1, 64, generator=draw)
    rows[..., ::16] += 30
    kv = build(KVRequest("gqa", 1, 64, 64), blocks=4)
    kv.write(torch.arange(64), rows, rows)
    keys, values = ((found - rows).square().mean() for found in kv.read(torch.arange(4), 64))
    assert keys < values / 20


@pytest.mark.parametrize("sizes", [[1] * 40, [3, 37], [16, 16, 8], [40]])
def test_how_a_prompt_is_divided_changes_nothing(sizes):
    request = KVRequest("gqa", 2, 64, 64)
    rows = random_rows(request, 40)
    whole, divided = build(request), build(request)
    whole.write(torch.arange(40), *rows)
    first = 0
    for size in sizes:
        order = torch.arange(first, first + size).flip(0)
        divided.write(order, *(x[order] for x in rows))
        first += size
    table = torch.tensor([0, 1, 2])
    assert all(torch.equal(a, b) for a, b in zip(whole.read(table, 40), divided.read(table, 40)))


def test_a_span_is_written_anew_after_tokens_were_taken_back():
    """As when drafts are refused: the first slot of a span, and what follows it."""
    request = KVRequest("gqa", 1, 64, 64)
    wrong, right = (random_rows(request, 20, seed) for seed in (1, 2))
    kv, plain = build(request), build(request)
    kv.write(torch.arange(20), *wrong)
    for other in (kv, plain):
        other.write(torch.arange(14, 20), *(x[14:] for x in right))
    found, want = kv.read(torch.tensor([0, 1]), 20), plain.read(torch.tensor([0, 1]), 20)
    assert torch.equal(found[0][16:], want[0][16:]) and torch.equal(found[1][14:], want[1][14:])
    assert (found[0][14:16] - right[0][14:16]).abs().max() < 0.5


@pytest.mark.parametrize(
    ("request_", "kv_dtype", "bits"),
    [
        (REQUESTS[0], "int4", (6 + (8 + 0.5) / 16 + 5) / 2),
        (REQUESTS[0], "k8v4", (8 + 0.5 + 6) / 2),
        (REQUESTS[4], "int4", (512 * 5 + 64 * 32) / 576),
    ],
)
def test_bytes_are_those_of_the_tensors(request_, kv_dtype, bits):
    layout = paged_layout(16, kv_dtype)
    kv = layout.build(request_, 3, F32, torch.device("cpu"))
    nbytes = sum(t[0].numel() * t.element_size() for t in kv.list_tensors())
    assert nbytes == layout.bytes_per_block(request_, F32) == round(16 * request_.entries * bits / 8)


@pytest.mark.parametrize("kv_dtype", ["int4", "k8v4"])
def test_zeros_and_constant_rows(kv_dtype):
    request = KVRequest("gqa", 2, 64, 64)
    kv = build(request, kv_dtype)
    zeros, constant = torch.zeros(4, 2, 64), torch.full((4, 2, 64), 3.0)
    kv.write(torch.arange(4), zeros, zeros)
    kv.write(torch.arange(4, 8), constant, constant)
    keys, values = kv.read(torch.tensor([0]), 8)
    assert not keys[:4].any() and not values[:4].any()
    assert torch.equal(values[4:], constant) and (keys[4:] - constant).abs().max() < 0.02


def test_nothing_that_is_not_finite_becomes_a_number():
    request = KVRequest("gqa", 1, 64, 64)
    kv = build(request)
    rows = torch.zeros(3, 1, 64)
    rows[1, 0, 3], rows[2, 0, 3] = torch.inf, torch.nan
    kv.write(torch.arange(3), rows, rows)
    for found in kv.read(torch.tensor([0]), 3):
        assert found[0].isfinite().all() and not found[1:, 0, 3].isfinite().any()


def test_padding_writes_nowhere():
    request = KVRequest("gqa", 2, 64, 64)
    kv, rows = build(request), random_rows(request, 3)
    kv.write(torch.tensor([-1, -1, 5]), *rows)
    keys, _ = kv.read(torch.tensor([0, 1, 2]), 48)
    assert keys[5].any() and not keys[[i for i in range(48) if i != 5]].any()


def test_latents_have_no_values():
    with pytest.raises(UsageError, match=r"'k8v4' for a cache of kind 'mla'.*int8 or int4"):
        build(REQUESTS[4], "k8v4")
    with pytest.raises(UsageError, match="no values"):
        paged_layout(16, "k8v4").bytes_per_block(REQUESTS[4], F32)


def test_blocks_are_whole_spans():
    with pytest.raises(UsageError, match=r"block of 24 tokens in int4.*multiple of 16"):
        paged_layout(24, "int4")
    assert paged_layout(32, "int4").span == SPAN and paged_layout(32, "k8v4").span == 1


SPAN_REQUESTS = [KVRequest("gqa", 2, 64, 64), KVRequest("gqa", 3, 96, 64), KVRequest("gqa", 1, 32, 128)]


@pytest.mark.parametrize("kv_dtype", ["int4", "k8v4"])
@pytest.mark.parametrize("request_", SPAN_REQUESTS, ids=str)
def test_in_spans_are_the_same_numbers(request_, kv_dtype):
    """Whatever the order of slots, also in part of a block, copied, and exported and loaded."""
    rows, spans = (paged_layout(32, kv_dtype, in_spans=x).build(request_, 4, F32, CPU) for x in (False, True))
    slots = torch.cat((torch.arange(32, 90), torch.tensor([-1]), torch.arange(20)))
    written = random_rows(request_, len(slots))
    for kv in (rows, spans):
        kv.write(slots, *written)
        kv.copy_blocks(torch.tensor([1]), torch.tensor([3]))
        kv.load(torch.tensor([2]), tuple(t.clone() for t in kv.export(torch.tensor([0]))))
    assert spans.read(torch.tensor([1]), 3)[0].any()
    for table, tokens in (([1, 2, 0], 90), ([3], 26), ([2, 1, 3, 0], 128)):
        for got, want in zip(*(kv.read(torch.tensor(table), tokens) for kv in (spans, rows)), strict=True):
            assert torch.equal(got, want)
    layout = paged_layout(32, kv_dtype, in_spans=True)
    nbytes = sum(t[0].numel() * t.element_size() for t in spans.list_tensors())
    assert nbytes == layout.bytes_per_block(request_, F32) and layout.name == f"paged_32_{kv_dtype}_spans"


def test_where_entries_lie_in_a_span():
    """A lane of four bytes is a slot of keys, and an entry of values; all of a span and head lies together."""
    request = KVRequest("gqa", 2, 64, 64)
    kv = paged_layout(16, "int4", in_spans=True).build(request, 2, F32, CPU)
    rows = random_rows(request, 32)
    kv.write(torch.arange(32), *rows)
    slot, head, at = 16 + 7, 1, 43
    keys, k_ranges, firsts, scales, values, v_ranges = kv.list_tensors()
    first = firsts[1, 0, head, at] * scales[1, 0, head]
    scale, minimum = k_ranges[1, 0, head, at // 16, :, slot % 16].float()
    found = (keys[1, 0, head, at // 8, slot % 16, at % 4] >> 4 * (at % 8 // 4) & 15) * scale + minimum + first
    assert (found - kv.read(torch.tensor([0, 1]), 32)[0][slot, head, at]).abs() < 1e-5
    scale, minimum = v_ranges[1, 0, head, at // 32, :, slot % 16].float()
    found = (values[1, 0, head, 7 // 4, at // 32, at % 16, slot % 4] >> 4 * (at % 32 // 16) & 15) * scale + minimum
    assert (found - kv.read(torch.tensor([0, 1]), 32)[1][slot, head, at]).abs() < 1e-5
    record = 16 * (2 * 32 + 4 * 4 + 2 * 4) + 64
    begins = [t.data_ptr() for t in (keys, k_ranges, firsts, values, v_ranges)]
    assert begins == sorted(begins) and begins[-1] - begins[0] < record
    assert {t.stride(2) * t.element_size() for t in (keys, k_ranges, firsts, values, v_ranges)} == {record}


def test_what_has_no_spans():
    with pytest.raises(UsageError, match=r"int8 in spans.*int4, k8v4"):
        paged_layout(16, "int8", in_spans=True)
    for request in (KVRequest("gqa", 2, 48, 32), KVRequest("mla", 1, 576, rope=64)):
        with pytest.raises(UsageError, match="multiple of 32"):
            paged_layout(16, "int4", in_spans=True).build(request, 2, F32, CPU)
