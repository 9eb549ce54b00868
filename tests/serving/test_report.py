"""The page that `inferplane bench --html` writes, as a browser shows it."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.serving.browser import look

MARK, SECOND = (0x24, 0x63, 0xB8), (0xC2, 0x57, 0x1A)
"""Colours of the bars, and of the lines that mark percentiles, in light."""


def test_in_a_browser(tmp_path):
    path = tmp_path / "bench.html"
    command = [sys.executable, "-m", "inferplane", "bench", "latency", "--device", "cpu", "--warmup", "0"]
    command += ["--max-model-len", "128", "--input-len", "12", "--output-len", "6", "--max-num-seqs", "2"]
    done = subprocess.run(
        [*command, "--repeats", "2", "--html", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    document, colours = look(path.as_uri(), tmp_path)
    assert "<h1>latency: demo on cpu</h1>" in document and "Time to first token" in document
    assert document.count("<svg") == text.count("<svg") >= 3
    assert colours[MARK] > 200 and colours[SECOND] > 20, "the plots are not drawn"
    empty = tmp_path / "empty.html"
    empty.write_text(re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL))
    _, without = look(empty.as_uri(), tmp_path)
    assert without[MARK] == without[SECOND] == 0, "these colours do not tell plots from text"
