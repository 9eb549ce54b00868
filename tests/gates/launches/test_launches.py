"""Between two products of a decode step stands at most one kernel, for the models of the decode bars.

Attention is a product too. Counted are operators and kernels as they are called; no GPU has run them.
"""

from __future__ import annotations

import pytest

from tests.gates.launches.models import CODED_MODELS, MODELS
from tests.gates.launches.steps import Between, between, planned, step


@pytest.fixture(scope="module", params=MODELS)
def runner(request):
    return MODELS[request.param]()


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (8, 1), (64, 1), (64, 2)])
def test_at_most_one_kernel_between_two_products(runner, sequences, tokens, record_property):
    names = step(runner, sequences, tokens)
    pairs = list(between(names))
    assert len(pairs) > 10
    assert not [str(pair) for pair in pairs if len(pair.kernels) > 1]
    record_property("launches", len(names))


@pytest.mark.parametrize("model", CODED_MODELS)
def test_few_activations_are_coded_in_the_product(model):
    """Up to 64 rows, unless a norm has coded them; of more, those that no norm has by a kernel of its own."""
    runner = CODED_MODELS[model]()
    for sequences, tokens in ((1, 1), (8, 1), (64, 1), (32, 2)):
        names = step(runner, sequences, tokens)
        assert "_quantize" not in names and not [str(p) for p in between(names) if len(p.kernels) > 1]
    assert "_quantize" in step(runner, 64, 2)


def test_several_are_found():
    """Composed from torch's own operators, the same step has more."""
    composed = dict.fromkeys(("add_rms_norm", "mla_norm_rope_write", "moe"), "decomposition")
    from benchmarks.shapes import REAL

    config = {**REAL["DeepSeek-V2-Lite"], "num_hidden_layers": 2}
    names = step(planned(config, ops=composed), 1)
    assert [pair for pair in between(names) if len(pair.kernels) > 1]
    assert list(between(["mm", "a", "b", "bmm", "mm"])) == [Between("mm", ("a", "b"), "bmm"), Between("bmm", (), "mm")]
