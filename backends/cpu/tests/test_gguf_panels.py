"""GGUF's types in panels: products with the values that are stored, and scales of two levels in their few bytes."""

import pytest
import torch

from inferplane.ops.formats import GROUPED, MINIMUMS
from inferplane.quant.gguf_blocks import LAYOUTS, unpack
from inferplane.types import QTensor
from inferplane_cpu.kernels.linear import multiply, multiply_on_tiles
from inferplane_cpu.kernels.packing import Panels, expand_rows
from inferplane_cpu.native import INT6, INT8, instruction_sets, library, native, use_instruction_set
from inferplane_cpu.structs import Matrix

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
KINDS = [kind for kind, layout in LAYOUTS.items() if layout.format in GROUPED]
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)} | dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
"""Where a block has float16 numbers; otherwise at its beginning."""
BYTES = {
    "Q4_0": 18 * 8,
    "Q4_1": 20 * 8,
    "Q8_0": 34 * 8,
    "Q4_K": 128 + 2 * 8 + 2 * 2,
    "Q6_K": 192 + 16 + 2,
    "Q3_K": 128 + 16 + 2,
    "Q5_K": 192 + 2 * 16 + 2 * 2,
}
"""Bytes of 256 columns in panels."""


def draw_weight(kind, n, blocks):
    layout, draw = LAYOUTS[kind], torch.Generator().manual_seed(n)
    raw = torch.randint(0, 256, (n * blocks, layout.nbytes), generator=draw, dtype=torch.uint8)
    for at in HALVES.get(kind, (0,)):
        halves = (torch.randn(len(raw), 1, generator=draw) / 50).half()
        raw[:, at : at + 2] = halves.view(torch.uint8)
    return unpack(kind, raw.view(n, -1))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_products_with_the_stored_values(kind, name):
    q, draw = draw_weight(kind, 37, 3), torch.Generator().manual_seed(1)
    values, panels = q.dequantize(), Panels(q)
    assert panels.nbytes == 48 * 3 * BYTES[kind] * LAYOUTS[kind].columns // 256 if kind in BYTES else panels.nbytes
    k = values.shape[1]
    parts = [(q.data.float() * q.expand_scale()).abs()]
    if q.minimum is not None:
        parts.append(q.minimum.abs().repeat_interleave(q.block[1], 1))
    with use_instruction_set(name):
        assert torch.equal(expand_rows(panels.matrices[0], 0, 37), values.bfloat16())
        for rows in (1, 2, 3, 7, 20, 70):
            x = torch.randn(rows, k, generator=draw).bfloat16()
            want, many = x.double() @ values.double().T, torch.empty(rows, 37)
            sizes = sum(x.float().abs() @ part.T for part in parts)
            assert ((multiply(panels.matrices[0], x, True) - want).abs() <= 3e-5 * sizes).all()
            if multiply_on_tiles(panels.matrices[0], x, many):
                assert ((many - want).abs() <= 2**-8 * sizes).all()


def test_scales_of_two_levels_take_a_byte_each():
    """Of those of 256 columns one factor is found, whatever the others are; else they stay as they are."""
    q = draw_weight("Q4_K", 32, 2)
    assert set(Panels(q).scales) == {"scale_code", "scale_unit", "minimum_code", "minimum_unit"}
    odd = q.scale.clone()
    odd[5, 3] = 0.0123456789
    panels = Panels(QTensor(q.data, odd, block=q.block, bits=q.bits, minimum=q.minimum))
    assert set(panels.scales) == {"scale", "minimum_code", "minimum_unit"}
    thirds = QTensor(q.data, q.scale / 3, block=q.block, bits=q.bits, minimum=q.minimum)
    assert set(Panels(thirds).scales) == {"scale", "minimum_code", "minimum_unit"}  # no unit in float16
    zeros = QTensor(q.data, torch.zeros_like(odd), block=q.block, bits=q.bits, minimum=q.minimum)
    assert not (expand_rows(Panels(zeros).matrices[0], 0, 32).float() - zeros.dequantize(torch.bfloat16).float()).any()


def test_entries_take_six_bits_if_all_fit():
    q = draw_weight("Q6_K", 32, 2)
    assert int(q.data.min()) == -32 and int(q.data.max()) == 31
    narrow = Panels(q)
    assert narrow.matrices[0].kind == INT6
    for entry in (-33, 32):
        q.data[31, 511] = entry
        panels = Panels(q)
        assert panels.matrices[0].kind == INT8 and panels.nbytes == narrow.nbytes + 32 * 512 // 4
        assert torch.equal(expand_rows(panels.matrices[0], 0, 32), q.dequantize().bfloat16())


@pytest.mark.parametrize("name", SETS)
def test_entries_beyond_six_bits_are_refused_in_six(name):
    data, values = torch.zeros(2 * 48 * 64, dtype=torch.uint8), torch.randint(-32, 32, (16, 40), dtype=torch.int8)
    with use_instruction_set(name):
        w = Matrix(INT6, 16, 16, 40, 0)
        assert library().ip_packed_bytes(w) == 16 * 64 * 3 // 4
        assert library().ip_pack_weight(w, values.data_ptr(), data.data_ptr()) == 1
        for entry in (-128, -33, 32, 127):
            values[3, 39] = entry
            assert library().ip_pack_weight(w, values.data_ptr(), data.data_ptr()) == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if LAYOUTS[kind].format in MINIMUMS])
def test_slices_of_columns(kind):
    q = draw_weight(kind, 16, 8).shard(1, 32, 96)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    want = x.float() @ q.dequantize().T
    assert (multiply(Panels(q).matrices[0], x, True) - want).abs().max() <= 1e-4 * want.abs().max()
