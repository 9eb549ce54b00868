"""Shard indexes that cannot be meant, or that do not fit their files: each is one error before a tensor is read."""

from __future__ import annotations

import json
import os
import re

import pytest

from inferplane.models import SafetensorsFolder
from tests.unit.support.hostile import entry, read_all, refused, safetensors

INDEX = "model.safetensors.index.json"
ONE, OTHER = "model-1.safetensors", "model-2.safetensors"
WHERE = {"a": ONE, "b": OTHER}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / ONE).write_bytes(safetensors({"a": entry()}, bytes(8)))
    (tmp_path / OTHER).write_bytes(safetensors({"b": entry()}, bytes(8)))
    write(tmp_path, WHERE)
    return tmp_path


def write(folder, where, **more):
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": where, **more}))


def test_the_good_index_is_read(folder):
    assert set(read_all(folder)) == {"a", "b"}
    write(folder, WHERE, metadata={"total_size": 1e9, "more": [{"nested": [None, True, "x"]}, []]}, unknown={})
    assert set(read_all(folder)) == {"a", "b"}
    content = (folder / OTHER).read_bytes()
    (folder / OTHER).unlink()
    (folder / "blob").write_bytes(content)
    (folder / OTHER).symlink_to("blob")
    assert set(read_all(folder)) == {"a", "b"}


def test_a_wrong_total_is_told(folder):
    """Both figures; the tensors are read, since indexes that were published are wrong too."""
    assert SafetensorsFolder(folder).complaints == ()
    for said in ("17", "0", "1.7e1", "-3"):
        text = json.dumps({"metadata": {"total_size": 12321}, "weight_map": WHERE}).replace("12321", said)
        (folder / INDEX).write_text(text)
        (told,) = SafetensorsFolder(folder).complaints
        assert f"{float(said):.0f} bytes (total_size), its files hold 16" in told and str(folder / INDEX) in told
        assert set(read_all(folder)) == {"a", "b"}
    for nothing in ({}, {"total_size": None}, {"total_size": "much"}, {"total_size": [17]}, [], 17):
        write(folder, WHERE, metadata=nothing)
        assert SafetensorsFolder(folder).complaints == ()
    write(folder, WHERE, metadata={"total_size": 16.0})
    assert SafetensorsFolder(folder).complaints == ()


def many(count):
    """So many tensors of one file."""
    return ",".join(f'"{i}":"a.safetensors"' for i in range(count))


TEXTS = {
    "empty": ("", "expected"),
    "no object": ("[]", "expected"),
    "byte order mark": ("\ufeff" + json.dumps({"weight_map": WHERE}), "expected"),
    "not closed": ('{"weight_map": {"a": "model-1.safetensors"}', "expected"),
    "goes on": (json.dumps({"weight_map": WHERE}) + "{}", "goes on"),
    "no weight_map": ("{}", "no weight_map"),
    "empty weight_map": ('{"weight_map": {}}', "no weight_map"),
    "weight_map null": ('{"weight_map": null}', "expected"),
    "weight_map a list": ('{"weight_map": [["a", "model-1.safetensors"]]}', "expected"),
    "weight_map twice": ('{"weight_map": {"a": "model-1.safetensors"}, "weight_map": {}}', "weight_map is there twice"),
    "tensor twice": (
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "a": "model-2.safetensors"}}',
        "tensor 'a' is there twice",
    ),
    "deep lists": ('{"metadata":' + "[" * 100_000, "16 levels"),
    "deep objects": ('{"metadata":' + '{"a":' * 100_000, "16 levels"),
    "many values": ('{"metadata":[' + "[]," * 5_000_000 + "[]]}", "10000 values"),
    "bad number": ('{"metadata": {"total_size": 0x10}}', "expected"),
    "a long name": ('{"weight_map": {"' + "x" * 20_000_000 + '": ""}}', "does not end within 1024"),
    "a long name of two kinds": ('{"weight_map": {"' + "x" * 20_000_000 + '\U0001f600": ""}}', "does not end within"),
    "long metadata": ('{"metadata":{"a":"' + "x" * 20_000_000 + '\U0001f600"},"weight_map":{}}', "no weight_map"),
    "too many tensors": ('{"weight_map":{' + many(400_000) + "}}", "more than 196608 tensors"),
    "many tensors, then junk": ('{"weight_map":{' + many(190_000) + "}}x", "goes on"),
    "many files": (
        '{"weight_map":{' + ",".join(f'"{i}":"{i}.safetensors"' for i in range(300_000)) + "}}",
        "more than 4096 files",
    ),
    "bad escape": (r'{"weight_map": {"\q": "model-1.safetensors"}}', "escape"),
}
FILES = {
    "parent": "../model-1.safetensors",
    "deeper": "sub/model-1.safetensors",
    "absolute": "/etc/passwd.safetensors",
    "backslash": "..\\\\model-1\n.safetensors",
    "dots": "..",
    "nothing": "",
    "other suffix": "config.json",
    "pickle": "pytorch_model.bin",
    "longer than names can be": "x" * 300 + ".safetensors",
    "more bytes than names can have": "\u00e9" * 130 + ".safetensors",
    "zero byte": "model-1\0.safetensors",
    "number": 3,
    "list": [ONE],
    "null": None,
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_that_are_no_index(case, folder):
    text, says = TEXTS[case]
    (folder / INDEX).write_text(text)
    message = refused(lambda: SafetensorsFolder(folder))
    assert str(folder / INDEX) in message and re.search(says, message), message


@pytest.mark.parametrize("case", FILES)
def test_names_that_are_no_shard(case, folder):
    write(folder, {"a": ONE, "b": FILES[case]})
    message = refused(lambda: SafetensorsFolder(folder))
    assert str(folder / INDEX) in message and "is not a shard index" in message


def test_bad_text_encoding(folder):
    (folder / INDEX).write_bytes(b'{"weight_map": {"\xff": "model-1.safetensors"}}')
    assert "not UTF-8" in refused(lambda: SafetensorsFolder(folder))


def test_a_hundred_megabytes(folder):
    with open(folder / INDEX, "wb") as file:
        file.write(b'{"weight_map": {')
        file.truncate(100 * 2**20)
    assert "104857600 bytes; at most" in refused(lambda: SafetensorsFolder(folder))


@pytest.mark.parametrize("kind", ["pipe", "loop", "folder", "nowhere", "device"])
@pytest.mark.parametrize("name", [INDEX, OTHER])
def test_what_is_no_file(kind, name, folder):
    """A pipe would block whoever opens it."""
    path = folder / name
    path.unlink()
    {
        "pipe": lambda: os.mkfifo(path),
        "loop": lambda: path.symlink_to(path.name),
        "folder": path.mkdir,
        "nowhere": lambda: path.symlink_to("nothing-here"),
        "device": lambda: path.symlink_to("/dev/zero"),
    }[kind]()
    assert name in refused(lambda: SafetensorsFolder(folder))


MISFITS = {
    "a file is missing": (lambda f: (f / OTHER).unlink(), r"names 1 file\(s\) that are not there: model-2"),
    "a file names nothing": (lambda f: write(f, {**WHERE, "c": "model-3.safetensors"}), "model-3.safetensors"),
    "a tensor that the index does not name is there twice": (
        lambda f: (write(f, {"a": ONE, "b": OTHER}), add_c(f / ONE, 0), add_c(f / OTHER, 1)),
        "Tensor 'c' is in model-1.safetensors and again in model-2.safetensors, with other values",
    ),
    "a shard is damaged": (lambda f: (f / OTHER).write_bytes(bytes(20)), "model-2.safetensors is no safetensors file"),
    "a shard is empty": (lambda f: (f / OTHER).write_bytes(b""), "model-2.safetensors is no safetensors file"),
    "a shard is cut off": (
        lambda f: (f / OTHER).write_bytes((f / OTHER).read_bytes()[:-1]),
        "model-2.safetensors.*only 7 are there",
    ),
}


def add_c(path, value):
    """Write a file with its own tensor and another one, `c`."""
    own = "a" if path.name == ONE else "b"
    path.write_bytes(safetensors({own: entry(), "c": entry(offsets=(8, 16))}, bytes(8) + bytes([value] * 8)))


ODDITIES = {
    "a tensor is missing": (lambda f: write(f, {**WHERE, "c": ONE}), r"names 1 tensor\(s\) .*not hold: c", {"a", "b"}),
    "a tensor is elsewhere": (
        lambda f: write(f, {"a": OTHER, "b": ONE}),
        r"places 2 tensor\(s\) in other files than those that hold them: a, b\.",
        {"a", "b"},
    ),
    "a tensor is there twice, and the index says where": (
        lambda f: (f / OTHER).write_bytes(safetensors({"a": entry(), "b": entry(offsets=(8, 16))}, bytes(16))),
        "",
        {"a", "b"},
    ),
    "a tensor is there twice alike": (
        lambda f: (write(f, WHERE, metadata={}), add_c(f / ONE, 1), add_c(f / OTHER, 1)),
        "",
        {"a", "b", "c"},
    ),
    "a whole model beside it": (
        lambda f: (f / "model.safetensors").write_bytes(
            safetensors({"a": entry(), "b": entry(offsets=(8, 16))}, bytes(16))
        ),
        "holds model.safetensors and an index of other files; the index is not used",
        {"a", "b"},
    ),
    "a part of the model beside it": (
        lambda f: (f / "model.safetensors").write_bytes((f / ONE).read_bytes()),
        "holds model.safetensors and an index of other files; model.safetensors is not used",
        {"a", "b"},
    ),
}


@pytest.mark.parametrize("case", ODDITIES)
def test_oddities_are_told_and_what_is_there_is_read(case, folder):
    change, says, there = ODDITIES[case]
    change(folder)
    source = SafetensorsFolder(folder)
    assert set(source.names()) == there == set(read_all(folder))
    assert [re.search(says, told) is not None for told in source.complaints] == [True] * bool(says)


@pytest.mark.parametrize("case", MISFITS)
def test_an_index_and_files_that_do_not_fit(case, folder):
    change, says = MISFITS[case]
    change(folder)
    message = refused(lambda: SafetensorsFolder(folder))
    assert re.search(says, message), message


@pytest.mark.parametrize("case", TEXTS)
def test_a_damaged_index_beside_a_whole_model_is_told(case, folder):
    """transformers does not open the index of a folder that holds `model.safetensors`."""
    text, _ = TEXTS[case]
    both = safetensors({"a": entry(), "b": entry(offsets=(8, 16))}, bytes(16))
    (folder / "model.safetensors").write_bytes(both)
    (folder / INDEX).write_text(text)
    source = SafetensorsFolder(folder)
    assert set(source.names()) == {"a", "b"} == set(read_all(folder))
    (told,) = source.complaints
    assert str(folder / INDEX) in told and told.endswith("model.safetensors is read without it.")


def test_a_damaged_index_beside_a_damaged_model_is_refused(folder):
    (folder / "model.safetensors").write_bytes(b"{")
    (folder / INDEX).write_text("{")
    assert "model.safetensors is no safetensors file" in str(refused(lambda: SafetensorsFolder(folder)))
