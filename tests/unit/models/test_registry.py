"""From an architecture's name to its constructor."""

from __future__ import annotations

import pytest

from inferplane.errors import PluginError, UnsupportedModelError
from inferplane.models import ARCHITECTURES, Build, Config, build, constructor, llama


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
