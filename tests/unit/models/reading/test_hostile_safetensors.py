"""Safetensors files that cannot be meant: each is one clear error, quickly, without memory, before anything is read."""

from __future__ import annotations

import itertools
import json
import os
import re
import struct

import pytest
import torch
from safetensors.torch import load as official

from inferplane.models import SafetensorsFolder
from inferplane.types.placement import WHOLE
from tests.unit.support.hostile import GOOD, TWO, entry, read_all, refused, safetensors

DATA = bytes(range(16))


def header(**changes):
    return safetensors({**TWO, **changes}, DATA)


def raw(text, data=DATA):
    return safetensors(text if isinstance(text, bytes) else text.encode(), data)


def tensors(text):
    """A header of one tensor whose entry is this text."""
    return raw('{"a":' + text + "}")


def many(count):
    """The beginning of a header of so many tensors without elements."""
    return "{" + "".join(f'"{i}":' + '{"data_offsets":[0,0],"shape":[0],"dtype":"U8"},' for i in range(count))


CASES = {
    # the length
    "empty": (b"", "0 bytes"),
    "seven bytes": (b"\x02" + bytes(6), "the file has 7"),
    "only a length": (struct.pack("<Q", 2), "the file has 8"),
    "length 0": (safetensors(b"", DATA), "header has 0 bytes"),
    "length 1": (safetensors(b"{", DATA), "header has 1 bytes"),
    "length beyond the file": (safetensors(TWO, DATA, length=10_000), "header has 10000 bytes"),
    "length of all ones": (b"\xff" * 8 + GOOD[8:], "header has 18446744073709551615 bytes"),
    "length negative": (struct.pack("<q", -2) + GOOD[8:], "no safetensors file"),
    "length one short": (safetensors(TWO, DATA, length=len(json.dumps(TWO)) - 1), "damaged header"),
    "length one long": (safetensors(TWO, DATA, length=len(json.dumps(TWO)) + 1), "goes on after its end"),
    # the text
    "no object": (raw("[]"), "begins with"),
    "number": (raw("17"), "begins with"),
    "space first": (raw(b" " + json.dumps(TWO).encode()), "begins with"),
    "byte order mark": (raw(b"\xef\xbb\xbf" + json.dumps(TWO).encode()), "begins with"),
    "bad UTF-8": (raw(json.dumps(TWO).encode().replace(b'"a"', b'"\xff"')), "invalid start byte"),
    "half a surrogate": (raw(json.dumps(TWO).encode().replace(b'"a"', b'"\xed\xa0\x80"')), "invalid continuation"),
    "control character": (raw(json.dumps(TWO).replace('"a"', '"\n"')), "control character"),
    "not closed": (raw(json.dumps(TWO)[:-1]), "expected"),
    "comma too many": (raw(json.dumps(TWO)[:-1] + ",}"), "expected"),
    "single quotes": (raw(str(TWO)), "expected"),
    "comment": (raw("{/* */" + json.dumps(TWO)[1:]), "expected"),
    "deep lists": (raw("[" * 100_000), "begins with"),
    "deep objects": (raw('{"a":' * 100_000), "'a' is unexpected"),
    "deep metadata": (raw('{"__metadata__":{"a":' + "[" * 100_000), "16 levels"),
    "a long text of nothing": (raw("{" + " " * 16_000_000), "expected"),
    "many empty lists": (raw('{"__metadata__":{"a":[' + "[]," * 4_000_000 + "[]]}}"), "10000 values"),
    "many sizes": (tensors('{"dtype":"F32","shape":[' + "1," * 4_000_000 + '1],"data_offsets":[0,4]}'), "'a'.*sizes"),
    "header beyond the limit": (safetensors(b"{" + b" " * 27_000_000, DATA), "at most 16777216"),
    "a long name": (raw('{"' + "x" * 16_000_000 + '":{"dtype":"F32"}}'), "does not end within 1024"),
    "a long name of two kinds": (raw('{"' + "x" * 16_000_000 + '\U0001f600":{}}'), "does not end within 1024"),
    "a long dtype": (tensors('{"dtype":"' + "x" * 16_000_000 + '"}'), "'a'.*does not end within 1024"),
    "long metadata": (raw('{"__metadata__":{"a":"' + "x" * 16_000_000 + '\U0001f600"},"t":{}}'), "lacks its dtype"),
    "metadata of escapes": (raw('{"__metadata__":{"a":"' + r"\"" * 8_000_000 + '"},"t":{}}'), "lacks its dtype"),
    "metadata with a bad escape": (raw(r'{"__metadata__":{"a":"\x"}}'), "bad escape"),
    "metadata not closed": (raw('{"__metadata__":{"a":"' + "x" * 16_000_000), "no end"),
    "too many tensors": (raw(many(250_000)), "more than 49152 tensors"),
    "many tensors, then junk": (raw(many(49_000) + "x"), "expected"),
    # entries
    "entry no object": (tensors("3"), "tensor 'a'"),
    "entry null": (tensors("null"), "tensor 'a'"),
    "entry empty": (tensors("{}"), "lacks its dtype"),
    "without dtype": (tensors('{"shape":[2],"data_offsets":[0,8]}'), "lacks its dtype"),
    "without shape": (tensors('{"dtype":"F32","data_offsets":[0,8]}'), "lacks its dtype, its shape"),
    "without offsets": (tensors('{"dtype":"F32","shape":[2]}'), "two data_offsets"),
    "one offset": (header(b=entry("F16", (2, 2), (8,))), "two data_offsets"),
    "three offsets": (header(b=entry("F16", (2, 2), (8, 16, 16))), "two data_offsets"),
    "unknown entry": (header(b={**entry("F16", (2, 2), (8, 16)), "order": "C"}), "'order' is unexpected"),
    "dtype twice": (tensors('{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}'), "'dtype' is .* twice"),
    "unknown dtype": (header(a=entry("F31")), "'F31' is none of F64"),
    "dtype a list": (tensors('{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}'), "tensor 'a'"),
    "dtype lower case": (header(a=entry("f32")), "'f32' is none of"),
    "name twice": (raw(json.dumps(TWO)[:-1] + ', "a": ' + json.dumps(TWO["a"]) + "}"), "tensor 'a' is there twice"),
    "name twice, spelled otherwise": (
        raw(r'{"a":%s,"\u0061":%s}' % ((json.dumps(TWO["a"]),) * 2)),
        "'a' is there twice",
    ),
    "metadata a string": (header(__metadata__="pt"), "expected"),
    "metadata with a number": (header(__metadata__={"format": 3}), "no string under 'format'"),
    "metadata with an object": (header(__metadata__={"format": {}}), "no string under 'format'"),
    "metadata twice": (raw('{"__metadata__":{},"__metadata__":{},' + json.dumps(TWO)[1:]), "twice"),
    # shapes
    "shape negative": (header(a=entry(shape=(-2,))), "tensor 'a': a list of sizes"),
    "shape of fractions": (header(a=entry(shape=(2.0,))), "a list of sizes"),
    "shape of strings": (header(a=entry(shape=("2",))), "a list of sizes"),
    "shape true": (header(a=entry(shape=(True, 2))), "a list of sizes"),
    "shape null": (header(a={**entry(), "shape": None}), "a list of sizes"),
    "shape exponent": (tensors('{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}'), "a list of sizes"),
    "shape leading zero": (tensors('{"dtype":"F32","shape":[02],"data_offsets":[0,8]}'), "a list of sizes"),
    "shape huge": (header(a=entry(shape=(1 << 40, 1 << 20))), r"bytes 0 to 8, but shape \[1099511627776, "),
    "shape that no memory holds": (header(a=entry(shape=(1 << 40, 1 << 40))), "no memory holds"),
    "shape of nothing, that no memory holds": (header(a=entry(shape=(0, 1 << 63), offsets=(0, 0))), "no memory holds"),
    "shape wraps to its size": (header(a=entry("U8", (1 << 32, 1 << 32), (0, 0))), "no memory holds"),
    "shape wraps to 8": (header(a=entry("F32", ((1 << 62) + 2,), (0, 8))), "no memory holds"),
    "shape of a huge number": (header(a=entry(shape=(10**30,))), "a list of sizes"),
    "too many dimensions": (header(a=entry(shape=(1,) * 20 + (2,))), "21 dimensions"),
    "shape larger": (header(a=entry(shape=(3,))), "takes 12"),
    "shape smaller": (header(a=entry(shape=(1,))), "takes 4"),
    "dtype wider": (header(a=entry("F64")), "takes 16"),
    # places
    "offsets reversed": (header(a=entry(offsets=(8, 0))), "bytes 8 to 0"),
    "offsets negative": (header(a=entry(offsets=(-8, 0))), "'a': a list of sizes"),
    "offsets huge": (header(a=entry(offsets=(1 << 60, (1 << 60) + 8))), "tensor 'b' at byte 8 leaves a gap"),
    "overlap": (header(b=entry("F16", (2, 2), (4, 12))), "tensor 'b' at byte 4 overlaps tensor 'a', which ends at 8"),
    "the same bytes twice": (header(b=entry("F32", (2,), (0, 8))), "'b' at byte 0 overlaps tensor 'a'"),
    "a hole": (safetensors({**TWO, "b": entry("F16", (2, 2), (12, 20))}, bytes(20)), "'b' at byte 12 leaves a gap"),
    "a hole at the beginning": (safetensors({"a": entry(offsets=(4, 12))}, bytes(12)), "gap behind the header"),
    "an empty tensor inside another": (header(c=entry(shape=(0,), offsets=(4, 4))), "'c' at byte 4 overlaps"),
    "an empty tensor far away": (header(c=entry(shape=(0,), offsets=(99, 99))), "'c' at byte 99 leaves a gap"),
    "past the end": (safetensors(TWO, DATA[:12]), "'b' ends at byte 16, but only 12"),
    "bytes at the end": (safetensors(TWO, DATA + b"!"), "1 bytes behind its last tensor"),
    "no tensors but bytes": (raw("{}"), "16 bytes behind"),
}


@pytest.mark.parametrize("case", CASES)
def test_damaged_files(case, tmp_path):
    content, says = CASES[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    message = refused(lambda: SafetensorsFolder(tmp_path))
    assert str(tmp_path / "model.safetensors") in message
    assert re.search(says, message), message


def test_the_good_file_is_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    assert {n: t.tolist() for n, t in read_all(tmp_path).items()} == {n: t.tolist() for n, t in official(GOOD).items()}
    for extra in ({"__metadata__": {"format": "pt", "more": '{"[": 1}'}}, {"c": entry(shape=(0, 3), offsets=(8, 8))}):
        (tmp_path / "model.safetensors").write_bytes(header(**extra))
        assert set(read_all(tmp_path)) == {"a", "b", *extra} - {"__metadata__"}
    reordered = json.dumps({n: dict(reversed(e.items())) for n, e in TWO.items()}, indent=2).encode() + b"   "
    (tmp_path / "model.safetensors").write_bytes(safetensors(reordered, DATA))
    assert set(read_all(tmp_path)) == {"a", "b"}
    (tmp_path / "model.safetensors").write_bytes(raw("{}", b""))
    assert read_all(tmp_path) == {}


@pytest.mark.parametrize("part", range(64))
def test_cut_off(part, tmp_path):
    """At every 64th of the file."""
    (tmp_path / "model.safetensors").write_bytes(GOOD[: len(GOOD) * part // 64])
    assert str(tmp_path / "model.safetensors") in refused(lambda: SafetensorsFolder(tmp_path))


@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize("order", list(itertools.permutations(["dtype", "shape", "data_offsets"])))
def test_entries_in_any_order_and_spelling_are_the_same(order, space, tmp_path):
    text = f",{space}".join(f'"{k}":{space}{json.dumps(entry("F32", (2, 2), (0, 16))[k])}' for k in order)
    (tmp_path / "model.safetensors").write_bytes(tensors("{" + text + "}"))
    found = read_all(tmp_path)["a"]
    assert (found.shape, found.dtype) == ((2, 2), torch.float32)


def test_names_are_read_as_they_were_written(tmp_path):
    """Beyond ASCII, with escapes, and as long as may be."""
    names = ["\u00e9\u4e2d\U0001f600", 'a"\\\n\t/', "\u00e9\n", "x" * 1024, "\u00e9" * 512]
    spelled = [json.dumps(n, ensure_ascii=e) for n, e in zip(names, [False, True, False, True, False], strict=True)]
    entries = [json.dumps(entry("U8", (1,), (i, i + 1))) for i in range(len(names))]
    text = ",".join(f"{n}:{e}" for n, e in zip(spelled, entries, strict=True))
    metadata = '"__metadata__":{"a":"\\u00e9\u4e2d\\"\\\\"},'
    (tmp_path / "model.safetensors").write_bytes(raw("{" + metadata + text + "}", bytes(range(5))))
    assert {n: t.tolist() for n, t in read_all(tmp_path).items()} == {n: [i] for i, n in enumerate(names)}


@pytest.mark.parametrize("when", ["header", "tensor"])
def test_what_the_system_refuses(when, tmp_path, monkeypatch):
    """A file without permission is the same error, when it is opened and when a tensor is read."""
    (tmp_path / "model.safetensors").write_bytes(GOOD)

    def refuse(*unused, **more):
        raise PermissionError(13, "Permission denied")

    source = SafetensorsFolder(tmp_path)
    module = {"header": "safetensors_header", "tensor": "file_reader"}[when]
    monkeypatch.setattr(f"inferplane.models.reading.{module}.open", refuse, raising=False)
    read = {
        "header": lambda: SafetensorsFolder(tmp_path),
        "tensor": lambda: source.read_into("a", torch.zeros(2), WHOLE),
    }[when]
    message = refused(read)
    assert f"{tmp_path / 'model.safetensors'} cannot be read: Permission denied" in message


def make_pipe(path):
    os.mkfifo(path)


def make_loop(path):
    path.symlink_to(path.name)


def make_folder(path):
    path.mkdir()


def make_device(path):
    path.symlink_to("/dev/zero")


def make_nothing(path):
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [make_pipe, make_loop, make_folder, make_device, make_nothing])
def test_what_is_no_file(make, tmp_path):
    make(tmp_path / "model.safetensors")
    assert str(tmp_path / "model.safetensors") in refused(lambda: SafetensorsFolder(tmp_path))


def test_links_to_files_are_followed(tmp_path):
    """Hugging Face's cache is made of them."""
    (tmp_path / "blob").write_bytes(GOOD)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob")
    assert set(read_all(tmp_path / "snapshot")) == {"a", "b"}
