"""GGUF's blocks in canonical form, against the `gguf` package's dequantization of the same bytes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inferplane.errors import CheckpointError
from inferplane.ops.formats import FORMATS, GROUPED, MINIMUMS, join_formats
from inferplane.quant.gguf_blocks import LAYOUTS, READERS, find_format, unpack, widen
from inferplane.types import PLAIN, Shard

gguf = pytest.importorskip("gguf", reason="not run: the package `gguf` is not installed")

SCALE_BYTES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "MXFP4": ()} | {
    kind: (0, 2) for kind in ("Q4_K", "Q5_K")
}
"""Where a block has float16 numbers; otherwise at its beginning."""


def draw_blocks(kind, rows, blocks):
    """Random blocks whose float16 numbers are finite and of all magnitudes."""
    draw = np.random.default_rng(len(kind) + rows)
    nbytes = LAYOUTS[kind].nbytes
    raw = draw.integers(0, 256, (rows * blocks, nbytes), dtype=np.uint8)
    for at in SCALE_BYTES.get(kind, (0,)):
        numbers = (draw.standard_normal(len(raw)) * 10.0 ** draw.integers(-6, 3, len(raw))).astype(np.float16)
        raw[:, at : at + 2] = numbers[:, None].view(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = draw.integers(90, 140, len(raw))
    return raw.reshape(rows, blocks * nbytes)


def expand(kind, raw):
    return torch.from_numpy(gguf.dequantize(raw, getattr(gguf.GGMLQuantizationType, kind)))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_value_is_the_one_of_the_type(kind, monkeypatch):
    monkeypatch.setattr("inferplane.quant.gguf_blocks.ENTRIES_AT_ONCE", 1500)
    raw = draw_blocks(kind, 11, 3)
    q = unpack(kind, torch.from_numpy(raw))
    want, layout = expand(kind, raw), LAYOUTS[kind]
    assert int((q.dequantize() != want).sum()) == 0 and want.any()
    dtype, bits, block = FORMATS[layout.format]
    assert (q.data.dtype, q.bits, q.block) == (dtype, bits, block)
    assert (q.minimum is not None) is (layout.format in MINIMUMS)
    if bits == 4:
        low, high = (0, 15) if layout.format in MINIMUMS else (-8, 7)
        assert low <= int(q.data.min()) and int(q.data.max()) <= high


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if LAYOUTS[kind].format in GROUPED])
def test_a_common_format_has_the_same_values(kind):
    raw = draw_blocks(kind, 5, 2)
    q, own = unpack(kind, torch.from_numpy(raw)), LAYOUTS[kind].format
    for other in GROUPED:
        common = join_formats((own, other))
        assert int((widen(q, common).dequantize() != expand(kind, raw)).sum()) == 0
    assert join_formats((own, "fp8_block")) is None and join_formats((own, PLAIN)) is None


def source_of(tensors):
    """A source of `{name: (type, blocks)}`."""

    def raw(name, first_row=0, rows=None):
        kind, blocks = tensors[name]
        return kind, torch.from_numpy(blocks[first_row : None if rows is None else first_row + rows])

    def shape(name):
        kind, blocks = tensors[name]
        return len(blocks), blocks.shape[1] // LAYOUTS[kind].nbytes * LAYOUTS[kind].columns

    return SimpleNamespace(raw=raw, shape=shape)


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_a_rank_reads_its_slice(kind):
    blocks, reader = draw_blocks(kind, 6, 4), READERS[LAYOUTS[kind].format]
    source, want = source_of({"w": (kind, blocks)}), expand(kind, blocks)
    half = want.shape[1] // 2
    assert torch.equal(reader(source, "w", Shard(0, 1, 2)).dequantize(), want[3:])
    assert torch.equal(reader(source, "w", Shard(1, 1, 2)).dequantize(), want[:, half:])
    with pytest.raises(CheckpointError, match="splits a group"):
        reader(source, "w", Shard(1, 1, want.shape[1] // 8))


def test_formats_of_a_config():
    types = {"model.a.weight": "Q4_K", "model.mlp.experts.*.down_proj.weight": "Q6_K", "model.b.weight": "TQ1_0"}
    assert find_format(types, "model.a.weight") == "int4_min32"
    assert find_format(types, "model.mlp.experts.17.down_proj.weight") == "int8_group16"
    assert find_format(types, "model.b.weight") == find_format(types, "model.norm.weight") == PLAIN


def test_blocks_of_no_type_are_refused():
    with pytest.raises(CheckpointError, match="IQ1_S"):
        unpack("IQ1_S", torch.zeros(2, 50, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="35 bytes"):
        unpack("Q8_0", torch.zeros(2, 35, dtype=torch.uint8))
