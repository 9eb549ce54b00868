"""The check of KV layouts at start: every fault planted in a layout is found, and right layouts pass."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from inferplane.binding.layout_canary import check_layout
from inferplane.kvcache import paged_layout
from inferplane.types import HOST, KVRequest
from inferplane_cpu.backend import CpuBackend

REQUESTS = [KVRequest("gqa", 2, 16, 16), KVRequest("gqa", 3, 9, 5, 32), KVRequest("mla", 1, 40)]


class Wrong:
    """A layer's cache with a fault, in front of a right one."""

    def __init__(self, kv, fault):
        self.kv, self.fault = kv, fault

    def __getattr__(self, name):
        return getattr(self.kv, name)

    def write(self, slots, *rows):
        if self.fault == "slot -1 is slot 0":
            slots = slots.clamp(min=0)
        if self.fault == "one offset further":
            slots = torch.where(slots >= 0, (slots + 1) % (4 * self.kv.block_tokens), -1)
        if self.fault == "blocks of one token less":
            size = self.kv.block_tokens
            slots = torch.where(slots >= 0, slots // (size - 1) * size + slots % (size - 1), -1).clamp(max=4 * size - 1)
        if self.fault == "drops the last row":
            slots, rows = slots[:-1], [r[:-1] for r in rows]
        if self.fault == "neighbours are NaN too" and any(r.isnan().any() for r in rows):
            slots, rows = torch.cat((slots, slots[:1] - 1)), [torch.cat((r, r[:1])) for r in rows]
        self.kv.write(slots, *rows)

    def read(self, table, tokens):
        found = self.kv.read(table, tokens)
        if self.fault == "rolled by a token":
            return tuple(t.roll(1, 0) for t in found)
        if self.fault == "table in order":
            return self.kv.read(torch.sort(table)[0], tokens)
        if self.fault == "too many tokens":
            return self.kv.read(table, len(table) * self.kv.block_tokens)
        if self.fault == "scaled by 1.02":
            return tuple(t * 1.02 for t in found)
        if self.fault == "transposed":
            return tuple(t.transpose(-1, -2) for t in found)
        return found

    def copy_blocks(self, source, target):
        if self.fault == "copies nothing":
            return
        if self.fault == "raises":
            raise RuntimeError("no copy engine")
        self.kv.copy_blocks(source, target)

    def load(self, blocks, stored):
        self.kv.load(blocks, stored[:1] + tuple(t * 0 for t in stored[1:]) if self.fault == "loads K alone" else stored)


FAULTS = {
    "slot -1 is slot 0": r"padded rows \(slot -1\), changed token 0 of block 0",
    "one offset further": "token 0 of block 0 was read with an error",
    "blocks of one token less": "token .* was read with an error",
    "drops the last row": "was read with an error",
    "neighbours are NaN too": "NaN in another block changed",
    "rolled by a token": "token 0 of block 0 was read with an error",
    "table in order": "of block 2 was read with an error",
    "too many tokens": "it raised|reading|of block",
    "scaled by 1.02": "was read with an error",
    "transposed": r"reading gives \[",
    "copies nothing": "copying moved token 0 of block 2",
    "loads K alone": "copying moved token 0 of block 3",
    "raises": "it raised RuntimeError: no copy engine",
}


def planted(layout, fault):
    return dataclasses.replace(layout, build=lambda *args: Wrong(layout.build(*args), fault))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    layout = planted(paged_layout(8), fault)
    found = check_layout(layout, REQUESTS[0], torch.bfloat16, HOST)
    assert re.search(FAULTS[fault], found), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_right_layouts_pass(request_, dtype):
    layouts = [*CpuBackend().kv_layouts(request_, dtype), *(paged_layout(16, kv) for kv in ("auto", "fp8", "int8"))]
    assert {x.name: check_layout(x, request_, dtype, HOST) for x in layouts} == {x.name: "" for x in layouts}
