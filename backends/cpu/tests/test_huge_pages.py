"""Weights on huge pages, where the system gives them."""

import ctypes
import errno
import gc
import re
from pathlib import Path

import pytest
import torch

from inferplane.plugin import KVRequest
from inferplane_cpu import huge_pages
from inferplane_cpu.huge_pages import ARENA_BYTES, HUGE_PAGE_BYTES, empty, has_huge_pages, move_to_huge_pages, zeros
from inferplane_cpu.kvcache import layouts

supported = pytest.mark.skipif(not has_huge_pages(), reason="not run: the system gives no huge pages")


def ranges():
    """`[(first, last, kB on huge pages), ...]` of this process's memory."""
    found = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found.append([int(match[1], 16), int(match[2], 16), 0])
        elif line.startswith("AnonHugePages:"):
            found[-1][2] = int(line.split()[1])
    return found


def on_huge_pages(tensor):
    """Kilobytes on huge pages of the mapping that a tensor begins in."""
    return next(kb for first, last, kb in ranges() if first <= tensor.data_ptr() < last)


def refused():
    """Kilobytes of huge pages that the system had none free for, for whatever process, since it started."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return (
        sum(int(counts.get(name, 0)) for name in ("thp_fault_fallback", "thp_collapse_alloc_failed"))
        * HUGE_PAGE_BYTES
        // 1024
    )


@supported
def test_new_memory_is_on_huge_pages():
    before = refused()
    made = [empty(3, 2**20) for _ in range(8)]
    for tensor in made:
        tensor.fill_(1)
    assert all(t.data_ptr() % 64 == 0 and t.shape == (3, 2**20) for t in made)
    assert on_huge_pages(made[0]) + refused() - before >= 8 * 3 * 1024
    for i, tensor in enumerate(made):
        tensor.fill_(i)
    assert [int(t.max()) for t in made] == list(range(8)), "they do not overlap"


@supported
def test_more_than_a_room():
    tensor = empty(ARENA_BYTES + 1)
    tensor[-1] = 7
    assert tensor.shape == (ARENA_BYTES + 1,) and int(tensor[-1]) == 7


@supported
def test_memory_goes_back():
    tensor = empty(2 * ARENA_BYTES)
    at = tensor.data_ptr()
    empty(ARENA_BYTES)  # the next room: nothing but the tensor holds the first
    assert any(first <= at < last for first, last, _ in ranges())
    del tensor
    gc.collect()
    assert not any(first <= at < last for first, last, _ in ranges())


@supported
def test_settled_memory_keeps_what_it_holds(monkeypatch):
    advise, asked_for, refusals = ctypes.CDLL(None, use_errno=True).madvise, set(), set()
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def switched(at, nbytes, advice):
        asked_for.update(range(at // HUGE_PAGE_BYTES, -(-(at + nbytes) // HUGE_PAGE_BYTES)))
        code = advise(at, nbytes, advice)
        if code:
            refusals.add(errno.errorcode[ctypes.get_errno()])
        return code

    monkeypatch.setattr(huge_pages, "_madvise", lambda: switched)
    tensor = torch.arange(8 * HUGE_PAGE_BYTES, dtype=torch.uint8)
    at = tensor.data_ptr()
    move_to_huge_pages(tensor)
    assert huge_pages.wait_for_huge_pages()
    assert tensor.data_ptr() == at and torch.equal(tensor, torch.arange(8 * HUGE_PAGE_BYTES, dtype=torch.uint8))
    assert asked_for >= {*range(at // HUGE_PAGE_BYTES, -(-(at + 8 * HUGE_PAGE_BYTES) // HUGE_PAGE_BYTES))}
    # The system may refuse, and take them back: a machine with little memory, or with whoever looks at its pages.
    held = on_huge_pages(tensor)
    if huge_pages._collapses() and held < 7 * HUGE_PAGE_BYTES // 1024:
        pytest.skip(f"not held: the system has {held} kB of it on huge pages (it refused: {sorted(refusals)})")


def test_a_page_that_cannot_be_moved_does_not_keep_the_others_from_it(monkeypatch):
    moved = set()

    def collapse(at, nbytes, advice):
        """As Linux does: it ends at the first that cannot be moved."""
        assert advice == huge_pages.COLLAPSE and at % HUGE_PAGE_BYTES == nbytes % HUGE_PAGE_BYTES == 0
        for page in range(at // HUGE_PAGE_BYTES, (at + nbytes) // HUGE_PAGE_BYTES):
            if page in stuck:
                return -1
            moved.add(page)
        return 0

    monkeypatch.setattr(huge_pages, "_collapses", lambda: True)
    monkeypatch.setattr(huge_pages, "_madvise", lambda: collapse)
    for stuck in [(), (3,), (5,), (8,), (3, 5, 8)]:
        moved.clear()
        huge_pages._move(3 * HUGE_PAGE_BYTES + 64, 8 * HUGE_PAGE_BYTES + 64)
        assert moved == set(range(3, 9)) - set(stuck), "those at its ends too"
    stuck = range(5, 1000)
    moved.clear()
    calls = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *given: calls.append(given) or collapse(*given))
    huge_pages._move(0, 1000 * HUGE_PAGE_BYTES)
    assert moved == set(range(5)) and len(calls) < 20, "it has none, and is left alone"


def test_nothing_is_moved_where_the_system_has_huge_pages_off(tmp_path, monkeypatch):
    switched = tmp_path / "enabled"
    switched.write_text("always madvise [never]\n")
    assert not has_huge_pages(switched) and not has_huge_pages(tmp_path / "absent")
    monkeypatch.setattr(huge_pages, "has_huge_pages", lambda: False)
    monkeypatch.setattr(huge_pages._mover, "add", lambda storage: pytest.fail("moved"))
    move_to_huge_pages(torch.zeros(4 * HUGE_PAGE_BYTES, dtype=torch.uint8))
    assert empty(4, 5).shape == (4, 5) and zeros(20).tolist() == [0] * 20


@supported
def test_without_an_arena_a_weight_lies_elsewhere(monkeypatch):
    def full(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(huge_pages, "_arena", huge_pages._Arena())
    monkeypatch.setattr(huge_pages.mmap, "mmap", full)
    assert empty(4, 5).shape == (4, 5) and zeros(20).tolist() == [0] * 20


@supported
@pytest.mark.parametrize("layout", layouts(), ids=lambda layout: layout.name)
def test_a_cache_is_zeros_on_huge_pages_that_nobody_has_touched(layout):
    blocks, before = 16 * HUGE_PAGE_BYTES // (16 * 8 * 128), refused()
    kv = layout.build(KVRequest("gqa", 8, 128, 128), blocks, torch.bfloat16, torch.device("cpu"))
    entries = kv.list_tensors()[0]  # of spans a view, between other entries of the same memory
    first = torch.empty(0, dtype=torch.uint8).set_(entries.untyped_storage())
    first = first[entries.storage_offset() * entries.element_size() :]
    touched = on_huge_pages(first)
    first[: 4 * HUGE_PAGE_BYTES].fill_(1)
    assert on_huge_pages(first) - touched + refused() - before >= 3 * HUGE_PAGE_BYTES // 1024
    assert on_huge_pages(first) - touched <= 5 * HUGE_PAGE_BYTES // 1024, "what lies behind takes none"
    others = [t for t in kv.list_tensors()[1:] if t.is_contiguous()]  # none of those between the same entries
    assert not first[4 * HUGE_PAGE_BYTES :].any() and not any(t.view(torch.uint8).any() for t in others)


def test_nothing():
    assert empty(0, 64).shape == (0, 64) and zeros(0).shape == (0,)
