"""The lock file, and the signatures that it is keyed by."""

import json
import os
import subprocess
import sys

import pytest

from inferplane.binding import read_lock, signature, write_lock
from inferplane.errors import UsageError
from inferplane.ops import Linear
from inferplane.types import Weight
from tests.unit.support.small import F32, tiny_v3

HERE = {"device": "toy", "arch": "chip9", "torch": "2.5"}
CHOICES = {"linear|decode|0123456789ab": "vendor:linear", "attention|mixed|ba9876543210": "other:attend"}


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "lock.json"
    write_lock(path, HERE, CHOICES)
    assert read_lock(path, HERE) == CHOICES and [p.name for p in tmp_path.iterdir()] == ["lock.json"]
    first = path.read_bytes()
    write_lock(path, HERE, dict(reversed(CHOICES.items())))
    assert path.read_bytes() == first, "reviewable: the same choices are the same file"
    assert json.loads(first)["schema"] == 1


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "lock.json"
    write_lock(path, HERE, CHOICES)
    with pytest.raises(TypeError):
        write_lock(path, {"device": object()}, {})
    assert read_lock(path, HERE) == CHOICES


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[1]", "no JSON object"),
        ('{"schema": 2, "fingerprint": {}, "choices": {}}', "schema 2.*schema 1"),
        ('{"schema": 1, "choices": {}}', "lacks its fingerprint or its choices"),
        ('{"schema": 1, "fingerprint": {"device": "toy", "arch": "chip9", "torch": "2.5"}}', "lacks its"),
        (
            '{"schema": 1, "fingerprint": {"device": "toy", "arch": "chip8"}, "choices": {}}',
            "arch: 'chip8' there, 'chip9' here, torch: None",
        ),
    ],
)
def test_files_that_cannot_serve(tmp_path, content, words):
    path = tmp_path / "lock.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=words):
        read_lock(path, HERE)


def test_signatures_tell_what_binds_apart():
    a = Linear(Weight(("a",), (4, 8)))
    assert signature(a) == signature(Linear(Weight(("b",), (4, 8)))) == signature(a)
    others = [Weight(("a",), (8, 4)), Weight(("a",), (4, 8), F32), Weight(("a",), (4, 8), format="int8_row")]
    assert len({signature(a), *(signature(Linear(w)) for w in others)}) == 4


def test_signatures_are_equal_in_every_process():
    """Also where strings hash to other numbers."""
    code = (
        "from inferplane.binding import signature; from tests.unit.support.small import tiny_v3;"
        "print(*(signature(op) for _, op in tiny_v3().sites()))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONHASHSEED": "77"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.split() == [signature(op) for _, op in tiny_v3().sites()]
