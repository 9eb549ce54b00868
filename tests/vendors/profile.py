"""What the tests of every vendor (tests/vendors/every) ask of one: `PROFILE` in tests/vendors/NAME/profile.py.

A profile is read where the vendor's operators are emulated and where its schemas are restated, so it imports neither.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.vendors import contract, schemas
from tests.vendors.calls import Call
from tests.vendors.checks import LIFTED
from tests.vendors.configs import COMPOSED_ATTENTION, FAMILIES, OWN_ATTENTION

REPOSITORY = Path(__file__).resolve().parents[2]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
ROWS = {"tensor": [3, 64], "strides": [64, 1], "dtype": "bfloat16"}
"""A tensor as `calls.encode` writes it, for wrong calls."""
in_vendor_dtypes = pytest.mark.skipif(LIFTED, reason="in the vendor's dtypes: without INFERPLANE_EMULATED_FLOAT32")
in_float32 = pytest.mark.skipif(not LIFTED, reason="at float32: with INFERPLANE_EMULATED_FLOAT32=1")


class Profile:
    """One vendor's answers; those without a value must be given.

    Args:
        name: of the folder in tests/vendors.
    """

    device: str
    library: str
    """What the calls are held against, in words."""
    sources: str
    """The folder whose kernels call the vendor's operators, from the repository's root."""
    shared_sources: tuple[str, ...] = ()
    """Files of core whose kernels call them too."""
    wrong_calls: list[Call]
    """Calls of restated operators that their schemas refuse."""

    dtype = torch.bfloat16
    """Of models that are tried in the vendor's dtypes."""
    formats: tuple[str, ...] = ("int8_row", "int4_group")
    """Weight formats that models are tried in."""
    composed_attention: Collection[str] = COMPOSED_ATTENTION
    """Families whose attention core composes."""
    engine_families: Collection[str] = OWN_ATTENTION
    """Families that the engine serves."""
    speculative: dict[str, dict[str, Any] | None] = {"drafts": DRAFTS}
    """How it serves them."""
    quantized: dict[str, str] = {}
    """What serves linear layers under each value of `quantization` that the vendor has a product for."""
    dense_only: Collection[str] = ()
    """Those of them under which experts are expanded."""
    providers: Collection[str] = ()
    """Of the kernels that may serve them: none that loops over sequences is among these."""
    mistakes_run = in_vendor_dtypes
    """Where mistakes are made."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = REPOSITORY / "build" / "vendors" / name / "calls"

    @cached_property
    def restated(self) -> schemas.Restated:
        """The vendor's schemas."""
        return schemas.read(REPOSITORY / "tests" / "vendors" / self.name / "schemas.txt")

    def module(self, part: str) -> ModuleType:
        """A module of the vendor's folder."""
        return import_module(f"tests.vendors.{self.name}.{part}")

    def called_operators(self) -> set[str]:
        """`namespace::name` of everything that the sources call of the vendor's."""
        return contract.called_operators(*(REPOSITORY / path for path in (self.sources, *self.shared_sources)))

    def models(self) -> Iterator[tuple[str, str, str]]:
        """Family, weight format and schedule of each model in the vendor's dtypes."""
        for family in FAMILIES:
            yield family, "plain", "whole_prompt"
        for family in ("llama", "llama_head_64", "mistral_window", "deepseek_v3"):
            yield from ((family, "plain", schedule) for schedule in ("ragged", "token_by_token"))
        for family in ("llama", "qwen3_moe", "deepseek_v3"):
            yield from ((family, weights, "ragged") for weights in self.formats)

    def quantized_models(self) -> Iterator[tuple[str, str, str]]:
        """Scheme, kernel of linear layers and family of each model that the engine serves quantized."""
        for scheme, kernel in self.quantized.items():
            yield from ((scheme, kernel, f) for f in ("llama", "qwen3_moe")[: 1 if scheme in self.dense_only else 2])

    def attention(self, family: str) -> tuple[str, ...]:
        """Providers of attention, one of which serves the family."""
        raise NotImplementedError

    def layouts(self, family: str) -> set[str]:
        """The KV layouts that serve the family."""
        raise NotImplementedError

    def check_kernels(self, family: str, chosen: list[tuple[str, str]]) -> None:
        """Assert that the ops of a family are served as they should be; `chosen` has op and kernel of each site that
        has a choice.
        """
        found = {kernel.partition(":")[0] for _, kernel in chosen}
        assert found <= set(self.providers), "torch_sdpa would be a loop over sequences"


def current() -> Profile:
    """The profile of the vendor whose suites this process runs, which tests/vendors/run.py names."""
    profile: Profile = import_module(f"tests.vendors.{os.environ['INFERPLANE_EMULATED_VENDOR']}.profile").PROFILE
    return profile
