"""Reading safetensors into their destination: any shape, dtype, slice and destination."""

from __future__ import annotations

import math
import os
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from inferplane.errors import CheckpointError
from inferplane.models import SafetensorsFolder
from inferplane.models.reading import checkpoint, file_reader
from inferplane.types.placement import WHOLE, Shard

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
WHOLE_NUMBERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@given(
    shape=st.lists(st.integers(0, 12), max_size=3),
    stored=st.sampled_from(DTYPES + WHOLE_NUMBERS),
    asked=st.sampled_from(DTYPES[:4]),
    parts=st.integers(1, 3),
    axis=st.integers(0, 1),
    chunk=st.sampled_from([1, 40, 2**20]),
    piece=st.sampled_from([1, 24, 2**20]),
    strided=st.booleans(),
)
def test_reads_what_was_written(tmp_path_factory, shape, stored, asked, parts, axis, chunk, piece, strided):
    folder = tmp_path_factory.mktemp("f")
    shape = [n * parts if i == axis else n for i, n in enumerate(shape)]
    value = (torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) * 50).to(stored)
    save_file({"other": torch.full((5,), 7.0), "x": value, "zz": torch.full((5,), 7.0)}, folder / "a.safetensors")
    source = SafetensorsFolder(folder)
    assert source.shape("x") == tuple(shape) and source.dtype("x") == stored
    assert source.shape("y") is None and source.dtype("y") is None and set(source.names()) == {"x", "other", "zz"}
    for rank in range(parts):
        shard = Shard(axis, rank, parts) if axis < len(shape) else WHOLE
        want = value.chunk(parts, axis)[rank] if axis < len(shape) and value.numel() else value
        if not value.numel() and parts > 1:
            continue
        for dtype in (asked, stored):
            room = torch.full((*want.shape, 2), -1.0).to(dtype)
            out = room[..., 0] if strided else torch.full(want.shape, -1.0).to(dtype)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(checkpoint, "CHUNK_BYTES", chunk)
                patch.setattr(file_reader, "PIECE_BYTES", piece)
                source.read_into("x", out, shard)
            assert torch.equal(out.float(), want.to(dtype).float())
            assert not strided or (room[..., 1].float() != 0).all()
    source.close()
    source.close()


def test_wrong_room_is_refused(tmp_path):
    """Else the bytes of the next tensor, or those behind the destination, would be taken."""
    save_file({"a": torch.zeros(4, 6), "b": torch.ones(100)}, tmp_path / "a.safetensors")
    source = SafetensorsFolder(tmp_path)
    for out, shard in ((torch.empty(5, 6), WHOLE), (torch.empty(4, 5), WHOLE), (torch.empty(4, 6), Shard(0, 1, 2))):
        with pytest.raises(CheckpointError, match=r"a \(4, 6\) does not fill"):
            source.read_into("a", out, shard)


def test_files_are_closed(tmp_path):
    save_file({"a": torch.zeros(4)}, tmp_path / "a.safetensors")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    source = SafetensorsFolder(tmp_path)
    source.read_into("a", torch.empty(4), WHOLE)
    source.close()
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before
    source.read_into("a", torch.empty(4), WHOLE)  # and opened again when needed
    source.close()


def readers():
    """Threads that read files."""
    return [t for t in threading.enumerate() if t.name.startswith("inferplane-read")]


def test_no_thread_writes_after_a_read_that_failed(tmp_path, monkeypatch):
    """A file that ends within its first piece, while a slow thread holds another: memory may go once `read` raises."""
    monkeypatch.setattr(file_reader, "PIECE_BYTES", 8)
    path, running, ended = tmp_path / "a", threading.Event(), threading.Event()
    path.write_bytes(bytes(range(64)))
    reader = file_reader.FileReader(path)
    plain = os.preadv

    def slow(file, buffers, start):
        if start == 8:
            running.set()
            time.sleep(0.2)
            got = plain(file, buffers, start)
            ended.set()
            return got
        if start == 0:
            assert running.wait(30)
            return 0
        return plain(file, buffers, start)

    monkeypatch.setattr(os, "preadv", slow)
    with pytest.raises(CheckpointError, match="ends before its tensors do"):
        reader.read(0, memoryview(bytearray(64)))
    assert ended.is_set()
    monkeypatch.setattr(os, "preadv", plain)
    again = bytearray(40)
    reader.read(3, memoryview(again))
    assert again == bytes(range(3, 43))
    assert readers()
    reader.close()
    assert not readers()
    reader.close()


def test_reads_that_give_less_than_was_asked_for(tmp_path, monkeypatch):
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, start: plain(file, [buffers[0][:3]], start))
    monkeypatch.setattr(file_reader, "PIECE_BYTES", 8)
    (tmp_path / "a").write_bytes(bytes(range(64)))
    reader, room = file_reader.FileReader(tmp_path / "a"), bytearray(50)
    reader.read(9, memoryview(room))
    reader.close()
    assert room == bytes(range(9, 59))


def test_threads_that_cannot_be_started(tmp_path, monkeypatch):
    """The error is the system's, no thread is left, and the reader serves again."""
    monkeypatch.setattr(file_reader, "PIECE_BYTES", 8)
    (tmp_path / "a").write_bytes(bytes(range(64)))
    reader, room, plain, started = file_reader.FileReader(tmp_path / "a"), bytearray(64), threading.Thread.start, []

    def start(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        plain(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        patch.setattr(os, "preadv", lambda *call, read=os.preadv: time.sleep(0.05) or read(*call))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            reader.read(0, memoryview(room))
    assert not readers()
    reader.read(0, memoryview(room))
    reader.close()
    assert room == bytes(range(64))


@pytest.mark.parametrize("size", [7, 8, 9, 63])
def test_a_file_that_ends_too_soon(size, tmp_path, monkeypatch):
    monkeypatch.setattr(file_reader, "PIECE_BYTES", 8)
    path = tmp_path / "a"
    path.write_bytes(bytes(size))
    reader = file_reader.FileReader(path)
    with pytest.raises(CheckpointError, match="ends before its tensors do"):
        reader.read(0, memoryview(bytearray(64)))
    reader.close()


def test_nothing_is_read_but_headers(tmp_path):
    """Opening a folder of any size is cheap: a file whose data are a hole opens at once."""
    with open(tmp_path / "a.safetensors", "wb") as file:
        size = 1 << 36
        header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert SafetensorsFolder(tmp_path).shape("a") == (1 << 36,)


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="torch before 2.7")
@pytest.mark.parametrize("shape", [(2, 2), (4,), (3, 1), ()])
def test_scales_that_are_exponents(shape, tmp_path):
    """F8_E8M0, as MX formats and newer FP8 checkpoints store scales."""
    value = torch.tensor([2.0, 0.5, 1.0, 8.0, 0.25])[: math.prod(shape)].reshape(shape)
    save_file({"s": value.to(torch.float8_e8m0fnu)}, tmp_path / "a.safetensors")
    source, out = SafetensorsFolder(tmp_path), torch.empty(shape)
    assert source.dtype("s") is torch.float8_e8m0fnu and source.shape("s") == shape
    source.read_into("s", out, WHOLE)
    source.close()
    assert torch.equal(out, value)
