"""Packed tensors in files: what is read equals what was written, strides too; what is no tensor is refused."""

from __future__ import annotations

import pytest
import torch

from inferplane.errors import KernelError
from inferplane.ops import encode
from inferplane.plugin import CANONICAL, PackedStorage, Packing, QTensor, StoredWeight
from inferplane.types.packed import read_tensors, write_tensors

PLAIN = torch.arange(24.0).view(2, 3, 4)


@pytest.mark.parametrize("value", [PLAIN, PLAIN.transpose(1, 2), PLAIN.permute(2, 0, 1), PLAIN[0, 0], torch.ones(1)])
def test_tensors_and_their_strides(value):
    stored = write_tensors(value)
    again = read_tensors(StoredWeight({k: v.clone() for k, v in stored.tensors.items()}, stored.facts), (24,))
    assert torch.equal(again, value) and again.stride() == value.stride()
    assert all(part.is_contiguous() for part in stored.tensors.values())


@pytest.mark.parametrize("format", ["int4_group32", "fp8_block", "int8_row", "int4_min32"])
def test_quantized_tensors(format):
    q = encode(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), format)
    again = read_tensors(write_tensors(q), (64, 256))
    assert isinstance(again, QTensor) and (again.block, again.bits) == (q.block, q.bits)
    assert torch.equal(again.dequantize(), q.dequantize())


def test_what_cannot_be_written():
    with pytest.raises(KernelError, match=r"type dict cannot be written"):
        write_tensors({"data": PLAIN})
    with pytest.raises(KernelError, match="gaps or overlaps"):
        write_tensors(PLAIN[:, :, ::2])
    with pytest.raises(KernelError, match="gaps or overlaps"):
        write_tensors(torch.ones(1).expand(4))
    with pytest.raises(KernelError, match="It cannot be written: it lives on the device alone"):
        PackedStorage.refuse("it lives on the device alone").write(PLAIN)


@pytest.mark.parametrize(
    ("tensors", "facts"),
    [
        ({}, {}),
        ({"data": PLAIN, "more": PLAIN}, {}),
        ({"data": PLAIN}, {"bits": 8}),
        ({"data": PLAIN}, {"data_axes": [0, 1]}),
        ({"data": PLAIN}, {"data_axes": [0, 0, 1]}),
        ({"data": PLAIN}, {"data_axes": "012"}),
        ({"data": PLAIN, "scale": PLAIN}, {"block": [1, 4], "bits": 8.0}),
        ({"data": PLAIN, "scale": PLAIN}, {"block": [1], "bits": 8}),
        ({"data": PLAIN, "scale": PLAIN}, {"block": 4, "bits": 8}),
        ({"data": PLAIN, "scale": PLAIN.int()}, {"block": [1, 4], "bits": 8}),
        ({"data": PLAIN, "scale": PLAIN[0]}, {"block": [1, 4], "bits": 8}),
    ],
)
def test_what_no_export_holds(tensors, facts):
    with pytest.raises(KernelError):
        read_tensors(StoredWeight(tensors, facts), (2, 3, 4))


def test_a_packing_of_dequantized_values_is_stored_as_its_own():
    storage = PackedStorage.of_tensors("7")
    packing = Packing("toy.tiled", lambda w: w, storage=storage).dequantize_first(torch.float32)
    assert packing.storage is storage and packing.label == "plain > toy.tiled"
    assert CANONICAL.storage is not None and CANONICAL.storage.version
