"""Packings: who asks for which, what is shared, and what a second copy may cost."""

from dataclasses import replace

import pytest

from inferplane.binding import explain
from inferplane.errors import BindError
from inferplane.types import Packing, Weight, When
from tests.unit.support.small import BF16, F32, chosen, kernel, lost, plan, tiny_llama, tiny_v3

T = Packing("v.t", lambda w: w.t().contiguous())
NZ = Packing("v.nz", lambda w: w)


def weight(p, path):
    return dict(p.model.weights())[path]


def packings(p, path):
    return sorted(p.packings[id(weight(p, path))])


def head(pack=T, provider="vendor", rank=90, **options):
    return kernel("lm_head", provider, rank, packs={"weight": pack}, **options)


HEAD_BYTES = 97 * 64 * 2  # a fifth of the tiny model, far beyond 5 %


def test_equal_names_share_one_copy():
    ks = [kernel("linear", packs={"weight": Packing("v.t")}), kernel("lm_head", packs={"weight": Packing("v.t")})]
    p = plan(
        tiny_llama(tie_word_embeddings=True),
        *ks,
        kernel("embedding", packs={"weight": Packing("v.t")}),
        max_repacked_fraction=0.0,
    )
    assert packings(p, "embed.weight") == packings(p, "layers.0.mlp.down.weight") == ["v.t"]
    assert not p.count_copied_bytes() and explain(p)["copies"] == []


def test_one_packing_a_step_kind_is_two_copies():
    ks = [
        kernel("linear", k, 90, packs={"weight": Packing(k)}, when=When(step_kinds=(k,))) for k in ("decode", "mixed")
    ]
    p = plan(tiny_llama(), *ks)
    assert packings(p, "layers.0.mlp.down.weight") == ["decode", "mixed"]
    extra = sum(op.weight.nbytes(F32) for _, op in p.model.sites() if op.name == "linear")
    assert sum(p.count_copied_bytes().values()) == extra
    assert sum(c["extra_bytes"] for c in explain(p)["copies"]) == extra
    (copy,) = explain(p)["copies"]
    assert copy["packings"] == ["decode", "mixed"] and copy["uses"] == 12
    assert copy["for"]["decode"] == ["layers.0.attn.qkv decode:linear"]


def test_a_tied_head_in_a_packing_of_its_own_is_refused_with_the_bytes():
    model = tiny_llama(tie_word_embeddings=True)
    free = plan(model, head(), kernel("embedding"), dtype=BF16)
    assert packings(free, "embed.weight") == ["canonical", "v.t"] and chosen(free, "head") == "vendor:lm_head"
    p = plan(model, head(), kernel("embedding"), dtype=BF16, max_repacked_fraction=0.05)
    assert packings(p, "embed.weight") == ["canonical"] and chosen(p, "head") == "reference" == chosen(
        p, "head", "mixed"
    )
    for kind in ("decode", "mixed"):
        reason = lost(p, "head", "vendor:lm_head", kind)
        assert f"second copy of model.embed_tokens.weight ({HEAD_BYTES} bytes in packings canonical, v.t)" in reason
        assert f"5% of {p.weight_bytes} weight bytes" in reason
    assert p.weight_bytes == sum(w.nbytes(BF16) for w in p.weights.values())


def test_the_next_best_kernel_takes_over():
    p = plan(tiny_llama(tie_word_embeddings=True), head(), kernel("lm_head", "plain", 10), max_repacked_fraction=0.05)
    assert chosen(p, "head") == "plain:lm_head"


def test_an_untied_head_may_be_packed_as_it_likes():
    p = plan(tiny_llama(), head(), max_repacked_fraction=0.0)
    assert packings(p, "head.weight") == ["v.t"] and chosen(p, "head") == "vendor:lm_head"


def test_a_pinned_kernel_beyond_the_budget_is_an_error():
    with pytest.raises(BindError, match=r"'lm_head' at head .*refused: would keep a second copy of model.embed"):
        plan(tiny_llama(tie_word_embeddings=True), head(), pins={"head": "vendor"}, max_repacked_fraction=0.05)


def test_the_lowest_rank_gives_way():
    ks = head(NZ, "low", 40), head(T, "shares", 30), kernel("embedding", "high", 90, packs={"weight": T})
    p = plan(tiny_llama(tie_word_embeddings=True), *ks, max_repacked_fraction=0.05)
    assert packings(p, "embed.weight") == ["v.t"] and chosen(p, "embed") == "high:embedding"
    assert chosen(p, "head") == "shares:lm_head" and "second copy" in lost(p, "head", "low:lm_head")


def test_without_a_packing_in_common_nobody_packs():
    ks = head(NZ, "low", 40), kernel("embedding", "high", 90, packs={"weight": T})
    p = plan(tiny_llama(tie_word_embeddings=True), *ks, max_repacked_fraction=0.05)
    assert packings(p, "embed.weight") == ["canonical"] and {chosen(p, "embed"), chosen(p, "head")} == {"reference"}


def test_a_budget_large_enough():
    model = tiny_llama(tie_word_embeddings=True)
    once = plan(model).weight_bytes
    share = HEAD_BYTES * 2 / once  # float32 here
    for copies, wins in ((share * 1.001, "vendor:lm_head"), (share * 0.999, "reference"), (None, "vendor:lm_head")):
        assert chosen(plan(model, head(), max_repacked_fraction=copies), "head") == wins


def test_the_largest_copies_go_first():
    """Small copies stay when refusing a large one is enough."""
    norms = [
        kernel("add_rms_norm", k, 20, packs={"norm.weight": Packing(k)}, when=When(step_kinds=(k,)))
        for k in ("decode", "mixed")
    ]
    linear = [
        kernel("linear", k, 90, packs={"weight": Packing(k)}, when=When(step_kinds=(k,))) for k in ("decode", "mixed")
    ]
    p = plan(tiny_llama(), *norms, *linear, max_repacked_fraction=0.05)
    assert sum(p.count_copied_bytes().values()) <= 0.05 * p.weight_bytes
    assert packings(p, "layers.0.attn_norm.norm.weight") == ["decode", "mixed"]


def test_latent_attention_shares_kv_b():
    p = plan(tiny_v3(), kernel("mla_absorbed"), kernel("mla_expanded"), max_repacked_fraction=0.0)
    assert packings(p, "layers.0.attn.absorbed.kv_b") == ["canonical"]


def test_paths_reach_below_composites():
    p = plan(tiny_llama(), kernel("gated_mlp", packs={"gate_up.weight": T, "down.weight": NZ}))
    assert packings(p, "layers.0.mlp.gate_up.weight") == ["v.t"] and packings(p, "layers.2.mlp.down.weight") == ["v.nz"]
    whole = kernel("causal_lm", packs={"layers.1.mlp.down.weight": NZ})
    q = plan(tiny_llama(), whole)
    assert packings(q, "layers.1.mlp.down.weight") == ["v.nz"] and packings(q, "layers.0.mlp.down.weight") == [
        "canonical"
    ]


def test_weight_bytes_follow_dtypes():
    p = plan(tiny_v3(), dtype=BF16)
    by_path = {id(w): w for _, w in p.model.weights()}
    assert p.weight_bytes == sum(w.nbytes(BF16) for w in by_path.values())
    bias = weight(p, "layers.1.mlp.route.bias")
    assert p.nbytes(bias, "canonical") == 8 * 4, "float32 whatever the plan's dtype"


def test_entries_of_four_bits_share_bytes_where_the_packing_says_so():
    p, w = plan(tiny_llama()), Weight(("w",), (64, 32), format="int4_group32")
    bytewise = replace(w, format="int8_row")
    for weight in (w, bytewise):
        p.packings[id(weight)] = {"canonical": Packing("canonical"), "v.dense": Packing("v.dense", dense=True)}
    assert p.nbytes(w, "canonical") == 64 * 32 + 4 * 64
    assert p.nbytes(w, "v.dense") == 64 * 32 // 2 + 4 * 64
    assert p.nbytes(bytewise, "v.dense") == 64 * 32 + 4 * 64
    counted = Packing("v.counted", count_bytes=lambda weight: weight.shape[0])
    p.packings[id(w)] = {"v.counted": counted}
    assert p.nbytes(w, "v.counted") == 64
