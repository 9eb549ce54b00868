"""Folders, files and repositories in Paddle's own forms are refused with what to fetch in their place."""

from __future__ import annotations

import pytest

from inferplane.engine import ModelFiles
from inferplane.errors import CheckpointError
from inferplane.hub.paddle_files import refuse_paddle_files
from inferplane.models import Config, SafetensorsFolder

FILES = [
    (["model.pdiparams", "model.pdmodel"], "model.pdiparams, model.pdmodel: weights for Paddle's own programs"),
    (["model.json", "model.pdiparams"], "model.pdiparams, model.json: weights for Paddle's own programs"),
    (["model.pdiparams.info"], "model.pdiparams.info: weights"),
    (["model_state.pdparams"], "model_state.pdparams: a pickle of Paddle's, which may run code"),
    (["model_state-00001-of-00002.pdparams", "model_state-00002-of-00002.pdparams"], "00002.pdparams: a pickle"),
    (["model.json"], "model.json: what Paddle calls its programs"),
]
FETCH = r"To do: fetch config.json, tokenizer and model.safetensors \(or model.safetensors.index.json .*Hugging Face"


def make(folder, files):
    folder.mkdir(exist_ok=True)
    for name in files:
        (folder / name).write_bytes(b"\0")
    return folder


@pytest.mark.parametrize(("files", "said"), FILES)
def test_a_folder_without_a_config(files, said, tmp_path):
    with pytest.raises(CheckpointError, match=rf"has no \*.safetensors, but .*{said}.*{FETCH}"):
        Config.read(make(tmp_path, files))


@pytest.mark.parametrize(("files", "said"), FILES[:-1])
def test_a_folder_with_a_config(files, said, tmp_path):
    make(tmp_path, files)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    found = ModelFiles(tmp_path)
    assert found.has_weights  # so that they are refused, and not drawn at random
    for read in (found.source, lambda: SafetensorsFolder(tmp_path)):
        with pytest.raises(CheckpointError, match=rf"{said}.*{FETCH}"):
            read()


@pytest.mark.parametrize("name", ["model.pdiparams", "model.pdmodel", "model_state.pdparams"])
def test_a_file(name, tmp_path):
    make(tmp_path, [name])
    with pytest.raises(CheckpointError, match=rf"{name} is .*Paddle.*{FETCH}"):
        ModelFiles(tmp_path / name)


@pytest.mark.parametrize(
    ("folder", "passed"),
    [
        ("DeepSeek-R1/a8w8_fp8_wint4", "a8w8_fp8_wint4"),
        ("Llama-3-8B-A8W8C8", "a8w8c8"),
        ("llama/weight_only_int8", "weight_only_int8"),
        ("Qwen2-wint4", "weight_only_int4"),
        ("llama", "weight_only_int8' or another"),
    ],
)
def test_the_quantization_of_the_export_is_named(folder, passed):
    error = refuse_paddle_files(folder, ["model.pdiparams"])
    assert error is not None and f"quantization='{passed}" in str(error)


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["config.json", "model.json"],
        ["model.safetensors", "model.pdiparams", "config.json"],
        ["pytorch_model.bin"],
    ],
)
def test_other_folders_are_not_paddles(names):
    assert refuse_paddle_files("x", names) is None
