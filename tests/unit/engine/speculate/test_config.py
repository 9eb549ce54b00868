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
