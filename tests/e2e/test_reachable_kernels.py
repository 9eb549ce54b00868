"""Each kernel that a backend declares is bound by some model: a kernel that none can bind proves and serves nothing."""

from dataclasses import replace

import pytest

from inferplane.plugins import PluginHost, discover
from inferplane.types import When
from tests.e2e.reachable import distinct_ops, find_unknown_features, find_unreached, list_trees
from tests.unit.support.small import kernel

BACKENDS = ("cpu", "cuda", "dcu", "gcu", "npu", "xpu")
DEVICES = ("cpu", "cuda", "dcu", "gcu", "npu", "xpu:intel", "xpu:kunlun")


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return discover(",".join(("only", *(f"inferplane_{name}.plugin" for name in BACKENDS))))


@pytest.fixture(scope="module")
def ops():
    return distinct_ops(list_trees())


def test_every_device_is_here(host):
    assert sorted(d.name for d in host.devices()) == sorted(DEVICES)


@pytest.mark.parametrize("device", DEVICES)
def test_every_kernel_is_bound_by_a_model(device, host, ops):
    backend = host.backend_for_explain(device)
    kernels = host.kernels(backend)
    assert len(kernels) > 20
    assert [f"{k.op}: {k.name}" for k in find_unreached(backend, kernels, ops)] == []
    assert find_unknown_features(backend, kernels) == set()


def test_planted_kernels_are_found(host, ops):
    """One for an op that no model has, for a format, a field's value, a layout, a request, and a feature."""
    backend = host.backend_for_explain("gcu")
    own = host.kernels(backend)
    linear = When(formats=("int8_row",))
    planted = [
        kernel("quantize", "planted"),
        kernel("linear", "planted_format", when=When(formats=("int9_row",))),
        kernel("linear", "planted_need", when=replace(linear, needs=(("its own", lambda op: op.activation_quant),))),
        kernel("attention", "planted_layout", when=When(kv_layouts=("paged_63",))),
        kernel("linear", "planted_request", when=linear, extra_error=0.1, quantizes_activations_to="int5"),
        kernel("causal_lm", "planted_stack", inlines={"head": ("planted:head",)}),
    ]
    assert find_unreached(backend, [*own, *planted], ops) == planted
    odd = kernel("linear", "planted_feature", when=When(features=("warp-drive",)))
    assert find_unknown_features(backend, [*own, odd]) == {"warp-drive"}
