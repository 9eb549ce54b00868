"""Reading config.json: plain data, one spelling."""

from __future__ import annotations

import json

import pytest

from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models import Config, as_config


@pytest.mark.parametrize(
    ("entries", "want"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            {"type": "linear", "rope_type": "linear", "rope_theta": 5e5, "factor": 2},
        ),
        (
            {"rope_theta": 1.0, "rope_parameters": {"rope_type": "yarn", "rope_theta": 7.0, "mscale": None}},
            {"rope_type": "yarn", "rope_theta": 7.0},
        ),
        (  # written by transformers 5 from a config of transformers 4: both spellings at once
            {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 3.0}},
            {"rope_type": "default", "rope_theta": 3.0},
        ),
    ],
)
def test_rotary_settings_have_one_spelling(entries, want):
    config = Config(entries)
    assert config.rope == want
    config.rope["rope_theta"] = 0  # a copy
    assert config.rope == want


def test_sizes():
    config = Config({"a": 3, "zero": 0, "half": 1.5, "yes": True, "none": None, "text": "3"}, "there")
    assert config.size("a") == config.size("a", 9) == 3
    assert config.size("absent", 9) == config.size("none", 9) == 9
    for key in ("absent", "none"):
        with pytest.raises(CheckpointError, match=f"there lacks '{key}'"):
            config.size(key)
    for key in ("zero", "half", "yes", "text"):
        with pytest.raises(CheckpointError, match=f"there: {key} is .*not a positive integer"):
            config.size(key, 9)


def test_what_is_not_implemented_is_refused():
    config = Config({"architectures": ["A", "B"], "act": "gelu", "none": None})
    assert config.architecture == "A"
    config.refuse(none=("silu",), absent=("silu",), act=("gelu", "silu"))
    with pytest.raises(UnsupportedModelError, match=r"act = 'gelu' is not implemented for A.*'silu', 'relu'"):
        config.refuse(act=("silu", "relu"))


def test_every_form(tmp_path):
    class FromTransformers:
        def to_dict(self):
            return {"architectures": ["A"]}

    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"]}))
    for form in (
        tmp_path,
        str(tmp_path),
        {"architectures": ["A"]},
        FromTransformers(),
        Config({"architectures": ["A"]}),
    ):
        assert as_config(form).architecture == "A"
    assert as_config(FromTransformers()).name == "FromTransformers"
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        as_config(tmp_path / "absent")


@pytest.mark.parametrize(
    ("scaling", "want"),
    [
        (None, 100),
        ({"type": "linear", "factor": 4.0}, 100),
        ({"type": "dynamic", "factor": 4.0}, 400),
        ({"type": "yarn", "factor": 4.0}, 400),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}, 100),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}, 200),
        ({"type": "yarn", "factor": "much"}, 100),  # building the model refuses it
        ({"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 50}, 100),
    ],
)
def test_positions_are_what_scaling_makes_of_them(scaling, want):
    assert Config({"max_position_embeddings": 100, "rope_scaling": scaling}).positions == want
    assert Config({"rope_scaling": scaling}).positions is None
