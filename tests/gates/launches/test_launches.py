"""Between two products of a decode step stands at most one kernel, for the models of the decode bars.

Attention is a product too. Counted are operators and kernels as they are called; no GPU has run them.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from inferplane.engine.runner.capture import why_not_captured_together
from inferplane.engine.sampling.batch_rows import GREEDY, PLAIN
from inferplane.kernels.triton import triton_kernels
from inferplane.ops import OPS
from inferplane.ops.draw import Draw
from inferplane.types.kernel import import_target
from tests.gates.launches.models import CODED_MODELS, DRAFTING, GEMMA_2, LAYERS, MODELS
from tests.gates.launches.steps import PRODUCTS, Between, Taken, between, cycle, drafting, planned, step

MOST_BETWEEN = {(GREEDY,): 73, (PLAIN,): 158}
"""Small operators of a record that verifies and drafts, beside the networks' kernels: those that draw, judge, and move
rows.
"""
CHAINED = 19
"""For each further draft."""


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


@pytest.fixture(scope="module", params=DRAFTING)
def drafter(request):
    return DRAFTING[request.param]()


@pytest.mark.parametrize("kinds", [(GREEDY,), (PLAIN,)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("sequences", "drafts"), [(1, 1), (64, 1), (8, 3)])
def test_verification_and_drafts_are_launched_at_once(drafter, sequences, drafts, kinds, record_property):
    """One record for both: the networks' own kernels, nothing that reads a value, and small operators only where what
    the layer reads follows from the forward before.
    """
    assert why_not_captured_together(drafter.plan, drafter.options) == ""
    names = cycle(drafter, sequences, drafts, kinds)
    first, chained = drafting(drafter, sequences, 1 + drafts), drafting(drafter, sequences)
    networks = [*step(drafter, sequences, 1 + drafts), *first, *chained * (drafts - 1)]
    products = [[n for n in some if n in PRODUCTS] for some in (names, networks)]
    assert products[0] == products[1] and len(products[0]) > 20
    assert not {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"} & {*names}
    seams = [pair for pair in between(names) if len(pair.kernels) > 1]
    assert [pair.kernels for pair in seams].count(("_norm", "index_select")) == 1, "last rows, before the layer's head"
    assert len(seams) == drafts + 1, [str(pair) for pair in seams]
    glue = len(names) - len(networks)
    assert glue <= MOST_BETWEEN[kinds] + CHAINED * (drafts - 1)
    record_property("launches", len(names))
    record_property("beside_the_networks", glue)


@pytest.mark.parametrize("model", [name for name in MODELS if name.endswith(("INT4, coded", "INT8"))])
def test_norms_code_for_int4_experts_and_for_int8(model):
    """So that of many rows only attention's result is coded by a kernel of its own, once a layer."""
    assert step(MODELS[model](), 64, 2).count("_quantize") == LAYERS


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (64, 2)])
def test_layers_of_gemma_have_no_composed_op(sequences, tokens):
    """Weights of norms without their 1, norms on both sides of a block, soft caps, windows, a gate by GELU."""
    names = Counter(step(planned(GEMMA_2), sequences, tokens))
    scaling = {"embedding": 1, "mul": 3, "div": 1, "tanh": 1, "_to_copy": 1}  # of embeddings and logits
    layer = {"_norm": 4, "mm": 4, "_norm_rope_write": 1, "_attend": 1, "_activation_mul": 1}
    assert names == Counter({name: n * LAYERS for name, n in layer.items()}) + Counter({"_norm": 1, "mm": 1, **scaling})


RECURRENT = {"causal_conv1d": "decode", "gated_delta_rule": "decode", "selective_scan": "decode",
             "gated_rms_norm": "strided", "delta_rule_gates": "strided"}  # fmt: skip
"""Ops of recurrent layers, and a sample of each in a decode step."""


@pytest.mark.parametrize(("name", "label"), RECURRENT.items())
def test_each_op_of_a_recurrent_layer_is_one_launch(name, label):
    (kernel,) = [k for k in triton_kernels(()) if k.op == name]
    (sample,) = [s for s in OPS[name].samples() if s.label == label]
    inputs = sample.inputs(Draw(1, torch.bfloat16))
    with Taken() as taken:
        import_target(kernel.target)(sample.op, *inputs)
    assert taken.names == [f"_{name}".replace("rms_", "")]


def test_several_are_found():
    """Composed from torch's own operators, the same step has more."""
    composed = dict.fromkeys(("add_rms_norm", "mla_norm_rope_write", "moe"), "decomposition")
    from benchmarks.shapes import REAL

    config = {**REAL["DeepSeek-V2-Lite"], "num_hidden_layers": 2}
    names = step(planned(config, ops=composed), 1)
    assert [pair for pair in between(names) if len(pair.kernels) > 1]
    assert list(between(["mm", "a", "b", "bmm", "mm"])) == [Between("mm", ("a", "b"), "bmm"), Between("bmm", (), "mm")]
