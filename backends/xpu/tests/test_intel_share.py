"""How much of a step runs on vllm-xpu-kernels' operators, by number of sites, at published sizes; no GPU."""

from __future__ import annotations

from inferplane_xpu.intel.backend import IntelBackend
from tests.vendors.share import KINDS, LLAMA, PUBLISHED, check, count_providers

VENDOR = ("vllm_xpu", "torch_xpu")


@PUBLISHED
@KINDS
def test_a_step_is_the_vendors(config, kind, record_property):
    check(count_providers(IntelBackend(), config, "bmg", kind), VENDOR, record_property)


def test_a_gpu_without_the_matrix_kernels_walks_down_with_the_reason():
    """An Alchemist has norms, positions and writes of the extension; attention is torch's, a sequence at a time."""
    found = count_providers(IntelBackend(), LLAMA, "dg2", "decode")
    assert found["add_rms_norm", "vllm_xpu"] and found["kv_write", "vllm_xpu"]
    assert found["attention", "torch_sdpa"] == 2 * 32, "for few query tokens and for many"
