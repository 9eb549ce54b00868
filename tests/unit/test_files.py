"""Files that are written whole: what is refused, and what stands at the path already."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from inferplane.errors import UsageError
from inferplane.files import check_writable, write_atomically


@pytest.mark.parametrize("path", ["/", "a\0b", ".", "none/a.json", "x" * 300])
def test_what_cannot_be_written(path, tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        write_atomically(tmp_path / path, "x")
    assert not list(tmp_path.iterdir())


def test_what_stands_at_a_path_stays_what_it_is(tmp_path):
    """A link, a mode, a pipe, a device."""
    path, link, pipe = tmp_path / "a.json", tmp_path / "link", tmp_path / "pipe"
    path.write_text("before")
    path.chmod(0o600)
    link.symlink_to("a.json")
    write_atomically(link, "after")
    assert link.is_symlink() and path.read_text() == "after" and path.stat().st_mode & 0o777 == 0o600
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "told")
        assert pipe.is_fifo() and os.read(reader, 100) == b"told"
    finally:
        os.close(reader)
    command = "from pathlib import Path; from inferplane.files import write_atomically; " + (
        "print('first', flush=True); write_atomically(Path('/dev/stdout'), 'whole')"
    )
    with open(path, "wb") as out:
        subprocess.run([sys.executable, "-c", command], stdout=out, check=True)
    assert path.read_text() == "first\nwhole"
    assert subprocess.run([sys.executable, "-c", command], stdout=subprocess.PIPE).stdout == b"first\nwhole"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "link", "pipe"]


@pytest.mark.parametrize("name", ["x" * 300, ".", "none/a.json", "a\0b"])
def test_what_could_not_be_written_is_told_before(name, tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        check_writable(tmp_path / name)
    assert not list(tmp_path.iterdir())
