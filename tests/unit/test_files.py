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


@pytest.mark.skipif(os.geteuid() != 0, reason="not run: only root can make a link of another user")
@pytest.mark.parametrize("target", ["a.json", "new.json", "/etc/none", "folder/a.json"])
def test_a_link_of_another_user_is_not_followed(target, tmp_path):
    """As one that somebody has put into /tmp. Kind of advisory: link following (CWE-59)."""
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "a.json", tmp_path / "folder" / "a.json"):
        path.write_text("before")
    link = tmp_path / "link"
    link.symlink_to(target)
    os.lchown(link, 65534, 65534)
    for act in (lambda: write_atomically(link, "after"), lambda: check_writable(link)):
        with pytest.raises(UsageError, match="a link that another user has made, to /"):
            act()
    assert {path.read_text() for path in tmp_path.rglob("a.json")} == {"before"} and link.is_symlink()
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize("name", ["x" * 300, ".", "none/a.json", "a\0b"])
def test_what_could_not_be_written_is_told_before(name, tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        check_writable(tmp_path / name)
    assert not list(tmp_path.iterdir())


FULL_DISK = """
import resource
from pathlib import Path
from inferplane.errors import UsageError
from inferplane.files import write_atomically

resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
try:
    write_atomically(Path({path!r}), "x" * 100_000)
except UsageError as error:
    print(error.what)
"""


@pytest.mark.parametrize("size", [0, 1, 4096, 99_999])
@pytest.mark.parametrize("before", [None, "before"])
def test_a_full_disk_leaves_no_half_of_a_file(before, size, tmp_path):
    """Kind of advisory: resource exhaustion that corrupts what was there (CWE-400)."""
    path = tmp_path / "a.json"
    if before is not None:
        path.write_text(before)
    code = FULL_DISK.format(size=size, path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot be written: File too large" in done.stdout, done.stdout
    assert (path.read_text() if path.exists() else None) == before
    assert [p.name for p in tmp_path.iterdir()] == ([] if before is None else ["a.json"])
