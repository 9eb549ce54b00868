"""From an architecture's name to its constructor."""

from __future__ import annotations

import json

import pytest

from inferplane.engine.runner.model_files import ModelFiles, check_architecture
from inferplane.errors import PluginError, UnsupportedModelError
from inferplane.models import ARCHITECTURES, Build, Config, build, constructor, llama, settle_architecture


def test_core_and_plugins():
    mine = lambda b: "mine"  # noqa: E731
    assert constructor("LlamaForCausalLM") is llama
    assert constructor("Mine", {"Mine": mine}) is mine
    assert constructor("Dotted", {"Dotted": "inferplane.models.families.llama:llama"}) is llama
    assert build(Build(Config({"architectures": ["Mine"]})), {"Mine": mine}) == "mine"
    assert constructor("LlamaForCausalLM", {"LlamaForCausalLM": mine}) is llama  # a plugin does not replace core's


def test_unknown_ones_name_the_page_that_lists_what_is_known():
    with pytest.raises(UnsupportedModelError) as caught:
        constructor("Foo", {"FooForCausalLM": llama})
    assert f"{len(ARCHITECTURES) + 1} architectures, among them FooForCausalLM, " in caught.value.there_is
    assert "docs/models.md" in caught.value.there_is and len(str(caught.value)) < 600
    assert "docs/adding-a-model.md" in caught.value.remedy


def test_unknown_ones_name_the_nearest():
    with pytest.raises(
        UnsupportedModelError, match=r"'Olmo4ForCausalLM'.*nearest name that is known is 'Olmo[23e]ForC"
    ):
        constructor("Olmo4ForCausalLM")


@pytest.mark.parametrize("target", ["no.such.module:x", "inferplane.models.families.llama:nothing", "inferplane"])
def test_targets_that_cannot_be_imported(target):
    with pytest.raises(PluginError, match=f"'{target}' cannot be imported"):
        constructor("Mine", {"Mine": target})


@pytest.mark.parametrize(
    ("kind", "stated"),
    [
        ("llama", "LLaMAForCausalLM"),
        ("mistral", "MistralForCausalLMNew"),
        ("qwen3", "Qwen3LMHeadModel"),
        ("gemma3_text", "AcmeForCausalLM"),
    ],
)
def test_unknown_causal_language_models_are_those_of_their_model_type(kind, stated, tmp_path):
    """As in transformers, whose AutoModelForCausalLM goes by `model_type`; a warning says so."""
    entries = {"architectures": [stated], "model_type": kind, "vocab_size": 8}
    own = Config({"model_type": kind}).architecture
    files = ModelFiles(entries)
    assert files.config.architecture == own and constructor(own) is ARCHITECTURES[own]
    assert files.complaints() == (
        f"{files.config.name}: architectures names {stated}, model_type is {kind!r}; the model is built as {own}.",
    )
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert ModelFiles(tmp_path).config.architecture == own
    check_architecture(tmp_path)


@pytest.mark.parametrize(
    "entries",
    [
        {"architectures": ["AcmeForCausalLM"], "model_type": "llama"},  # a plugin's
        {"architectures": ["OddForCausalLM"], "model_type": "odd"},
        {"architectures": ["OddForCausalLM"]},
        {"architectures": ["OddForCausalLM"], "model_type": "llama", "auto_map": {"AutoModelForCausalLM": "odd.Odd"}},
        {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
        {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama"},
    ],
)
def test_other_names_stay(entries):
    config = Config(entries)
    assert settle_architecture(config, {"AcmeForCausalLM": llama}) is config


@pytest.mark.parametrize(
    ("stated", "task"),
    [
        ("Qwen3ForSequenceClassification", "classifies"),
        ("LlamaForTokenClassification", "classifies"),
        ("LlamaForQuestionAnswering", "marks answers"),
        ("Qwen2ForProcessRewardModel", "scores answers"),
        ("Qwen2ForCausalLMReward", "scores answers"),
    ],
)
def test_models_for_other_tasks_are_refused_in_words(stated, task):
    with pytest.raises(UnsupportedModelError, match=f"'{stated}' {task}.* generates no text") as caught:
        constructor(settle_architecture(Config({"architectures": [stated], "model_type": "qwen3"})).architecture)
    assert "load the language model that it was made from" in caught.value.remedy
