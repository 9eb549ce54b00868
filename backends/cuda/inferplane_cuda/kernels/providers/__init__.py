"""Kernels of other libraries, declared where these are installed: FlashInfer, FlashAttention 3, FlashMLA.

None is required, and none is imported before one of its kernels has been chosen. Whether a library is installed, in a
version whose functions are known, follows from metadata alone and is a feature of the device, so `explain` gives the
reason. Its functions and their parameters are looked up once, when a kernel is linked.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferplane.plugin import Feature, Kernel, KernelError, When, is_installed, version_of
from inferplane_cuda.kernels.conditions import NO_WINDOW, RANK_UNPROVED, V3_LATENTS

FOLDER = "inferplane_cuda.kernels.providers"
PLAIN_LAYOUT = "paged_64"


@dataclass(frozen=True)
class ProviderLibrary:
    """A library, and the versions whose functions were compared with what the kernels call.

    Args:
        module: what is imported.
        distribution: whose version counts.
        versions: from the first of these, and below the second.
        install: what brings it.
    """

    module: str
    distribution: str
    versions: tuple[str, str]
    install: str

    def feature(self) -> Feature:
        """Present, or absent with the reason. Nothing is imported."""
        if not is_installed(self.module):
            return Feature(False, f"{self.module} is not installed ({self.install})")
        here = version_of(self.distribution)
        if here is None:
            return Feature(False, f"{self.module} is here without a version; its functions are not known")
        low, high = self.versions
        if not _version_numbers(low) <= _version_numbers(here) < _version_numbers(high):
            return Feature(False, f"{self.distribution} {here} is here; known are {low} up to, not with, {high}")
        return Feature(True, f"{self.distribution} {here}")


LIBRARIES = {
    "flash_mla": ProviderLibrary("flash_mla", "flash_mla", ("1.0", "2.0"), "build it from deepseek-ai/FlashMLA"),
    "flash_attn_3": ProviderLibrary(
        "flash_attn_interface", "flash_attn_3", ("3.0.0b1", "4.0"), "build hopper/ of Dao-AILab/flash-attention"
    ),
    "flashinfer": ProviderLibrary(
        "flashinfer", "flashinfer-python", ("0.6", "0.7"), "pip install 'flashinfer-python<0.7'"
    ),
}
"""By the feature that stands for each."""


def features() -> dict[str, Feature]:
    """A feature per library: installed in a known version, or absent with the reason."""
    return {name: library.feature() for name, library in LIBRARIES.items()}


def find_function(module: str, path: str, parameters: Sequence[str]) -> Any:
    """Find a function or class of a library, and check that it takes the parameters it will be given.

    Args:
        module: what is imported.
        path: the name in it, dotted.
        parameters: names that are passed.

    Raises:
        KernelError: it is not there, or does not take one of them.
    """
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        taken = inspect.signature(found).parameters
    except Exception as error:
        raise KernelError(
            f"{module}.{path} cannot be used ({type(error).__name__}: {error}).",
            remedy="install a version that is known, or pin another provider",
        ) from error
    anything = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in taken.values())
    if missing := [name for name in parameters if name not in taken and not anything]:
        raise KernelError(
            f"{module}.{path} does not take {', '.join(missing)}.",
            there_is=", ".join(taken),
            remedy="install a version that is known, or pin another provider",
        )
    return found


def kernels() -> list[Kernel]:
    """Every kernel of these libraries."""

    def kernel(op: str, name: str, *needs: Any, prepare: str = "prepare", **options: Any) -> Kernel:
        when = When((torch.bfloat16,), kv_layouts=(PLAIN_LAYOUT,), features=("sm90", name), needs=needs)

        def find_and_prepare(op: Any, ctx: Any) -> Any:  # nothing is imported before
            return getattr(importlib.import_module(f"{FOLDER}.{name}"), prepare)(op, ctx)

        note = "not run on a GPU yet: taken by a pin, or where it was measured to be the fastest"
        return Kernel(
            op, name, f"{FOLDER}.{name}:{op}", when, RANK_UNPROVED, prepare=find_and_prepare, note=note, **options
        )  # fmt: skip

    return [
        kernel("mla_absorbed", "flash_mla", V3_LATENTS),
        kernel("sparse_mla_absorbed", "flash_mla", *SPARSE, prepare="prepare_sparse"),
        kernel("sparse_mla_expanded", "flash_mla", *SPARSE, prepare="prepare_sparse"),
        kernel("mla_absorbed", "flash_attn_3", V3_LATENTS),
        # It masks what lies before a window tile by tile, and NaN in a block that was given back would come through.
        kernel("attention", "flash_attn_3", NO_WINDOW, ("heads of at most 256 entries", lambda op: op.kv.dim <= 256)),
        kernel("mla_absorbed", "flashinfer", V3_LATENTS, prepare="prepare_mla_absorbed", needs_host_lens=True),
        kernel("attention", "flashinfer", NO_WINDOW, HEADS_TO_256, prepare="prepare_attention", needs_host_lens=True),
    ]


SPARSE = (
    V3_LATENTS,
    ("a multiple of 128 chosen tokens", lambda op: op.top % 128 == 0),
    ("at most 128 heads", lambda op: op.dims.heads <= 128),
)
HEADS_TO_256 = ("heads of 64, 128 or 256 entries", lambda op: op.kv.dim == op.kv.v_dim in (64, 128, 256))


def _version_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text.partition("+")[0])[:3])
