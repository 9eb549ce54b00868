"""Configs that ship with Inferplane: they are what transformers says, and can be planned by name."""

from __future__ import annotations

import json

import pytest
import transformers

from inferplane.cli.main import main
from inferplane.engine import ModelFiles
from inferplane.errors import UsageError
from inferplane.models import ARCHITECTURES, Build, as_config, build
from inferplane.models.reading.shipped_configs import FOLDER, PREFIX, list_shipped_configs, read_shipped_config

CLASSES = {
    "deepseek-v3.2": "DeepseekV32Config",
    "deepseek-v4-flash": "DeepseekV4Config",
    "glm-5": "GlmMoeDsaConfig",
    "hunyuan-3": "HYV3Config",
    "kimi-linear": "KimiLinearConfig",
    "longcat-flash": "LongcatFlashConfig",
    "mimo-v2-flash": "MiMoV2FlashConfig",
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_model_is_that_of_transformers_class(name):
    """The same tree of ops, with the same sizes."""
    config = read_shipped_config(PREFIX + name)
    reference = getattr(transformers, CLASSES[name])().to_dict()
    reference["architectures"] = config["architectures"]
    assert build(Build(as_config(dict(config)))).key() == build(Build(as_config(reference))).key()


def test_each_has_a_test_above_and_an_architecture():
    assert list_shipped_configs() == sorted(CLASSES)
    assert all(read_shipped_config(PREFIX + name)["architectures"][0] in ARCHITECTURES for name in CLASSES)
    assert all(len((FOLDER / f"{name}.json").read_bytes()) < 4096 for name in CLASSES)


def test_a_name_stands_for_the_config():
    files = ModelFiles("config:GLM-5")
    assert (files.config["hidden_size"], files.name, files.folder, files.has_weights) == (
        6144,
        "config:GLM-5",
        None,
        False,
    )


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(UsageError, match=r"named 'config:glm-6'.*config:deepseek-v3\.2, .*config:glm-5"):
        ModelFiles("config:glm-6")


@pytest.mark.parametrize("verb", ["explain", "estimate"])
def test_verbs_plan_it(verb, capsys):
    assert main([verb, "config:hunyuan-3", "--device", "cpu", "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "config:hunyuan-3"
