"""What a download writes to standard error."""

from __future__ import annotations

import io
import sys

import pytest

from inferplane.hub import report_on_stderr
from inferplane.hub.progress import format_size


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_only_terminals_get_a_count(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    with report_on_stderr() as progress:
        progress.say("fetching x")
        progress.count(500_000, 2_000_000_000)
        progress.count(2_000_000_000, 2_000_000_000)
    written = sys.stderr.getvalue()
    assert written.startswith("fetching x\n")
    if stream is Terminal:
        assert "\r  2.0 GB of 2.0 GB" in written and written.endswith("\r")
    else:
        assert written == "fetching x\n"


def test_without_standard_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with report_on_stderr() as progress:
        progress.say("fetching x")
        progress.count(1, 2)


def test_sizes():
    sizes = (0, 999, 1000, 269_060_552, 2_471_645_608, 5e12)
    assert [format_size(size) for size in sizes] == ["0 B", "999 B", "1 kB", "269.1 MB", "2.5 GB", "5.0 TB"]
