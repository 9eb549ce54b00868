"""`Kernel.chain` and `Kernel.whole` of plugin API 1.0 still run, where they ran before, with the same results."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inferplane import plugins
from inferplane.binding import Options, bind
from inferplane.conformance import stepping
from inferplane.conformance.subject import Subject
from inferplane.errors import KernelError
from inferplane.plugins.old_kernels import with_stack_kernels
from inferplane.types import Kernel
from tests.unit.support.small import F32, settings, tiny_llama, tiny_v3

PROMPTS = [list(range(1, 30)), list(range(40, 60))]
SCHEDULE = lambda sequence, done, total: 1 if done else total - 5  # noqa: E731


@pytest.fixture
def old(monkeypatch):
    """The plugin's module, and the host that holds it alone."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with pytest.warns(DeprecationWarning, match="Kernel.chain is deprecated; use a kernel of"):
        host = plugins.discover("only,chain_v1_0")
    module = sys.modules["chain_v1_0"]
    module.calls.clear()
    yield host, module
    del sys.modules["chain_v1_0"]


def run(host, tree, *, without=()):
    """Logits of the prompts, and what runs at the root and at the layers."""
    subject = Subject.of(host, "chained", "float32")
    subject.kernels = [kernel for kernel in subject.kernels if kernel.op not in without]
    weights = stepping.draw_weights(tree, F32)
    with pytest.warns(DeprecationWarning, match="KVCache.extra"):
        bound = stepping.on_device(subject, tree, F32, weights, 40)
    assert bound.cache.extra["scratch"].shape == (1,)
    labels = {site: choice.label for site, _, choice in bound.plan.sites("decode")}
    return stepping.run(bound, PROMPTS, SCHEDULE), labels[""], labels["layers"]


@pytest.mark.parametrize("tree", [tiny_llama, tiny_v3, lambda: tiny_llama(format="int8_group")])
def test_chain_and_whole_run_where_they_ran_before(old, tree):
    host, module = old
    tree = tree()
    one, root, layers = run(host, tree)
    assert (root, layers) == ("old:whole", "old:chain")
    assert module.calls.count("whole") == module.calls.count("chain") > 0, "steps of two tokens are one call"
    prompts = module.calls.count("layer")
    assert prompts == len(tree.layers), "a prompt's step has another kernel, without a chain"
    module.calls.clear()
    chained, root, layers = run(host, tree, without=("causal_lm",))
    assert (root, layers) == ("decomposition", "old:chain") and set(module.calls) == {"layer", "chain"}
    module.calls.clear()
    each, root, layers = run(host, tree, without=("causal_lm", "decoder_stack"))
    assert (root, layers) == ("decomposition", "decomposition") and set(module.calls) == {"layer"}
    for a, b, c in zip(one, chained, each):
        assert torch.equal(a, b) and torch.equal(b, c)


def test_whole_may_leave_a_step_to_the_parts(old):
    host, module = old
    tree = tiny_llama()
    subject = Subject.of(host, "chained", "float32")
    bound = stepping.on_device(subject, tree, F32, stepping.draw_weights(tree, F32), 40)
    stepping.run(bound, [prompt[:20] for prompt in PROMPTS], lambda sequence, done, total: 2)
    assert set(module.calls) == {"chain"}, "four rows a step are too many for it"


@pytest.mark.parametrize("pins", [{"layers.1": "decomposition"}, {"layers.0": "reference"}])
def test_a_layer_with_another_kernel_ends_the_chain(old, pins):
    host, _ = old
    kernels = host.kernels("chained")
    offers = lambda request: Subject.of(host, "chained", "float32").layouts(request, F32)  # noqa: E731
    bound = bind(tiny_llama(), kernels, settings(), offers, options=Options(pins))
    labels = {site: choice.label for site, _, choice in bound.sites("decode")}
    assert labels["layers"] == labels[""] == "decomposition"


def test_a_kernel_of_the_same_name_without_the_chain_is_not_taken_for_it(old):
    """Names decide what a kernel inlines; whether the layers have the chain is looked up once more."""
    host, module = old
    few, _ = module.kernels
    subject = Subject.of(host, "chained", "float32")
    subject.kernels = [k if k is not few else replace(few, chain=None, whole=None) for k in subject.kernels]
    tree = tiny_llama()
    bound = stepping.on_device(subject, tree, F32, stepping.draw_weights(tree, F32), 40)
    stepping.run(bound, PROMPTS, SCHEDULE)
    assert set(module.calls) == {"layer"}


def layer(name, **options):
    def function(view, x, residual, batch, kv):
        return x, residual

    function.__name__ = name
    return Kernel("decoder_layer", "p", function, **options)


def first(views, x, residual, batch, caches):
    return x, residual


def second(views, x, residual, batch, caches):
    return x, residual


def step(model, batch, cache):
    return None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_chains_become():
    a, b, c = layer("a", chain=first, rank=40), layer("b", chain=first, whole=step, rank=60), layer("c", chain=second)
    plain = layer("d")
    assert with_stack_kernels([plain]) == [plain]
    made = with_stack_kernels([a, plain, b, c])
    assert made[:4] == [a, plain, b, c]
    assert [(k.op, k.name, dict(k.inlines)) for k in made[4:]] == [
        ("decoder_stack", "p:first", {"*": ("p:a", "p:b")}),
        ("causal_lm", "p:step", {"layers": ("p:first",)}),
        ("decoder_stack", "p:second", {"*": ("p:c",)}),
    ]
    assert [k.rank for k in made[4:]] == [60, 60, 10], "the highest of the layers"
    assert with_stack_kernels(made[:4])[4].name == "p:first", "a list may be read again"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_chain_and_whole_by_their_places():
    """`chain` and `whole` stand behind `prepare`, as in 1.0, and before `capture_safe`."""
    kernel = Kernel("decoder_layer", "p", "m:f", chain=first)
    placed = Kernel(
        "decoder_layer", "p", "m:f", kernel.when, 70, {}, None, first, step, True, True, False, 0.1, "fp8", "n"
    )
    assert (placed.chain, placed.whole, placed.capture_safe, placed.batch_invariant) == (first, step, True, True)
    assert (placed.needs_host_lens, placed.extra_error, placed.note) == (False, 0.1, "n")
    assert placed.quantizes_activations_to == "fp8" and not placed.inlines
    with pytest.raises(KernelError, match="whole step, but no chain"):
        Kernel("decoder_layer", "p", "m:f", whole=step)
