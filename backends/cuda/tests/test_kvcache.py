"""Latents with one scale a token: what is written is read within the format's error, moved and loaded whole."""

from __future__ import annotations

import pytest
import torch

from inferplane.plugin import KVRequest, UsageError
from inferplane_cuda.kvcache import layouts_for, list_paged_layouts, token_scaled_layout

REQUEST = KVRequest("mla", 1, 576)


def filled(blocks: int):
    kv = token_scaled_layout().build(REQUEST, blocks, torch.bfloat16, torch.device("cpu"))
    entries = torch.randn(blocks * 64, 576, generator=torch.Generator().manual_seed(1))
    entries[5, :512] = 0
    kv.write(torch.arange(blocks * 64), entries)
    return kv, entries


def test_entries_come_back_within_the_formats_error():
    kv, entries = filled(2)
    got = kv.read(torch.tensor([0, 1]), 100)[0]
    assert got.shape == (100, 576) and got.dtype == torch.bfloat16
    largest = entries[:100, :512].abs().amax(1, keepdim=True)
    assert bool(((got[:, :512].float() - entries[:100, :512]).abs() <= token_scaled_layout().tolerance * largest).all())
    assert torch.equal(got[:, 512:], entries[:100, 512:].bfloat16())
    assert torch.equal(kv.scales.log2(), kv.scales.log2().round())


def test_blocks_are_copied_exported_and_loaded():
    kv, _ = filled(3)
    kv.copy_blocks(torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(kv.read(torch.tensor([2]), 64)[0], kv.read(torch.tensor([0]), 64)[0])
    other, _ = filled(1)
    other.load(torch.tensor([0]), kv.export(torch.tensor([1])))
    assert torch.equal(other.read(torch.tensor([0]), 64)[0], kv.read(torch.tensor([1]), 64)[0])
    with pytest.raises(UsageError, match="latent_64_fp8 cannot load"):
        other.load(torch.tensor([0]), kv.export(torch.tensor([1]))[:2])


def test_a_slot_of_padding_is_written_behind_the_blocks():
    kv, _ = filled(1)
    before = kv.read(torch.tensor([0]), 64)[0]
    kv.write(torch.tensor([-1]), torch.full((1, 576), 7.0))
    assert torch.equal(kv.read(torch.tensor([0]), 64)[0], before)


def test_it_is_offered_for_latents_of_its_size():
    assert layouts_for(REQUEST)[-1].name == "latent_64_fp8"
    assert layouts_for(KVRequest("mla", 1, 64)) == layouts_for(KVRequest("gqa", 2, 64, 64)) == list_paged_layouts()
    stored = filled(1)[0].export(torch.tensor([0]))
    assert token_scaled_layout().bytes_per_block(REQUEST, torch.bfloat16) == sum(t.nbytes for t in stored)
