"""Which kernel multiplies what: every weight format on every architecture has a compiled kernel, or a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane.binding import Options, Resolver
from inferplane.ops import (
    FORMATS,
    AllReduce,
    GatedMLP,
    Linear,
    LMHead,
    MoE,
    MoEExperts,
    MoERoute,
    Quantize,
    placeholder,
)
from inferplane.plugin import ActivationQuant, Context, Features
from inferplane_cuda.backend import features_of
from inferplane_cuda.kernels import kernels, products

BF16 = torch.bfloat16
EXPANDED = ("mxfp8", "int8_group32", "int8_group16", "int4_min32", "int8_min16")
"""Formats that no kernel here multiplies as they are stored: weights are expanded when they are read."""


def answers(op, capability=(9, 0)):
    """Kernels that a plan may take for an op, the best first, and why it does not take the others."""
    ctx = Context(BF16, "decode", {}, Features(dict(features_of(capability))))
    offered = [k for k in kernels() if k.op == op.name]
    why = {k.name: k.refusals(op, ctx, op.formats()) for k in offered}
    best = sorted((k for k in offered if not why[k.name]), key=lambda k: -k.rank)
    return [k.name for k in best if not k.extra_error], {name: reasons for name, reasons in why.items() if reasons}


def layers(format: str):
    weight = placeholder(512, 256, format=format)
    yield Linear(weight)
    yield Linear(weight, bias=placeholder(512))
    yield MoEExperts(placeholder(4, 512, 256, format=format), placeholder(4, 256, 256, format=format))
    yield GatedMLP(Linear(weight), Linear(placeholder(256, 256, format=format)))
    if not format.startswith("fp8_row"):
        yield LMHead(weight)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("format", sorted(FORMATS))
def test_every_format_is_multiplied_as_it_is_stored(format, capability):
    for op in layers(format):
        served, refused = answers(op, capability)
        if format in EXPANDED:
            assert served == [] and any("weight format" in reason for reasons in refused.values() for reason in reasons)
            continue
        assert served and served[0].startswith("triton:"), (op, refused)
        assert all(len(reason) > 10 for reasons in refused.values() for reason in reasons)


def test_before_ampere_the_reason_is_the_compiler():
    served, refused = answers(Linear(placeholder(512, 256, format="int4_group")), (7, 5))
    assert served == []
    assert any("support by Triton's compiler came with 8.0" in reason for reason in refused["triton:linear"])


def test_plain_weights_go_to_the_library():
    served, refused = answers(Linear(placeholder(512, 256)))
    reason = "needs a quantized weight, or a float32 result of one in the plan's dtype"
    assert served[0] == "torch:linear" and refused["triton:linear"] == [reason]


def test_routers_are_one_launch_without_a_copy_in_float32():
    assert answers(Linear(placeholder(64, 256), out_dtype=torch.float32))[0][0] == "triton:linear"
    router = Linear(placeholder(64, 256, dtype=torch.float32), out_dtype=torch.float32)
    assert answers(router)[0][0] == "torch:linear_float32", "its entries would be rounded"


def test_a_mixture_is_served_whole_or_says_why():
    def layer(**options):
        route = MoERoute(None, 2)
        experts = MoEExperts(placeholder(4, 64, 32), placeholder(4, 32, 32))
        op = MoE(Linear(placeholder(4, 32), out_dtype=torch.float32), route, experts)
        return answers(replace(op, **options))

    assert layer()[0] == ["triton:moe"]
    for change in ({"here": (0, 2)}, {"reduce": AllReduce(2)}):
        served, refused = layer(**change)
        assert served == [] and refused["triton:moe"] == ["needs all experts on one rank"]
    served, refused = layer(shared=GatedMLP(Linear(placeholder(64, 32), placeholder(64)), Linear(placeholder(32, 32))))
    assert served == [] and "a shared MLP without bias" in refused["triton:moe"][0]


@pytest.mark.parametrize(
    ("act", "group", "served"),
    [
        (Quantize("fp8", 128), 128, True),
        (Quantize("fp8", 0), 0, True),
        (Quantize("int8", 0), 0, True),
        (Quantize("fp8", 96), 96, False),
        (Quantize("int4", 0), 0, False),
    ],
)
def test_coded_activations(act, group, served):
    op = Linear(placeholder(512, 384, format="fp8_block"), activation_quant=act, activation_group=group)
    found, refused = answers(op)
    assert (found[:1] == ["triton:linear"]) == served
    if not served:
        assert refused["triton:linear"] == ["needs activations as they are, or in 8 bits by whole rows or 128 columns"]


def test_routing_and_experts_of_plain_weights_may_be_recorded():
    route = MoERoute(placeholder(256), 8, "sigmoid", 8, 4, "top2", True, 2.5)
    experts = MoEExperts(placeholder(8, 512, 256), placeholder(8, 256, 256))
    by_name = {k.name: k for k in kernels() if k.op in ("moe_route", "moe_experts")}
    for op in (route, experts):
        served, _ = answers(op)
        assert served[0].startswith("triton:") and by_name[served[0]].capture_safe


def test_kernels_that_code_activations_unasked_are_taken_by_a_pin_alone():
    op = Linear(placeholder(512, 256, format="fp8_block"))
    ctx = Context(BF16, "decode", {}, Features(dict(features_of((9, 0)))))
    (pinned,) = [k for k in kernels() if k.name == "triton_fp8:linear_fp8"]
    assert pinned.extra_error and not pinned.refusals(op, ctx, op.formats())


def test_fp8_numbers_are_multiplied_as_they_are_from_ada_on():
    for capability, native in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        ctx = Context(BF16, "decode", {}, Features(dict(features_of(capability))))
        assert products(None, ctx).fp8 is native


def bound(op, capability):
    """How a plan binds one op: the kernel and why; and what it says of activations that stay as they are."""
    features = Features(dict(features_of(capability)))
    resolver = Resolver(kernels(), Context(BF16, "decode", {}, features), Options())
    choice = resolver.resolve(op)
    return choice.label, choice.why, choice.activation_quant_skipped


def asked(format: str, *shape: int, act: str = "fp8"):
    return replace(placeholder(*shape, format=format), activation_quant=ActivationQuant(act))


@pytest.mark.parametrize("format", ["fp8_block", "fp8_row"])
def test_a_checkpoint_that_asks_has_its_activations_coded_without_a_pin(format):
    linear = Linear(asked(format, 512, 256))
    mlp = GatedMLP(linear, Linear(asked(format, 256, 256)))
    experts = MoEExperts(asked(format, 4, 512, 256), asked(format, 4, 256, 256))
    for op, name in ((linear, "linear"), (mlp, "gated_mlp"), (experts, "moe_experts")):
        label, why, activation_quant_skipped = bound(op, (9, 0))
        assert label == f"triton_fp8:{name}_fp8" and not activation_quant_skipped
        assert "quantizes activations to fp8, as requested" in why and "AMBIGUOUS" not in why
        label, _, activation_quant_skipped = bound(op, (8, 0))
        assert label == f"triton:{name}" and "came with 8.9" in activation_quant_skipped
    assert bound(Linear(placeholder(512, 256, format=format)), (9, 0))[0] == "triton:linear"


@pytest.mark.parametrize("format", ["int4_row", "int4_group", "int4_group64", "int4_group32"])
def test_int4_meets_activations_in_fp8_where_the_checkpoint_asks(format):
    experts = MoEExperts(asked(format, 4, 512, 256), asked(format, 4, 256, 256))
    linear = Linear(asked(format, 512, 256))
    mlp = GatedMLP(linear, Linear(asked(format, 256, 256)))
    for op, name in ((linear, "linear"), (mlp, "gated_mlp"), (experts, "moe_experts")):
        label, why, activation_quant_skipped = bound(op, (9, 0))
        assert label == f"triton_fp8:{name}_fp8" and not activation_quant_skipped
        assert "quantizes activations to fp8, as requested" in why
        assert bound(op, (8, 0))[0] == f"triton:{name}"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_int8_weights_meet_activations_in_int8_where_that_is_asked_for(capability):
    weight = asked("int8_row", 512, 256, act="int8")
    linear, down = Linear(weight), Linear(asked("int8_row", 256, 256, act="int8"))
    experts = MoEExperts(asked("int8_row", 4, 512, 256, act="int8"), asked("int8_row", 4, 256, 256, act="int8"))
    router = Linear(placeholder(4, 256), out_dtype=torch.float32)
    mixture = MoE(router, MoERoute(None, 2), experts, GatedMLP(linear, down))
    ops = ((linear, "linear"), (GatedMLP(linear, down), "gated_mlp"), (experts, "moe_experts"), (mixture, "moe"))
    for op, name in ops:
        label, why, activation_quant_skipped = bound(op, capability)
        assert label == f"triton_int8:{name}_int8" and not activation_quant_skipped
        assert "quantizes activations to int8, as requested" in why
    unasked = Linear(placeholder(512, 256, format="int8_row"))
    assert bound(unasked, capability)[0] == "triton:linear"


def test_a_shared_mlp_in_another_format_keeps_a_mixture_from_being_coded_whole():
    experts = MoEExperts(asked("int8_row", 4, 512, 256, act="int8"), asked("int8_row", 4, 256, 256, act="int8"))
    shared = GatedMLP(Linear(placeholder(512, 256)), Linear(placeholder(256, 256)))
    op = MoE(Linear(placeholder(4, 256), out_dtype=torch.float32), MoERoute(None, 2), experts, shared)
    assert answers(op)[1]["triton_int8:moe_int8"] == ["needs a shared MLP in INT8"]
