"""Hygon's DCUs: a gfx936, or a gfx928 where attention is another, on its functions and operators."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from inferplane_dcu import vendor
from tests.vendors.calls import Call
from tests.vendors.configs import LATENT, OWN_ATTENTION
from tests.vendors.dcu import chip
from tests.vendors.profile import REPOSITORY, ROWS, Profile


class Dcu(Profile):
    """Blocks of heads for the families that have them, on gfx936."""

    device = "dcu"
    library = "Hygon's functions,"
    sources = "backends/dcu/inferplane_dcu"
    engine_families = OWN_ATTENTION if chip.ARCH != "gfx928" else ("llama", "mistral_window")
    quantized = {"a8w8": "lightop:linear_w8a8"}
    providers = ("lightop", "hcu_ops", "flash_attn", "flash_mla", "torch", "decomposition")
    mistakes_run = chip.whole
    wrong_calls = [  # a keyword that there is not, an argument that is missing, positions where there are keywords only
        Call("lightop__activation::silu_and_mul_opt", [ROWS], {"x": ROWS}, []),
        Call("lightop__norm::rmsnorm_forward_autograd", [ROWS, ROWS, 1e-6], {}, []),
        Call("flash_attn::hg_flash_attn_varlen_func", [ROWS, ROWS, ROWS, ROWS, 1, 1], {}, []),
    ]

    def called_operators(self) -> set[str]:
        """Every function that a kernel looks up, in its newest module, and every operator it calls."""
        kernels = REPOSITORY / self.sources / "kernels"
        names = {
            node.attr
            for path in kernels.glob("*.py")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vendor"
        }
        values = [getattr(vendor, name) for name in names]
        flat = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
        functions = [each for each in flat if isinstance(each, vendor.VendorFunction)]
        return {f"{f.modules[0].replace('.', '__')}::{f.name}" for f in functions} | super().called_operators()

    def models(self) -> Iterator[tuple[str, str, str]]:
        if chip.ARCH == "gfx928":
            return ((family, "plain", "ragged") for family in ("llama", "mistral_window", "qwen3"))
        return super().models()

    def attention(self, family: str) -> tuple[str, ...]:
        return ("flash_attn", "flash_mla")

    def layouts(self, family: str) -> set[str]:
        plain = family in LATENT or chip.ARCH == "gfx928"
        return {"paged_64" if plain else "dcu_heads_64"}


PROFILE = Dcu("dcu")
