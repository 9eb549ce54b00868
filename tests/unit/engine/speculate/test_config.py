"""Methods of speculation have the same names in Python, as flags and as settings."""

import pytest

from inferplane.engine.clients.options import ALL_OPTIONS, SpeculativeOptions
from inferplane.engine.request.arguments import DRAFT_ALIASES, DRAFT_METHODS
from inferplane.engine.speculate import SpeculativeConfig
from inferplane.errors import UsageError

OFFERED = ALL_OPTIONS["speculative_method"].metadata["choices"]


@pytest.mark.parametrize("name", [*DRAFT_METHODS, *DRAFT_ALIASES])
def test_a_method_by_each_of_its_names(name):
    method = DRAFT_ALIASES.get(name, name)
    model = "demo-draft" if method in ("draft_model", "eagle") else None
    options = SpeculativeOptions(speculative_method=name, speculative_model=model)
    assert SpeculativeConfig.of(options.config()).method == method in DRAFT_METHODS
    assert name in OFFERED


@pytest.mark.parametrize("name", ["", "medusa", "NGRAM", "draft-model"])
def test_other_methods_are_refused(name):
    with pytest.raises(UsageError, match="ngram, suffix, draft_model, mtp, eagle"):
        SpeculativeConfig(name)


@pytest.mark.parametrize(("name", "value"), [
    ("num_speculative_tokens", "2"), ("prompt_lookup_max", 2.0), ("adaptive", "no"), ("only_if_faster", 1),
    ("suffix_decoding_max_spec_factor", "1"), ("verify_window", None),
])  # fmt: skip
def test_values_of_other_types_are_refused(name, value):
    with pytest.raises(UsageError, match=rf"{name} = {value!r}"):
        SpeculativeConfig("suffix", **{name: value})
    with pytest.raises(UsageError, match=rf"{name} = {value!r}"):
        SpeculativeConfig.of({"method": "suffix", name: value})


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_options_of_suffix_drafting_are_refused_with_other_methods(method):
    """Their defaults are no options: settings may pass them all."""
    with pytest.raises(UsageError, match=r"suffix_decoding_max_tree_depth = 8 .* choose method 'suffix'"):
        SpeculativeConfig(method, suffix_decoding_max_tree_depth=8)
    assert SpeculativeConfig(method, suffix_decoding_max_tree_depth=24).method == method
    assert SpeculativeConfig("suffix", suffix_decoding_max_tree_depth=8).suffix_decoding_max_tree_depth == 8
