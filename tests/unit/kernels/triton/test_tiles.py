"""Counters of launches whose programs share a result: each op's own, never moved while a record may point to them."""

from __future__ import annotations

import torch

from inferplane.kernels.triton import Launch, Products, Tiles
from inferplane.plugin import Context, Features
from inferplane_cuda.kernels import DEPENDENT_LAUNCH_VARIABLE, products, tiles, uses_dependent_launch

CPU = torch.device("cpu")


def test_each_prepared_op_has_counters_of_its_own():
    ctx = Context(torch.bfloat16, "decode", {}, Features(["sm90", "sm90a", "fp8"]))
    for prepare in (Tiles().prepare, Products().prepare, tiles, products):
        one, other = prepare(None, ctx), prepare(None, ctx)
        assert one == other and one.counters is not other.counters, "two engines would count in the same places"


def test_counters_grow_and_the_old_ones_stay():
    counters = Products().counters
    first = counters.of(CPU, 10)
    assert counters.of(CPU, len(first)) is first and not first.any() and first.dtype == torch.int32
    address = first.data_ptr()
    larger = counters.of(CPU, len(first) + 1)
    assert larger.numel() == len(first) + 1
    del first
    assert [held.data_ptr() for held in counters._held[CPU]] == [address, larger.data_ptr()]


def test_launching_ahead_is_off_unless_asked_for_and_there(monkeypatch):
    new, old = (Context(torch.bfloat16, "decode", {}, Features(x)) for x in (["sm90"], ["sm80"]))
    assert not uses_dependent_launch(new) and not tiles(None, new).ahead and not products(None, new).ahead
    monkeypatch.setenv(DEPENDENT_LAUNCH_VARIABLE, "1")
    assert tiles(None, new).ahead and products(None, new).ahead
    assert not tiles(None, old).ahead and not products(None, old).ahead


def test_wide_heads_take_half_the_rows():
    launch = Launch(64, 32, 8, 3)
    assert launch.for_width(128) == launch and launch.for_width(256) == Launch(32, 32, 8, 3)
    assert Launch(16, 32).for_width(256).rows == 16, "a product has at least 16"
