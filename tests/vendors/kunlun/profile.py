"""Kunlun's cards: a P800, on the functions of kunlun_ops and xspeedgate_ops."""

from __future__ import annotations

from tests.vendors.calls import Call
from tests.vendors.configs import LATENT
from tests.vendors.profile import ROWS, Profile

WITH_WINDOWS = ("mistral_window", "gemma3")


class Kunlun(Profile):
    """Windows are left to torch."""

    device = "xpu:kunlun"
    library = "vLLM-Kunlun"
    sources = "backends/xpu/inferplane_xpu/kunlun"
    quantized = {"a8w8": "kunlun_ops:linear_w8a8"}
    wrong_calls = [  # a keyword that there is not, an argument that is missing, one by position that goes by keyword
        Call("kunlun_ops::swiglu", [], {"x": ROWS, "out": ROWS}, []),
        Call("kunlun_ops::rmsnorm", [ROWS, ROWS], {}, []),
        Call("kunlun_ops::swiglu", [ROWS, ROWS], {}, []),
    ]

    def attention(self, family: str) -> tuple[str, ...]:
        return ("torch",) if family in WITH_WINDOWS else ("kunlun_ops",)

    def layouts(self, family: str) -> set[str]:
        return {"kunlun_latent_64" if family in LATENT else "kunlun_bhld_16"}

    def check_kernels(self, family: str, chosen: list[tuple[str, str]]) -> None:
        """All attention is the vendor's, or all is torch's."""
        attention = [kernel for op, kernel in chosen if op in ("attention", "mla_absorbed", "mla_expanded")]
        vendor = [kernel.startswith("kunlun_ops:") for kernel in attention]
        assert attention and not any(vendor) if family in WITH_WINDOWS else all(vendor), attention


PROFILE = Kunlun("kunlun")
