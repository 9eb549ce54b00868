"""Enflame's GCU: an S60, on vllm-gcu's operators."""

from __future__ import annotations

from tests.vendors.calls import Call
from tests.vendors.profile import ROWS, Profile


class Gcu(Profile):
    """Plain blocks for every family."""

    device = "gcu"
    library = "vllm-gcu"
    sources = "backends/gcu/inferplane_gcu"
    shared_sources = ("core/inferplane/kernels/fused/vllm_kernels.py",)
    quantized = {
        "weight_only_int8": "vllm_gcu:linear_w8a16",
        "weight_only_int4": "vllm_gcu:linear_w4a16",
        "a8w8": "vllm_gcu:linear_w8a8",
    }
    providers = ("vllm_gcu", "flash_attn", "torch", "decomposition")
    wrong_calls = [  # a keyword that there is not, and an argument that is missing
        Call("_C::silu_and_mul", [ROWS], {"x": ROWS}, []),
        Call("_C::rms_norm", [ROWS, ROWS, ROWS], {}, []),
    ]

    def attention(self, family: str) -> tuple[str, ...]:
        return ("vllm_gcu", "flash_attn")

    def layouts(self, family: str) -> set[str]:
        return {"paged_64"}


PROFILE = Gcu("gcu")
