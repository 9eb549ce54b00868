"""Intel's GPUs: a Battlemage, on vllm-xpu-kernels' operators."""

from __future__ import annotations

from tests.vendors.calls import Call
from tests.vendors.profile import ROWS, Profile


class Intel(Profile):
    """Plain blocks for every family, and weights in FP8 besides."""

    device = "xpu:intel"
    library = "vllm-xpu-kernels"
    sources = "backends/xpu/inferplane_xpu/intel"
    shared_sources = ("core/inferplane/kernels/fused/vllm_kernels.py",)
    formats = ("int8_row", "int4_group", "fp8_block")
    quantized = {"weight_only_int8": "torch_xpu:linear_int8pack"}
    dense_only = ("weight_only_int8",)
    providers = ("vllm_xpu", "torch_xpu", "torch", "decomposition")
    wrong_calls = [  # a keyword that there is not, and an argument that is missing
        Call("_C::silu_and_mul", [ROWS], {"x": ROWS}, []),
        Call("_C::rms_norm", [ROWS, ROWS, ROWS], {}, []),
    ]

    def attention(self, family: str) -> tuple[str, ...]:
        return ("vllm_xpu",)

    def layouts(self, family: str) -> set[str]:
        return {"paged_64"}


PROFILE = Intel("intel")
