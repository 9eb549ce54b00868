"""Headless Chromium, if it is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
Colours = Counter[tuple[int, int, int]]


def look(url: str, folder: Path, *, width: int = 1100, height: int = 1400, seconds: int = 10) -> tuple[str, Colours]:
    """A page's document after its scripts have run for a while, and the colours of its picture with their counts."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("not run: no Chromium on this machine")
    picture = folder / "page.png"
    options = (f"--window-size={width},{height}", f"--virtual-time-budget={1000 * seconds}")
    command = [found, *QUIET, *options, f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run([*command, f"--screenshot={picture}", url], capture_output=True, timeout=120, check=False)
    assert picture.exists(), done.stderr.decode(errors="replace")[-2000:]
    document = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True)
    with Image.open(picture) as image:
        assert image.size == (width, height)
        pixels = image.convert("RGB")
        colours = Counter(dict((c, n) for n, c in pixels.getcolors(maxcolors=2**24)))  # type: ignore[misc,union-attr]
    return document.stdout, colours
