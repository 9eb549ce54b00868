"""Which kernel wins at a site, and what is said of those that lose."""

import itertools

import pytest
import torch

from inferplane.errors import BindError, KernelError
from inferplane.ops import Attention, GatedMLP, Linear, MLAExpanded, Quantize, RMSNorm, SiluMul, placeholder
from inferplane.types import Context, Feature, Features, Kernel, Packing, When
from tests.unit.support.small import BF16, F16, F32, choice, chosen, function, kernel, lost, plan, tiny_llama, tiny_v3

MLP = GatedMLP(Linear(placeholder(192, 64)), Linear(placeholder(64, 96)))


# -- ranks


@pytest.mark.parametrize(
    ("composite", "leaf", "silu", "wins"),
    [
        (10, 90, 90, "decomposition"),
        (50, 90, 90, "decomposition"),
        (50, 90, None, "decomposition"),  # a cold part on its reference does not count
        (50, 10, 90, "vendor:gated_mlp"),
        (90, 90, 90, "vendor:gated_mlp"),  # equal: one call is better than three
        (10, None, 90, "vendor:gated_mlp"),  # a hot part without a kernel has rank 0
    ],
)
def test_a_composite_kernel_against_its_slowest_hot_part(composite, leaf, silu, wins):
    parts = [kernel(op, rank=rank) for op, rank in (("linear", leaf), ("silu_mul", silu)) if rank is not None]
    p = plan(MLP, kernel("gated_mlp", rank=composite), *parts)
    assert chosen(p) == wins
    if wins == "decomposition":
        assert lost(p, "", "vendor:gated_mlp") == choice(p).why
        assert f"slowest hot part has rank {leaf}, above vendor:gated_mlp with {composite}" in choice(p).why


def test_the_slowest_of_several_hot_parts_counts():
    wide = When(needs=(("more rows than columns", lambda op: op.weight.shape[0] > op.weight.shape[1]),))
    leaves = [kernel("linear", "fast", 90, when=wide), kernel("linear", "slow", 20)]
    assert chosen(plan(MLP, kernel("gated_mlp", rank=50), *leaves)) == "vendor:gated_mlp"
    p = plan(MLP, kernel("gated_mlp", rank=10), *leaves)
    assert chosen(p) == "decomposition" and choice(p).rank == 20
    assert chosen(p, "gate_up") == "fast:linear" and chosen(p, "down") == "slow:linear"


def test_a_hot_op_with_parts_is_not_fast_because_they_are():
    """Attention's own work is in its body: fast parts do not make that body outrank a kernel."""
    v3 = tiny_v3()
    p = plan(v3, kernel("linear", rank=90), kernel("mla_expanded", rank=50), kernel("quantize", rank=90))
    assert chosen(p, "layers.0.attn.expanded") == "vendor:mla_expanded"
    act = Linear(placeholder(8, 128), activation_quant=Quantize("fp8", 128), activation_group=128)
    assert chosen(plan(act, kernel("linear", rank=10), kernel("quantize", rank=90))) == "vendor:linear"
    bare = plan(v3, kernel("linear", rank=90))
    assert chosen(bare, "layers.0.attn.expanded") == "reference"
    assert "mla_expanded" in {op for _, _, op in bare.hot_references()}


def test_a_reference_below_is_a_slow_part():
    """The hot body of `mla_expanded` has fast parts, but is none itself."""
    parts = [kernel(op, rank=90) for op in ("linear", "mla_absorbed", "mla_kv_write")]
    p = plan(tiny_v3(), kernel("mla_block", rank=50), *parts)
    assert chosen(p, "layers.0.attn") == "vendor:mla_block"
    p = plan(tiny_v3(), kernel("mla_block", rank=50), *parts, kernel("mla_expanded", rank=90))
    assert chosen(p, "layers.0.attn") == "decomposition"


def test_without_kernels_everything_is_on_its_reference():
    p = plan(MLP)
    assert [(site, c.label, c.why) for site, _, c in p.sites("decode")] == [
        ("", "decomposition", "no kernel accepts it: decomposed"),
        ("gate_up", "reference", "no kernel accepts it: reference"),
        ("down", "reference", "no kernel accepts it: reference"),
        ("act", "reference", "no kernel accepts it: reference"),
    ]


def test_every_loser_says_why():
    p = plan(
        Linear(placeholder(8, 8)),
        kernel("linear", "a", 90),
        kernel("linear", "b", 50),
        kernel("linear", "c", 95, when=When(dtypes=(BF16, F16))),
        kernel("linear", "d", 95, when=When(features=("fp8",), formats=("fp8_block",))),
    )
    assert chosen(p) == "a:linear" and choice(p).why == "rank 90"
    assert {r.kernel: (r.rank, r.reason) for r in choice(p).rejected} == {
        "b:linear": (50, "ranks below a:linear"),
        "c:linear": (95, "dtype float32 is not among bfloat16, float16"),
        "d:linear": (95, "weight format plain is not among fp8_block; feature 'fp8' is unknown on this device"),
    }


# -- equal ranks


def test_equal_ranks_are_ambiguous_in_any_order():
    ks = [kernel("linear", p, 90) for p in ("zeta", "alpha", "mid")]
    for order in itertools.permutations([*ks, kernel("linear", "low", 10)]):
        p = plan(Linear(placeholder(8, 8)), *order)
        assert chosen(p) == "alpha:linear" and choice(p).ambiguous
        assert choice(p).why == "AMBIGUOUS: mid:linear has rank 90 too; pin one, or change a rank"
        assert lost(p, "", "zeta:linear") == "has the rank of alpha:linear" and "below" in lost(p, "", "low:linear")


def test_equal_names_are_told_apart_by_where_they_come_from():
    one, two = kernel("linear", target="one.module:linear"), kernel("linear", target="two.module:linear")
    for order in ((one, two), (two, one)):
        c = choice(plan(Linear(placeholder(8, 8)), *order))
        assert c.kernel is one and c.ambiguous and [r.kernel for r in c.rejected] == ["vendor:linear"]


def test_ambiguity_below_the_decomposition_does_not_bind_a_composite():
    p = plan(MLP, kernel("linear", rank=90), kernel("gated_mlp", "a", 10), kernel("gated_mlp", "b", 10))
    assert chosen(p) == "decomposition" and not choice(p).ambiguous


def test_binding_is_deterministic():
    ks = [
        kernel(op, p, r) for op in ("linear", "attention", "rms_norm", "gated_mlp") for p, r in (("a", 50), ("b", 90))
    ]
    plans = [plan(tiny_llama(), *order) for order in (ks, ks[::-1], ks)]
    listed = [[(s, c.label, c.why, c.rejected) for s, _, c in p.sites("mixed")] for p in plans]
    assert listed[0] == listed[1] == listed[2]


# -- what a kernel takes


@pytest.mark.parametrize(
    ("when", "words"),
    [
        (When(dtypes=(BF16,)), "dtype float32 is not among bfloat16"),
        (When(formats=("int8_row", "fp8_block")), "weight format plain is not among int8_row, fp8_block"),
        (When(step_kinds=("mixed",)), "step kind decode is not among mixed"),
        (When(features=("absent",)), "feature 'absent' is absent: switched off"),
        (When(features=("unsure",)), "feature 'unsure' is unknown: no way to ask"),
        (When(features=("unheard of",)), "feature 'unheard of' is unknown on this device"),
        (When(features=("there",)), None),
        (When(needs=(("8 columns", lambda op: op.weight.shape[1] == 8),)), None),
        (When(needs=(("a multiple of 64", lambda op: op.weight.shape[1] % 64 == 0),)), "needs a multiple of 64"),
        (When(needs=(("x", lambda op: op.nothing),)), "its predicate 'x' raised AttributeError: "),
    ],
)
def test_refusals(when, words):
    known = {
        "absent": Feature(False, "switched off"),
        "unsure": Feature(None, "no way to ask"),
        "there": Feature(True, ""),
    }
    p = plan(Linear(placeholder(8, 8)), kernel("linear", when=when), features=Features(known))
    if words is None:
        assert chosen(p) == "vendor:linear"
    else:
        assert lost(p, "", "vendor:linear").startswith(words)


def test_all_reasons_are_given_together():
    when = When((BF16,), ("fp8_block",), ("paged_99",), ("mixed",), ("fp8",), (("luck", lambda op: False),))
    p = plan(tiny_llama(), kernel("attention", when=when))
    reason = lost(p, "layers.0.attn.few", "vendor:attention")
    words = ["dtype", "KV layout paged_16 is not among paged_99", "step kind", "feature 'fp8'", "needs luck"]
    assert [w for w in words if w not in reason] == []  # attention has no weights, so no format


def test_step_kinds_are_columns_of_their_own():
    few, many = kernel("linear", "few", 90, when=When(step_kinds=("decode",))), kernel("linear", "any", 50)
    p = plan(Linear(placeholder(8, 8)), few, many)
    assert chosen(p, kind="decode") == "few:linear" and chosen(p, kind="mixed") == "any:linear"
    assert lost(p, "", "few:linear", "mixed") == "step kind mixed is not among decode"


def test_deterministic_binds_only_batch_invariant_kernels():
    ks = kernel("linear", "fast", 90), kernel("linear", "steady", 10, batch_invariant=True)
    assert chosen(plan(Linear(placeholder(8, 8)), *ks)) == "fast:linear"
    p = plan(Linear(placeholder(8, 8)), *ks, deterministic=True)
    assert chosen(p) == "steady:linear" and "batch-invariant" in lost(p, "", "fast:linear")


def test_kernels_that_need_lengths_on_the_host():
    k, op = kernel("attention", needs_host_lens=True), Attention.samples()[0].op
    assert not k.refusals(op, Context(F32, "decode"), ())
    assert "lengths on the host" in k.refusals(op, Context(F32, "decode", host_lens=False), ())[0]


# -- demotion, lock


def test_a_demoted_kernel_is_passed_over_with_the_reason():
    a, b = kernel("linear", "a", 90), kernel("linear", "b", 50)
    p = plan(Linear(placeholder(8, 8)), a, b, demoted={a: "canary failed"})
    assert chosen(p) == "b:linear" and lost(p, "", "a:linear") == "demoted: canary failed"


def test_strict_refuses_hot_references_by_name():
    with pytest.raises(BindError, match=r"4 hot op\(s\).*toy.*linear at gate_up \(decode\)"):
        plan(MLP, kernel("silu_mul"), strict=True)
    with pytest.raises(BindError, match=r"\d+ hot op\(s\).* and \d+ more\. To do"):
        plan(tiny_v3(), strict=True)
    plan(MLP, kernel("linear"), strict=True)  # silu_mul is not hot
    plan(MLP, kernel("gated_mlp"), strict=True)
    with pytest.raises(BindError, match="mla_expanded"):
        plan(tiny_v3(), *(kernel(o) for o in ("linear", "lm_head", "mla_absorbed", "moe_experts")), strict=True)


# -- declarations


def test_a_kernel_for_an_unknown_op():
    with pytest.raises(KernelError, match=r"vendor:f .*unknown op 'liner'.*linear"):
        plan(MLP, Kernel("liner", "vendor", function("linear", "f")))


@pytest.mark.parametrize(
    "target", [lambda p: 0, lambda p, y: 0, lambda p, x, bias: 0, lambda p, *x: 0, lambda p, *, x: 0, lambda: 0]
)
def test_a_kernel_with_other_parameters(target):
    with pytest.raises(KernelError, match=r"takes \(.*\) after its view, but op 'linear' passes \(x\)"):
        plan(MLP, kernel("linear", target=target))


def test_a_builtin_without_a_signature_is_left_to_the_canary():
    assert chosen(plan(SiluMul(), kernel("silu_mul", target=torch._C._nn.silu))) == "vendor:silu"


def test_a_callable_object_has_a_name():
    class Launcher:
        def __call__(self, p, x):
            return x

    assert chosen(plan(SiluMul(), kernel("silu_mul", target=Launcher()))) == "vendor:Launcher"


@pytest.mark.parametrize(
    ("packs", "words"),
    [
        ({"wieght": Packing("v.t")}, "packs 'wieght', but op 'linear' has no such field.*weight, bias"),
        ({"weight": Packing("canonical", lambda w: w.t())}, "'canonical', which is a name reserved by core"),
        ({"weight": Packing("plain")}, "'plain', which is a name reserved by core"),
    ],
)
def test_packings_that_cannot_be(packs, words):
    with pytest.raises(KernelError, match=words):
        plan(MLP, kernel("linear", packs=packs))


def test_dotted_targets_are_not_imported_when_binding():
    k = kernel("rms_norm", target="no_such_module.kernels:norm")
    p = plan(RMSNorm(placeholder(8), 1e-6), k)
    assert chosen(p) == "vendor:norm"


def test_equal_layers_share_one_choice():
    p = plan(tiny_llama(), kernel("linear"), kernel("attention"))
    layers = [choice(p, f"layers.{i}") for i in range(3)]
    assert layers[0] is layers[1] is layers[2]
    assert len({id(c) for _, _, _, c in p.distinct()}) == len(list(p.distinct()))


def test_a_kernel_refused_below_a_composite_is_not_asked():
    """What a composite replaces has no line of its own."""
    p = plan(tiny_llama(), kernel("decoder_layer"))
    assert [s for s, _, _ in p.sites("decode") if s.startswith("layers.")] == ["layers.0", "layers.1", "layers.2"]
    assert MLAExpanded.hot and choice(p, "layers.0").hot
