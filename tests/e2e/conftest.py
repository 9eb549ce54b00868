"""Fixtures of the tests from end to end."""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file

from tests.e2e.checkpoints import logits
from tests.e2e.tiny_llm import opened, write
from tests.e2e.tiny_models import make


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with one file, and its logits."""
    folder = tmp_path_factory.mktemp("whole")
    make("llama", "gqa", folder)
    return folder, logits(folder)


@pytest.fixture
def copy(whole, tmp_path):
    """A folder of one's own to spoil, and its tensors."""
    shutil.copytree(whole[0], tmp_path / "copy")
    return tmp_path / "copy", load_file(tmp_path / "copy" / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(folder):
    with opened(folder) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    """The model; after each test nothing runs, nothing waits, and no block is lost."""
    yield shared
    blocks = shared.engine.pools
    assert not shared.engine.busy and blocks.used == 0 and blocks.free + blocks.cached == blocks.total
