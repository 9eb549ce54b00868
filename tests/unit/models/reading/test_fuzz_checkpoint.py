"""Mutations that hypothesis finds and shrinks; `python -m tests.unit.support.fuzz_checkpoint` runs many more.

pytest tests/unit/models/reading/test_fuzz_checkpoint.py --hypothesis-profile=thorough  # 2,000 of each instead of 200
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferplane.models import Config
from tests.unit.support.fuzz_checkpoint import INDEX, ONE, SHARDED, TOKENS, try_one
from tests.unit.support.hostile import GOOD, attempt, read_all

EXAMPLES = settings(max_examples=max(200, settings.default.max_examples))
EDITS = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.integers(0, 12),
        st.one_of(st.binary(max_size=8), st.sampled_from(TOKENS)),
    ),
    min_size=1,
    max_size=5,
)


def edited(content, edits):
    data = bytearray(content)
    for at, cut, put in edits:
        data[at : at + cut] = put
    return bytes(data)


@EXAMPLES
@given(edits=EDITS, name=st.sampled_from(["model.safetensors", ONE, INDEX]))
def test_edited_files_are_read_or_refused(edits, name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("f")
    for file, content in ({name: GOOD} if name == "model.safetensors" else SHARDED).items():
        (folder / file).write_bytes(edited(content, edits) if file == name else content)
    _, error = attempt(lambda: read_all(folder))
    assert error is None or error.what.endswith(".")


@EXAMPLES
@given(edits=EDITS)
def test_edited_configs_are_read_or_refused(edits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("f")
    good = (
        b'{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512, "rope_scaling": {"type": "linear"}}'
    )
    (folder / "config.json").write_bytes(edited(good, edits))
    positions, error = attempt(lambda: Config.read(folder).positions)
    assert (positions is None or positions >= 1) if error is None else str(folder / "config.json") in str(error)


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_the_runner_itself(seed, tmp_path):
    """Its first two hundred folders: some are read, most are refused."""
    assert [try_one(s, tmp_path) for s in range(seed, seed + 20)].count(False) > 10
