"""A disk that is full while a calibrated copy is written: one error that says what is needed, no half of a copy, and
the same bytes once there is space."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import SafetensorError

from inferplane.calibrate import calibrate
from inferplane.calibrate import partial as partial_module
from inferplane.calibrate import run as run_module
from inferplane.calibrate.partial import PartialCalibration, count_bytes
from inferplane.errors import CapacityError
from inferplane.models.writing import safetensors_writer
from inferplane.models.writing.disk_space import check_space
from inferplane.models.writing.quantize import QuantizedCopy, quantize_checkpoint
from tests.e2e.tiny_models import llama_config, random_model
from tests.unit.calibrate.test_run import origin_of, settings_of

LAYERS = 3
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    random_model(llama_config(num_hidden_layers=LAYERS, hidden_size=128)).save_pretrained(folder)
    return folder


def write(model, folder, calibrated=None, written=None):
    """Calibrate and write a copy; `calibrated` and `written` are called as layers and tensors are done."""
    origin, settings = origin_of(model), settings_of("smooth", vocab=60)
    beside = folder.with_name(folder.name + ".calibration")

    def run(copy):
        return calibrate(copy, settings, beside, None, calibrated)

    return quantize_checkpoint(origin, "a8w8", folder, "test", written, run)


def bytes_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "copy"
    write(model, folder)
    return bytes_of(folder)


class HalfWritten:
    """A file of which some bytes are written before the disk is full."""

    def __init__(self, file, left: int) -> None:
        self.file, self.left = file, left

    def __getattr__(self, name: str):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *unused: object) -> None:
        self.file.close()

    def write(self, data) -> int:
        size = len(memoryview(data).cast("B"))
        if size > self.left:
            self.file.write(memoryview(data).cast("B")[: self.left])
            raise FULL
        self.left -= size
        return self.file.write(data)


def fill_at_state(monkeypatch, number: int) -> None:
    """The disk is full while this file of a layer's state is written, counted from 0: two a layer."""
    count, save = iter(range(100)), partial_module.save_file

    def half(tensors, path, metadata) -> None:
        if next(count) != number:
            return save(tensors, path, metadata=metadata)
        Path(path).write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(partial_module, "save_file", half)


def fill_at_shard(monkeypatch, left: int) -> None:
    """The disk is full after so many bytes of the copy's weights."""

    def half(*args) -> HalfWritten:
        return HalfWritten(open(*args), left)

    monkeypatch.setattr(safetensors_writer, "open", half, raising=False)


def fill_at_text(monkeypatch, name: str) -> None:
    """The disk is full while a file of text is written."""
    write_text = Path.write_text

    def half(path, text, **options) -> int:
        if path.stem != name:
            return write_text(path, text, **options)
        write_text(path, text[:10], **options)
        raise FULL

    monkeypatch.setattr(Path, "write_text", half)


FAILURES = {
    "settings of the calibration": (fill_at_text, "settings", 0),
    "first layer": (fill_at_state, 0, 0),
    "hidden states behind the first layer": (fill_at_state, 1, 0),
    "second layer": (fill_at_state, 2, 1),
    "hidden states behind the last layer": (fill_at_state, 2 * LAYERS - 1, LAYERS - 1),
    "header of the weights": (fill_at_shard, 100, LAYERS),
    "weights": (fill_at_shard, 100_000, LAYERS),
    "config": (fill_at_text, "config", LAYERS),
    "model card": (fill_at_text, "README", LAYERS),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_it_goes_on_to_the_same_bytes(failure, model, whole, tmp_path, monkeypatch):
    fill, at, done = FAILURES[failure]
    fill(monkeypatch, at)
    with pytest.raises(CapacityError) as raised:
        write(model, tmp_path / "copy")
    message = str(raised.value)
    assert "is full: " in message and " are free. To do: free space" in message
    assert "then run the same command, which goes on with what is calibrated" in message
    assert ("copy.calibration takes up to" in message) == (done < LAYERS) and "copy takes up to" in message
    assert {path.name for path in tmp_path.iterdir()} <= {"copy.calibration"}
    assert not list((tmp_path / "copy.calibration").glob("*.partial"))
    assert PartialCalibration(tmp_path / "copy.calibration").done == done
    monkeypatch.undo()
    calibrated, run = [], PartialCalibration.add
    monkeypatch.setattr(PartialCalibration, "add", lambda self, *args: calibrated.append(1) or run(self, *args))
    write(model, tmp_path / "copy")
    assert bytes_of(tmp_path / "copy") == whole and len(calibrated) == LAYERS - done


def test_a_kill_while_its_settings_are_written(model, whole, tmp_path):
    (tmp_path / "copy.calibration").mkdir()
    (tmp_path / "copy.calibration" / "settings.partial").write_text("{")
    write(model, tmp_path / "copy")
    assert bytes_of(tmp_path / "copy") == whole


def test_what_is_needed_is_said_before_anything_is_calibrated(model, tmp_path, monkeypatch):
    """It is no less than what is written, and hardly more."""
    stated, most = [], [0, 0]
    monkeypatch.setattr(run_module, "check_space", lambda folder, takes: stated.append(takes))
    save = partial_module._save

    def observe(path, tensors, metadata) -> None:
        save(path, tensors, metadata)
        most[0] = max(most[0], count_bytes(path.parent))

    monkeypatch.setattr(partial_module, "_save", observe)
    write(model, tmp_path / "copy")
    most[1] = count_bytes(tmp_path / "copy")
    (needed,) = stated
    assert all(real <= said <= 1.1 * real + 2**17 for real, said in zip(most, needed.values(), strict=True))
    total = sum(needed.values())
    monkeypatch.setattr(run_module, "check_space", check_space)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": total - 1}))
    with pytest.raises(
        CapacityError,
        match=r"other\.calibration takes up to .* more and the copy takes up to .* more, and the disk has",
    ):
        write(model, tmp_path / "other")
    assert not list(tmp_path.glob("other*"))


# -- a disk that is small


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root mounts")
@pytest.mark.parametrize("when", ["a layer is calibrated", "weights are written"])
def test_a_small_disk_that_others_fill(when, model, whole, tmp_path):
    """There is enough at the beginning; then another process takes all but some KiB."""
    disk = tmp_path / "disk"

    def fill(done: int, total: int) -> None:
        left = os.statvfs(disk)
        if done == 1 and not (disk / "other").exists():
            with open(disk / "other", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize - 2**13)

    calibrated, written = (fill, None) if when == "a layer is calibrated" else (None, fill)
    with small_disk(disk, 8 * 2**20):
        with pytest.raises(CapacityError, match=r"The disk of .* is full: .* and .* KiB are free"):
            write(model, disk / "copy", calibrated, written)
        assert {path.name for path in disk.iterdir()} == {"copy.calibration", "other"}
        assert PartialCalibration(disk / "copy.calibration").done == (1 if written is None else LAYERS)
        (disk / "other").unlink()
        write(model, disk / "copy")
        assert bytes_of(disk / "copy") == whole


def test_the_copy_counts_the_files_that_it_takes_over(model, tmp_path):
    origin = origin_of(model)
    before = QuantizedCopy(origin, "a8w8").max_bytes
    (model / "tokenizer.json").write_bytes(b" " * 10_000)
    try:
        assert QuantizedCopy(origin, "a8w8").max_bytes == before + 10_000
    finally:
        (model / "tokenizer.json").unlink()
