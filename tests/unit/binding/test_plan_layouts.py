"""KV layouts and kernels are chosen together, for all layers with one block size."""

import pytest

from inferplane.errors import BindError
from inferplane.kvcache import paged_layout
from inferplane.ops import Attention, CausalLM, Embedding, LMHead, placeholder
from inferplane.types import KVLayout, KVRequest, When
from tests.unit.support.small import chosen, kernel, lost, plan, tiny_llama, tiny_v3


def layout(name, tokens=16):
    return KVLayout(name, tokens, build=None, bytes_per_block=None)


A, B = layout("a"), layout("b")
IN_A, IN_B = When(kv_layouts=("a",)), When(kv_layouts=("b",))


def names(p):
    return {x.name for x in p.layouts.values()}


@pytest.mark.parametrize("offers", [(A, B), (B, A)])
@pytest.mark.parametrize(("rank_a", "rank_b", "wins"), [(50, 90, "b"), (90, 50, "a")])
def test_the_layout_of_the_better_kernels_wins_in_any_order(offers, rank_a, rank_b, wins):
    ks = kernel("attention", "ka", rank_a, when=IN_A), kernel("attention", "kb", rank_b, when=IN_B)
    p = plan(tiny_llama(), *ks, offers=offers)
    assert names(p) == {wins} and chosen(p, "layers.0.attn.few") == f"k{wins}:attention"
    other = "ab".replace(wins, "")
    assert lost(p, "layers.0.attn.few", f"k{other}:attention") == f"KV layout {wins} is not among {other}"


def test_among_equals_the_first_on_offer():
    for offers in ((A, B), (B, A)):
        assert names(plan(tiny_llama(), kernel("attention"), offers=offers)) == {offers[0].name}
    both = When(kv_layouts=("a", "b"))
    assert names(plan(tiny_llama(), kernel("attention", when=both), offers=(B, A))) == {"b"}


def test_a_pin_is_met_in_the_layout_its_kernel_takes():
    pinned = kernel("attention", "pinned", 10, when=IN_B)
    other = kernel("attention", "other", 90, when=IN_A)
    p = plan(tiny_llama(), other, pinned, offers=(A, B), pins={"attention": "pinned"})
    assert names(p) == {"b"} and chosen(p, "layers.0.attn.few") == "pinned:attention"
    with pytest.raises(BindError, match="KV layout a is not among b"):
        plan(tiny_llama(), other, pinned, offers=(A,), pins={"attention": "pinned"})


def test_a_composite_counts_as_much_as_the_parts_it_replaces():
    """Three kernels of rank 50 for the parts are not worth more than one of rank 90 for the whole."""
    parts = [kernel(op, "parts", 50, when=IN_A) for op in ("attention", "kv_write")]
    whole = kernel("gqa_block", "whole", 90, when=IN_B)
    p = plan(tiny_llama(), *parts, whole, offers=(A, B))
    assert names(p) == {"b"} and chosen(p, "layers.0.attn") == "whole:gqa_block"
    low = kernel("gqa_block", "whole", 10, when=IN_B)
    assert names(plan(tiny_llama(), *parts, low, offers=(A, B))) == {"a"}


def test_kernels_that_only_read_and_write_take_any_layout():
    p = plan(tiny_v3(), kernel("mla_absorbed"), offers=(layout("unheard_of", 48),))
    assert names(p) == {"unheard_of"} and chosen(p, "layers.0.attn.absorbed") == "vendor:mla_absorbed"


def two_kinds():
    """A model whose two layers keep different things; only their requests matter."""
    full, window = KVRequest("gqa", 1, 8, 8), KVRequest("gqa", 1, 8, 8, window=4)
    layers = tuple(Attention(1, 1.0, r) for r in (full, window))
    return CausalLM(Embedding(placeholder(9, 8)), layers, None, LMHead(placeholder(9, 8))), full, window


def test_each_kind_of_layer_has_its_layout_if_the_blocks_agree():
    model, full, window = two_kinds()
    offers = {
        full: (layout("full_64", 64), layout("full_16", 16)),
        window: (layout("ring_16", 16), layout("ring_32", 32)),
    }
    p = plan(model, offers=offers.__getitem__)
    assert {r: x.name for r, x in p.layouts.items()} == {full: "full_16", window: "ring_16"}


def test_blocks_that_never_agree():
    model, full, window = two_kinds()
    offers = {full: (layout("full_64", 64),), window: (layout("ring_16", 16), layout("ring_32", 32))}
    with pytest.raises(BindError, match=r"'toy' has no KV layouts with one block size.*full_64.*ring_16.*ring_32"):
        plan(model, offers=offers.__getitem__)


def test_no_layout_at_all():
    with pytest.raises(BindError, match="no KV layouts"):
        plan(tiny_llama(), offers=())


def test_the_layouts_of_both_step_kinds_are_one():
    ks = [
        kernel("attention", "few", 90, when=When(kv_layouts=("a",), step_kinds=("decode",))),
        kernel("attention", "many", 95, when=When(kv_layouts=("b",), step_kinds=("mixed",))),
    ]
    p = plan(tiny_llama(), *ks, offers=(A, B))
    assert names(p) == {"b"} and chosen(p, "layers.0.attn.few") == "reference"
    assert chosen(p, "layers.0.attn.few", "mixed") == "many:attention"


def test_a_layout_is_not_built_to_be_chosen():
    def build(*_):
        raise AssertionError("allocated while binding")

    never = KVLayout("never", 16, build, build)
    assert names(plan(tiny_llama(), offers=(never, paged_layout(16)))) == {"never"}
