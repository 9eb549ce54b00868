"""Quantized weights: read as stored where some kernel takes their format, else expanded at load, and said so."""

from dataclasses import replace

import pytest
import torch

from inferplane.binding import DictSource, explain, explain_text, link, load, view_of
from inferplane.errors import KernelError
from inferplane.ops import GatedMLP, Linear, encode, placeholder
from inferplane.ops.quantize import Quantize
from inferplane.types import CANONICAL, ActivationQuant, Packing, QTensor, Weight, When
from tests.unit.support.small import (
    BF16,
    choice,
    chosen,
    close,
    encoding,
    kernel,
    lost,
    plan,
    tensors_for,
    tiny_llama,
    tiny_v3,
    w,
)

INT8 = When(formats=("int8_row",))
BOTH = When(formats=("plain", "int8_row"))
Q = Linear(w("w", 48, 64, format="int8_row"))


def packings(p, end):
    (weight,) = {id(x): x for path, x in p.model.weights() if path.endswith(end)}.values()
    return set(p.packings[id(weight)])


def test_no_kernel_takes_it_so_it_is_expanded():
    p = plan(Q, kernel("linear"))
    assert chosen(p) == "vendor:linear" and choice(p).dequantized and packings(p, "weight") == {"plain"}
    assert p.weight_bytes == 48 * 64 * 4 and explain(p)["dequantized"] == [
        {"op": "linear", "format": "int8_row", "weights": 1}
    ]
    t = torch.randn(48, 64)
    f = link(p, load(p, DictSource({"w": t}), readers=encoding("int8_row")).packed)["decode"]
    assert torch.equal(view_of(f).weight, encode(t, "int8_row").dequantize())


def test_a_kernel_takes_it_so_others_are_refused_however_they_rank():
    p = plan(Q, kernel("linear", "wide", 90), kernel("linear", "int8", 10, when=INT8))
    assert chosen(p) == "int8:linear" and not choice(p).dequantized and packings(p, "weight") == {"canonical"}
    assert lost(p, "", "wide:linear") == "weight format int8_row is not among plain"
    assert p.weight_bytes == 48 * 64 + 4 * 48 and explain(p)["dequantized"] == []  # entries, and a scale a row
    t = torch.randn(48, 64)
    f = link(p, load(p, DictSource({"w": t}), readers=encoding("int8_row")).packed)["decode"]
    assert isinstance(view_of(f).weight, QTensor) and view_of(f).weight.data.dtype is torch.int8


@pytest.mark.parametrize(
    "gone",
    [
        {"when": When(formats=("int8_row",), dtypes=(BF16,))},
        {"when": When(formats=("int8_row",), features=("int8-dot",))},
        {"when": When(formats=("int8_row",), needs=(("more than it has", lambda op: op.weight.shape[1] > 64),))},
        {"when": When(formats=("fp8_block",))},
        {"when": INT8, "extra_error": 0.03, "quantizes_activations_to": "int8"},
    ],
    ids=["dtype", "feature", "need", "format", "fewer_bits"],
)
def test_a_kernel_that_cannot_serve_here_does_not_keep_the_format(gone):
    p = plan(Q, kernel("linear", "wide", 50), kernel("linear", "int8", 90, **gone))
    assert (
        chosen(p) == "wide:linear"
        and packings(p, "weight") == {"plain"}
        and "int8_row" in explain(p)["dequantized"][0]["format"]
    )


def test_a_kernel_with_fewer_bits_keeps_the_format_by_a_pin_or_a_request():
    rough = kernel("linear", "rough", 90, when=INT8, extra_error=0.03, quantizes_activations_to="int8")
    pinned = plan(Q, kernel("linear", "wide", 50), rough, pins={"linear": "rough"})
    assert chosen(pinned) == "rough:linear" and packings(pinned, "weight") == {"canonical"}
    requesting = Linear(replace(Q.weight, activation_quant=ActivationQuant("int8")))
    requested = plan(requesting, kernel("linear", "wide", 50), rough)
    assert chosen(requested) == "rough:linear" and packings(requested, "weight") == {"canonical"}


def test_a_kernel_with_the_ops_own_quantization_is_as_precise_as_the_op():
    rough = kernel("linear", "rough", 90, when=INT8, extra_error=0.03, quantizes_activations_to="int8")
    itself = replace(Q, activation_quant=Quantize("int8", 0))
    assert chosen(plan(itself, rough)) == "rough:linear"
    assert rough.extra_error_of(itself) == 0.0 and rough.extra_error_of(Q) == 0.03
    other = replace(Q, activation_quant=Quantize("fp8", 0))
    assert rough.is_less_precise_than(other) and rough.extra_error_of(other) == 0.03


def test_bytes_that_are_expanded_and_what_runs_on_torch():
    expanded, kept = plan(Q, kernel("linear", rank=10)), plan(Q, kernel("linear", rank=50, when=INT8))
    assert explain(expanded)["expanded_bytes"] == 48 * 64 * 4 and explain(kept)["expanded_bytes"] == 0
    assert explain(expanded)["on_torch"] == [{"op": "linear", "kernels": ["vendor:linear"]}]
    assert (
        explain(plan(Q))["on_torch"] == [{"op": "linear", "kernels": ["reference"]}] and not explain(kept)["on_torch"]
    )
    text = explain_text(expanded).splitlines()[-2:]
    assert text == ["weights expanded at load: 0.0 MiB", "hot ops on torch's own operators: linear (vendor:linear)"]
    text = explain_text(kept).splitlines()[-2:]
    assert text == ["weights expanded at load: none", "hot ops on torch's own operators: none"]


def test_a_kernel_of_another_dtype_is_named_where_torch_runs_an_op():
    """And only where the dtype alone is in its way."""
    fast = kernel("linear", "fast", 90, when=When(dtypes=(torch.bfloat16,)))
    torch_s = kernel("linear", "own", 10)
    op = Linear(w("w", 48, 64))
    assert plan(op, torch_s, fast).faster_dtypes() == {"bfloat16": ["linear"]}
    assert explain(plan(op, torch_s, fast))["on_torch"] == [
        {"op": "linear", "kernels": ["own:linear"], "faster_dtype": "bfloat16"}
    ]
    last = explain_text(plan(op, torch_s, fast)).splitlines()[-1]
    assert last == "faster with --dtype bfloat16, in which the device has kernels: linear"
    assert not plan(op, torch_s, fast, dtype=torch.bfloat16).faster_dtypes()
    absent = kernel("linear", "fast", 90, when=When(dtypes=(torch.bfloat16,), features=("unit",)))
    for other in (absent, kernel("linear", "fast", 10, when=When(dtypes=(torch.bfloat16,)))):
        assert not plan(op, torch_s, other).faster_dtypes()
    assert not plan(op, torch_s, kernel("linear", "wide", 50), fast).faster_dtypes(), "a kernel runs it"


def test_nor_does_one_that_was_demoted_or_is_not_batch_invariant():
    int8, wide = kernel("linear", "int8", 90, when=INT8), kernel("linear", "wide", 50, batch_invariant=True)
    for p in (plan(Q, wide, int8, demoted={int8: "wrong"}), plan(Q, wide, int8, deterministic=True)):
        assert chosen(p) == "wide:linear" and packings(p, "weight") == {"plain"}


def test_a_kernel_of_one_step_kind_keeps_the_format_in_both():
    """Or the weight would be kept twice, once as stored and once expanded."""
    decode = kernel("linear", "int8", 90, when=When(formats=("int8_row",), step_kinds=("decode",)))
    p = plan(Q, kernel("linear", "wide", 50), decode)
    assert (
        chosen(p) == "int8:linear" and chosen(p, kind="mixed") == "reference" and packings(p, "weight") == {"canonical"}
    )


def test_each_op_decides_for_itself():
    model = tiny_llama(format="int8_row")
    p = plan(model, kernel("linear", when=BOTH), kernel("lm_head"), kernel("embedding"))
    assert p.model.formats() == {"plain", "int8_row"} and not p.dequantized
    assert packings(p, "embed.weight") == packings(p, "layers.0.mlp.down.weight") == {"canonical"}


def test_a_composite_over_expanded_parts():
    p = plan(tiny_llama(format="int8_row"), kernel("gated_mlp"), kernel("linear"))
    assert chosen(p, "layers.0.mlp") == "vendor:gated_mlp" and choice(p, "layers.0.mlp").dequantized
    assert packings(p, "layers.0.mlp.down.weight") == {"plain"}


def test_a_composite_does_not_expand_what_its_parts_read_as_stored():
    p = plan(tiny_llama(format="int8_row"), kernel("gated_mlp", "wide", 90), kernel("linear", "int8", 10, when=INT8))
    assert chosen(p, "layers.0.mlp") == "decomposition" and "int8_row is not among plain" in lost(
        p, "layers.0.mlp", "wide:gated_mlp"
    )


@pytest.mark.parametrize(("wide", "leaf"), [(50, 10), (90, 90)])
def test_a_composite_may_take_a_format_that_no_part_takes(wide, leaf):
    """A backend that replaces whole layers brings its own weights."""
    layer = kernel("decoder_layer", "whole", 50, when=BOTH)
    p = plan(tiny_llama(format="int8_row"), layer, kernel("decoder_layer", "wide", wide), kernel("linear", rank=leaf))
    assert chosen(p, "layers.0") == "whole:decoder_layer" and not choice(p, "layers.0").dequantized
    assert "int8_row is not among plain" in lost(p, "layers.0", "wide:decoder_layer")
    assert packings(p, "layers.0.mlp.down.weight") == {"canonical"} and not p.dequantized


def test_what_is_read_as_stored_goes_before_faster_parts_that_are_expanded():
    ks = kernel("gated_mlp", "whole", 10, when=BOTH), kernel("linear", "wide", 90)
    p = plan(tiny_llama(format="int8_row"), *ks)
    assert chosen(p, "layers.0.mlp") == "whole:gated_mlp" and not choice(p, "layers.0.mlp").dequantized
    assert chosen(plan(tiny_llama(), *ks), "layers.0.mlp") == "decomposition", "plain weights are as stored either way"


def test_a_hot_op_with_parts_has_them_expanded_rather_than_run_its_slow_body():
    """Expanded latent attention reads `kv_b`, small beside the rest, whatever the other projections are kept in."""
    model = tiny_v3(format="int8_row")
    p = plan(model, kernel("linear", when=BOTH), kernel("mla_expanded"), kernel("mla_absorbed"), kernel("moe_experts"))
    assert (
        chosen(p, "layers.0.attn.expanded") == "vendor:mla_expanded" and choice(p, "layers.0.attn.expanded").dequantized
    )
    assert packings(p, "layers.0.attn.expanded.kv_b.weight") == {"plain"}, "shared with the absorbed form"
    assert packings(p, "layers.0.attn.o.weight") == {"canonical"}
    steps = link(p, load(p, DictSource(tensors_for(model)), readers=encoding("int8_row")).packed)
    attn = view_of(view_of(view_of(view_of(steps["mixed"]).layers).layers[0]).attn)
    assert view_of(attn.expanded).kv_b.weight is view_of(attn.absorbed).kv_b and isinstance(
        view_of(attn.o).weight, QTensor
    )
    assert p.dequantized.keys() == {("linear", "int8_row"), ("mla_absorbed", "int8_row"), ("moe_experts", "int8_row")}
    aware = kernel("mla_expanded", "aware", 10, when=BOTH)
    assert (
        chosen(plan(model, kernel("linear", when=BOTH), kernel("mla_expanded"), aware), "layers.0.attn.expanded")
        == "aware:mla_expanded"
    )


@pytest.mark.parametrize("native", [True, False])
def test_both_ways_compute_the_same(native):
    op = GatedMLP(
        Linear(Weight(("gate", "up"), (96, 64), format="int8_row")), Linear(w("down", 64, 48, format="int8_row"))
    )
    t, x = tensors_for(op), torch.randn(3, 64)
    q = {name: encode(v, "int8_row").dequantize() for name, v in t.items()}
    p = plan(op, kernel("linear", when=BOTH if native else When()))
    got = link(p, load(p, DictSource(t), readers=encoding("int8_row")).packed)["decode"](x)
    gate, up = x.double() @ q["gate"].double().T, x.double() @ q["up"].double().T
    assert close(op, got, (torch.nn.functional.silu(gate) * up) @ q["down"].double().T)


def test_formats_do_not_reach_across_weights():
    op = Linear(placeholder(8, 8, format="int8_row"), bias=placeholder(8))
    p = plan(op, kernel("linear", when=When(formats=("int8_row",))))
    assert chosen(p) == "reference" and lost(p, "", "vendor:linear") == "weight format plain is not among int8_row"


@pytest.mark.parametrize(
    ("packing", "label", "dequantized"),
    [
        (CANONICAL, "canonical", "plain"),
        (Packing("v.t"), "v.t", "plain > v.t"),
        (Packing("plain > v.t"), "plain > v.t", "plain > plain > v.t"),
        (Packing("v.plain", dense=True), "v.plain", "plain > v.plain"),
    ],
)
def test_a_packing_says_whether_it_is_of_dequantized_values(packing, label, dequantized):
    first = packing.dequantize_first(torch.float32)
    assert (packing.label, packing.dequantized) == (label, False)
    assert (first.label, first.dequantized, first.name) == (dequantized, True, packing.name)
    assert first != packing and not first.dense


def test_two_packings_with_one_label_are_never_shared():
    """A name that reads as that of dequantized values is refused as soon as both are needed of one weight."""
    p = plan(Q, kernel("linear", packs={"weight": Packing("v.t")}))
    assert packings(p, "weight") == {"plain > v.t"}
    p._use(Q, Q.weight, Packing("v.t"), "as stored")
    with pytest.raises(KernelError, match=r"'plain > v\.t' .* is requested as stored and of dequantized values"):
        p._use(Q, Q.weight, Packing("plain > v.t"), "another kernel")
