"""Which format a weight gets that is quantized while it is read: the first one that a kernel of its op reads."""

import pytest
import torch

from inferplane.binding import PlanSettings
from inferplane.models import Build, Config, build
from inferplane.plugin import When
from inferplane.quant import choose_formats, make_reads, quantize_on_load, schemes_instead
from inferplane.quant.online import SCHEMES
from inferplane.types import Feature, Features
from tests.e2e.tiny_models import llama_config
from tests.unit.support.small import kernel

SETTINGS = PlanSettings("toy", torch.bfloat16, "", Features({"dots": Feature(True, "here")}))


def reads(op, *formats, **when):
    return kernel(op, "vendor", when=When((torch.bfloat16,), formats, **when))


def choose(*kernels, scheme="weight_only_int8", settings=SETTINGS, **pins):
    model = build(Build(Config(llama_config().to_dict()), format_of=quantize_on_load(scheme, {}).format_of))
    return choose_formats([model], SCHEMES[scheme], make_reads(kernels, settings, pins))


def formats(chosen):
    return {choice.op: choice.format for choice in chosen.choices}


def test_the_first_format_that_is_read_by_op():
    groups, rows = reads("linear", "int8_group", "int8_row"), reads("lm_head", "int8_row")
    found = choose(groups, rows)
    assert formats(found) == {"linear": "int8_group", "lm_head": "int8_row"} and found.all_read
    assert found.by_name["lm_head.weight"] == "int8_row" and len(set(found.by_name.values())) == 2
    why = {choice.op: choice.why for choice in found.choices}
    assert why["lm_head"] == "no kernel of lm_head reads int8_group here"


def test_a_head_that_no_kernel_reads_stays_plain():
    found = choose(reads("linear", "int8_group"))
    assert formats(found) == {"linear": "int8_group", "lm_head": "plain"} and found.all_read
    assert found.by_name["lm_head.weight"] == "plain"
    assert found.choices[1].why == "no kernel of lm_head reads int8_group, int8_row here"


def test_the_first_format_stays_where_none_is_read():
    found = choose(reads("linear", "int4_row"))
    assert formats(found) == {"linear": "int8_group", "lm_head": "int8_group"} and not found.all_read
    assert "reads int8_group, int8_row here" in found.choices[0].why


@pytest.mark.parametrize(
    "when", [{"features": ("tiles",)}, {"needs": (("more rows", lambda op: op.weight.shape[0] > 10**6),)}]
)
def test_what_a_kernel_needs_counts(when):
    assert formats(choose(reads("linear", "int8_group", **when), reads("linear", "int8_row")))["linear"] == "int8_row"
    assert not choose(reads("linear", "int8_row"), linear="other").all_read


def test_a_kernel_that_quantizes_activations_counts_where_the_scheme_does():
    able = kernel("linear", "vendor", when=When((), ("int8_row",)), extra_error=0.03, quantizes_activations_to="int8")
    assert not any(choice.read for choice in choose(able).choices)
    read = {choice.op: choice.read for choice in choose(able, scheme="a8w8").choices}
    assert read == {"linear": True, "lm_head": True}


def test_another_scheme_is_named():
    model = build(Build(Config(llama_config().to_dict()), format_of=quantize_on_load("a8w8_fp8", {}).format_of))
    kernels = [reads("linear", "int8_row"), reads("lm_head", "int8_row")]
    assert schemes_instead([model], "a8w8_fp8", make_reads(kernels, SETTINGS, {})) == ["weight_only_int8", "a8w8"]
