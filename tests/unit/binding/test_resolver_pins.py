"""What a user may fix: pins by op, site, pattern and variant; the lock file; and what is said when it cannot be."""

from dataclasses import replace

import pytest

from inferplane.binding import explain, explain_text, signature
from inferplane.errors import BindError
from inferplane.ops import GatedMLP, Linear, placeholder
from inferplane.types import ActivationQuant, When
from tests.unit.support.small import BF16, choice, chosen, kernel, lost, plan, tiny_llama, tiny_v3

FAST, SLOW = kernel("linear", "fast", 90), kernel("linear", "slow", 10)
MLP = GatedMLP(Linear(placeholder(192, 64)), Linear(placeholder(64, 96)))


def served(p, end):
    return [c.label for site, _, c in p.sites("decode") if site.endswith(end)]


def test_by_op():
    p = plan(tiny_llama(), FAST, SLOW, pins={"linear": "slow"})
    assert set(served(p, "mlp.down") + served(p, "attn.qkv")) == {"slow:linear"}
    assert choice(p, "layers.1.mlp.down").why == "pinned to slow by 'linear'"
    assert lost(p, "layers.1.mlp.down", "fast:linear") == "pinned to slow by 'linear'"


def test_what_computes_in_fewer_bits_is_taken_by_a_pin_only():
    rough = replace(kernel("linear", "rough", 95), extra_error=0.1)
    unpinned, pinned = (plan(Linear(placeholder(4, 4)), rough, SLOW, pins=pins) for pins in ({}, {"linear": "rough"}))
    assert chosen(unpinned) == "slow:linear" and chosen(pinned) == "rough:linear"
    assert lost(unpinned, "", "rough:linear") == "computes in fewer bits (error up to 0.1 more): pin it to use it"


def asking(act="fp8"):
    quant = ActivationQuant(act) if act else None
    return Linear(replace(placeholder(4, 4, format="fp8_row"), activation_quant=quant))


def test_activations_are_coded_where_the_checkpoint_asks():
    takes = When(formats=("plain", "fp8_row"))
    coding = replace(kernel("linear", "coding", 50, when=takes), extra_error=0.06, quantizes_activations_to="fp8")
    exact = kernel("linear", "exact", 50, when=takes)
    asked = plan(asking(), exact, coding)
    assert chosen(asked) == "coding:linear" and not choice(asked).ambiguous
    assert choice(asked).why == "rank 50; quantizes activations to fp8, as requested"
    unasked = plan(asking(""), exact, coding)
    assert chosen(unasked) == "exact:linear" and choice(unasked).why == "rank 50"
    assert chosen(plan(asking("int8"), exact, coding)) == "exact:linear", "another coding than its own"
    better = plan(asking(), replace(exact, rank=60), coding)
    assert chosen(better) == "exact:linear"
    assert choice(better).activation_quant_skipped == "coding:linear is not chosen: ranks below exact:linear"
    alone = plan(asking(), exact)
    (told,) = explain(alone)["activation_quant_skipped"]
    assert told == {
        "op": "linear",
        "activation_quant": "fp8",
        "sites": 1,
        "reason": "no kernel of linear quantizes them",
    }
    told = "not quantized to fp8 at 1 sites, though that is requested: no kernel of linear quantizes them"
    assert told in explain_text(alone)
    assert explain(asked)["activation_quant_skipped"] == explain(unasked)["activation_quant_skipped"] == []


def test_what_is_asked_of_one_weight_says_nothing_of_others():
    takes = When(formats=("plain", "fp8_row"))
    coding = replace(kernel("gated_mlp", "coding", 50, when=takes), extra_error=0.06, quantizes_activations_to="fp8")
    exact = kernel("linear", "exact", 40, when=takes)
    plain = Linear(placeholder(4, 2, format="fp8_row"))
    both = GatedMLP(asking(), Linear(replace(plain.weight, activation_quant=ActivationQuant("fp8"))))
    assert chosen(plan(both, coding, exact)) == "coding:gated_mlp"
    assert chosen(plan(replace(both, down=plain), coding, exact)) == "decomposition"


def test_by_full_name():
    assert chosen(plan(Linear(placeholder(4, 4)), FAST, SLOW, pins={"linear": "slow:linear"})) == "slow:linear"


def test_by_site():
    p = plan(tiny_llama(), FAST, SLOW, pins={"layers.1.mlp.down": "slow"})
    assert served(p, "mlp.down") == ["fast:linear", "slow:linear", "fast:linear"]
    assert set(served(p, "gate_up")) == {"fast:linear"}


def test_by_pattern():
    p = plan(tiny_llama(), FAST, SLOW, pins={"layers.[12].mlp.[dg]*": "slow"}, kinds=("decode",))
    assert served(p, "mlp.down") == ["fast:linear", "slow:linear", "slow:linear"]


@pytest.mark.parametrize("names", [["layers.1.mlp.down", "layers.*.down", "linear"]] * 2, ids=["forward", "backward"])
def test_the_more_exact_name_wins_in_any_order(names, request):
    third = kernel("linear", "third", 50)
    pins = dict(zip(names, ("slow", "third", "fast")))
    if request.node.callspec.id == "backward":
        pins = dict(reversed(pins.items()))
    p = plan(tiny_llama(), FAST, SLOW, third, pins=pins)
    assert served(p, "mlp.down") == ["third:linear", "slow:linear", "third:linear"]
    assert set(served(p, "attn.o")) == {"fast:linear"}


def test_the_longer_of_two_patterns_wins():
    for pins in (
        {"layers.*": "decomposition", "layers.*.down": "slow"},
        {"layers.*.down": "slow", "layers.*": "decomposition"},
    ):
        p = plan(tiny_llama(), FAST, SLOW, kernel("gated_mlp"), pins=pins)
        assert set(served(p, "mlp.down")) == {"slow:linear"} and set(served(p, "mlp")) == {"decomposition"}


def test_layers_pinned_alike_share_one_choice():
    p = plan(tiny_llama(), FAST, SLOW, pins={"layers.*.down": "slow"})
    assert choice(p, "layers.0") is choice(p, "layers.2")


def test_a_digit_more_is_another_layer():
    model = tiny_llama(num_hidden_layers=12)
    p = plan(model, FAST, SLOW, pins={"layers.1.mlp.down": "slow"})
    assert served(p, "mlp.down").count("slow:linear") == 1 and chosen(p, "layers.11.mlp.down") == "fast:linear"


def test_reference_holds_for_everything_below():
    p = plan(tiny_llama(), FAST, kernel("silu_mul"), kernel("gated_mlp"), pins={"layers.1.mlp": "reference"})
    below = ("layers.1.mlp.gate_up", "layers.1.mlp.down", "layers.1.mlp.act")
    assert [chosen(p, s) for s in below] == ["reference"] * 3
    assert choice(p, below[0]).why == "pinned to reference by 'layers.1.mlp'" == lost(p, below[0], "fast:linear")
    assert chosen(p, "layers.0.mlp") == "vendor:gated_mlp" and chosen(p, "layers.1.attn.o") == "fast:linear"


def test_a_pin_of_its_own_below_reference():
    p = plan(MLP, FAST, SLOW, pins={"gated_mlp": "reference", "down": "slow"})
    assert [chosen(p, s) for s in ("gate_up", "down")] == ["reference", "slow:linear"]


def test_decomposition_keeps_the_parts_kernels():
    p = plan(MLP, SLOW, kernel("gated_mlp"), pins={"gated_mlp": "decomposition"})
    assert chosen(p) == "decomposition" and chosen(p, "down") == "slow:linear"


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_variants(form):
    composite = kernel("mla_block", rank=90)
    p = plan(tiny_v3(), composite, FAST, pins={"mla_block": form})
    assert chosen(p, "layers.2.attn") == f"decomposition ({form})" and choice(p, "layers.2.attn").variant == form
    assert lost(p, "layers.2.attn", "vendor:mla_block") == f"pinned to {form} by 'mla_block'"
    one = plan(tiny_v3(), composite, FAST, pins={"layers.2.attn": form})
    assert chosen(one, "layers.1.attn") == "vendor:mla_block" and chosen(one, "layers.2.attn").endswith(f"({form})")


def test_a_pinned_part_is_never_hidden_by_a_larger_kernel():
    p = plan(tiny_llama(), kernel("gated_mlp"), kernel("decoder_layer"), SLOW, pins={"layers.1.mlp.down": "slow"})
    assert chosen(p, "layers.1.mlp.down") == "slow:linear" and chosen(p, "layers.0") == "vendor:decoder_layer"
    for site, name in (("layers.1", "vendor:decoder_layer"), ("layers.1.mlp", "vendor:gated_mlp")):
        assert lost(p, site, name) == "pin 'layers.1.mlp.down' asks for a part of it"


def test_a_whole_and_its_part_pinned_apart_contradict_each_other():
    with pytest.raises(
        BindError, match=r"'gated_mlp' at layers.1.mlp .* refused: pin 'layers.1.mlp.down' asks for a part"
    ):
        plan(tiny_llama(), kernel("gated_mlp"), SLOW, pins={"layers.1.mlp": "vendor", "layers.1.mlp.down": "slow"})


def test_an_op_that_is_nowhere_a_site_of_its_own():
    with pytest.raises(BindError, match=r"'linear' is pinned.*larger kernel.*layers.0 \(vendor:decoder_layer\)"):
        plan(tiny_llama(), kernel("decoder_layer"), SLOW, pins={"linear": "slow"})


def test_a_kernel_for_the_whole_tells_of_a_pin_that_it_hides_in_places():
    """The pin holds wherever the op is bound by itself, so it is not refused; where it is not, explain says so."""
    p = plan(tiny_llama(), FAST, SLOW, kernel("gated_mlp"), pins={"linear": "slow"})
    assert chosen(p, "layers.1.attn.o") == "slow:linear" and chosen(p, "layers.1.mlp") == "vendor:gated_mlp"
    assert "so the pin of 'linear' has no effect: pin this to 'decomposition' too" in choice(p, "layers.1.mlp").why
    both = plan(tiny_llama(), FAST, SLOW, kernel("gated_mlp"), pins={"linear": "slow", "gated_mlp": "decomposition"})
    assert chosen(both, "layers.1.mlp.down") == "slow:linear"
    assert "no effect" not in choice(plan(tiny_llama(), kernel("gated_mlp")), "layers.1.mlp").why


# -- pins that cannot be met


def test_no_such_provider():
    with pytest.raises(
        BindError, match=r"'linear' at layers.0.*'nobody'.*no kernel for this op.*fast:linear, reference"
    ):
        plan(tiny_llama(), FAST, pins={"linear": "nobody"})


def test_a_refused_kernel_says_all_its_reasons():
    ks = [
        kernel("linear", "v", when=When(dtypes=(BF16,))),
        kernel("linear", "v", target=lambda p, x: x, when=When(features=("fp8",))),
    ]
    with pytest.raises(BindError, match=r"v:<lambda> is refused: feature 'fp8'.*v:linear is refused: dtype float32"):
        plan(Linear(placeholder(4, 4)), *ks, pins={"linear": "v"})


def test_a_demoted_kernel_cannot_be_pinned():
    with pytest.raises(BindError, match="demoted: it lies"):
        plan(Linear(placeholder(4, 4)), FAST, pins={"linear": "fast"}, demoted={FAST: "it lies"})


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"layers.1.mlp.dwon": "slow"}, r"'layers.1.mlp.dwon'.*near it: .*layers.1.mlp.down"),
        ({"liner": "slow"}, r"'liner'.*linear"),
        ({"layers.7.mlp": "slow"}, r"'layers.7.mlp'"),
        ({"layers.*.nothing": "slow"}, r"'layers.\*.nothing'"),
        ({"mla_block": "absorbed"}, r"'mla_block'"),
        ({"linear": "slow", "qqqqqq": "x"}, r"'qqqqqq'.*ops add_rms_norm"),
    ],
)
def test_a_pin_that_meets_no_site(pins, words):
    with pytest.raises(BindError, match=words):
        plan(tiny_llama(), FAST, SLOW, pins=pins)


# -- the lock file


def key(op, kind="decode"):
    return f"{op.name}|{kind}|{signature(op)}"


def test_the_lock_goes_before_ranks_and_behind_pins():
    op = Linear(placeholder(4, 4))
    lock = {key(op): "slow:linear"}
    p = plan(op, FAST, SLOW, lock=lock)
    assert chosen(p, kind="decode") == "slow:linear" and choice(p).why == "chosen by the lock file"
    assert lost(p, "", "fast:linear") == "chosen by the lock file" and chosen(p, kind="mixed") == "fast:linear"
    assert chosen(plan(op, FAST, SLOW, lock=lock, pins={"linear": "fast"})) == "fast:linear"


def test_the_lock_may_choose_a_composite_that_ranks_below_its_parts():
    low = kernel("gated_mlp", "low", 10)
    assert chosen(plan(MLP, FAST, low)) == "decomposition"
    assert chosen(plan(MLP, FAST, low, lock={key(MLP): "low:gated_mlp"})) == "low:gated_mlp"


def test_a_locked_kernel_that_is_gone():
    op = Linear(placeholder(4, 4))
    p = plan(op, FAST, lock={key(op): "gone:linear"})
    assert chosen(p) == "fast:linear" and choice(p).why == "rank 90; the lock file's gone:linear is not available"


def test_other_sizes_are_not_locked():
    p = plan(MLP, FAST, SLOW, lock={key(MLP.down): "slow:linear"})
    assert chosen(p, "down") == "slow:linear" and chosen(p, "gate_up") == "fast:linear"


def test_what_decided_is_a_field():
    """Not words of the reason: whether a pin, the lock file or ranks decided."""
    low, high = kernel("linear", "low", 40), kernel("linear", "high", 60)
    model = tiny_llama()
    key = f"linear|decode|{signature(model.layers[0].attn.o)}"
    for options, decided in (
        ({}, "rank"),
        ({"pins": {"linear": "low"}}, "pin"),
        ({"pins": {"linear": "reference"}}, "pin"),
        ({"lock": {key: low.name}}, "lock"),
        ({"lock": {key: "gone:linear"}}, "rank"),
    ):
        found = choice(plan(model, low, high, **options), "layers.0.attn.o")
        assert found.decided_by == decided
    assert choice(plan(model), "layers.0.attn").decided_by == "rank", "no kernel accepts it"
