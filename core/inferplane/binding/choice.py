"""What resolving yields for a site, and what a user may ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from inferplane.types import Kernel

REFERENCE = "reference"
DECOMPOSITION = "decomposition"

Expand = Literal["never", "unserved", "below"]
"""Which quantized weights a choice has expanded to plain ones at load: none; those whose own op has no kernel for their
format; or all of its children's."""


@dataclass(frozen=True)
class Rejection:
    """A kernel that was not chosen, and why."""

    kernel: str
    rank: int
    reason: str


@dataclass(eq=False)
class Choice:
    """The outcome for one signature, shared by all sites that have it.

    Args:
        op: the op's name.
        kernel: the winner; None means the op's body runs (a decomposition if it has children, else the reference).
        rank: the winner's rank, or the lowest rank among the body's hot leaves; 0 for a reference.
        why: one sentence.
        rejected: every other kernel with its reason.
        children: what the body's children are bound to; empty under a kernel.
        hot: it, or something below it, is hot.
        variant: the body taken instead of the usual one, by a pin.
        ambiguous: another accepted kernel has the same rank.
        dequantized: own quantized weights are expanded at load, because no kernel of this op takes their format.
        own_hot: the op itself is hot: without a kernel its body is a slow reference, whatever serves its children.
        expand: which quantized weights are expanded under the kernel.
        pin: the pin that decided, by name.
        uncoded: why activations stay as they are that the checkpoint wants coded; empty where it does not.
    """

    op: str
    kernel: Kernel | None
    rank: int
    why: str
    rejected: list[Rejection]
    children: dict[str, Choice]
    hot: bool
    variant: str | None = None
    ambiguous: bool = False
    dequantized: bool = False
    own_hot: bool = False
    expand: Expand = "never"
    pin: str | None = None
    activation_quant_skipped: str = ""

    @property
    def label(self) -> str:
        """What runs, as explain prints it."""
        if self.kernel is not None:
            return self.kernel.name
        if self.variant is not None:
            return f"{DECOMPOSITION} ({self.variant})"
        return DECOMPOSITION if self.children and not self.own_hot else REFERENCE


@dataclass
class Options:
    """What the user asked of binding.

    Args:
        pins: site or op name (shell patterns allowed in sites) -> provider, "reference", "decomposition" or a variant.
            A site's own name goes before patterns, patterns before op names; a site under one with a pin of its own is
            never hidden by a larger kernel; "reference" holds for everything below.
        lock: "op|step_kind|signature" -> kernel name.
        demoted: kernels that failed the canary, with the reason.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    lock: Mapping[str, str] = field(default_factory=dict)
    demoted: Mapping[Kernel, str] = field(default_factory=dict)
