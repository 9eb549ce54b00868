"""GGUF files of a repository: which one a name chooses, and its download with all shards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferplane.errors import CheckpointError, UsageError
from inferplane.hub import HubSettings, fetch, find, locate, parse_name
from inferplane.hub.gguf_files import choose_files
from inferplane.hub.progress import SILENT
from tests.unit.hub.hub_server import HubServer, Model

NAMES = [
    *("x-Q4_K_M.gguf", "x-Q4_K_S.gguf", "x.Q8_0.gguf", "mmproj-x-f16.gguf", "x-imatrix.gguf"),
    *("big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "README.md"),
]


@pytest.mark.parametrize(
    ("part", "files"),
    [
        ("Q4_K_M", ["x-Q4_K_M.gguf"]),
        ("q4_k_s", ["x-Q4_K_S.gguf"]),
        ("Q8_0", ["x.Q8_0.gguf"]),
        ("x-Q4_K_M.gguf", ["x-Q4_K_M.gguf"]),
        ("big", ["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"]),
        ("big-00002-of-00002.gguf", ["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"]),
    ],
)
def test_what_a_name_chooses(part, files):
    assert choose_files(NAMES, part, "hf:a/b") == files


@pytest.mark.parametrize(
    ("names", "part", "error", "words"),
    [
        (NAMES, "Q4_K", UsageError, "holds no such GGUF file"),
        (NAMES, None, UsageError, "may be 4 GGUF models"),
        (NAMES, "x", UsageError, "may be 3 GGUF models: x-Q4_K_M, x-Q4_K_S"),
        (["a.safetensors"], "Q4_0", UsageError, "no GGUF model"),
        (NAMES[:-2], "big", CheckpointError, "1 of 2 shards"),
    ],
)
def test_what_cannot_be_chosen(names, part, error, words):
    with pytest.raises(error, match=words):
        choose_files(names, part, "hf:a/b")


def test_a_quantization_is_fetched_and_found_again(server: HubServer, settings: HubSettings):
    files = {name: name.encode() * 100 for name in NAMES}
    server.add("org/gguf", Model({**files, "config.json": b"{}"}))
    name = parse_name("hf:org/gguf:big")
    assert name is not None and find(name, settings) is None
    found = fetch(name, settings=settings, progress=SILENT)
    assert found.path == found.folder / "big-00001-of-00002.gguf"
    assert sorted(path.name for path in found.folder.iterdir()) == NAMES[5:7]
    assert found.path.read_bytes() == files["big-00001-of-00002.gguf"]
    before = len(server.requests)
    assert locate(name, settings=replace(settings, offline=True)) == found == locate(name, settings=settings)
    assert len(server.requests) == before
    other = parse_name("hf:org/gguf:Q8_0")
    assert other is not None
    assert fetch(other, settings=settings, progress=SILENT).file == "x.Q8_0.gguf"
    with pytest.raises(UsageError, match="downloads are off"):
        locate(replace(other, part="Q4_K_M"), settings=replace(settings, offline=True))
