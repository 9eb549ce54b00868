"""The result of resolving a site, and the options that users set for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from inferplane.ops import Op
from inferplane.types import RANK_COMPOSED, Kernel

REFERENCE = "reference"
DECOMPOSITION = "decomposition"

Dequantize = Literal["never", "unserved", "below"]
"""Which quantized weights of a choice are dequantized at load: none; those whose own op has no kernel for their format;
or all weights of its children."""


DecidedBy = Literal["pin", "lock", "rank"]
"""What decided a choice: a user's pin, the lock file, or the ranks of the kernels that accept the op, if any does."""


@dataclass(frozen=True)
class Rejection:
    """A kernel that was not chosen, and the reason."""

    kernel: str
    rank: int
    reason: str


@dataclass(eq=False)
class Choice:
    """What one signature is bound to; all sites with this signature share it.

    Args:
        op: the op's name.
        kernel: the chosen kernel; None: the op's body runs (a decomposition if it has children, else the reference).
        rank: the kernel's rank, or the lowest rank among the body's hot leaves; 0 for a reference.
        why: the reason, one sentence.
        rejected: every other kernel with its reason.
        children: choices of the children, under a body or a kernel that inlines them; empty under other kernels.
        hot: the op, or one below it, is hot.
        variant: name of the variant that replaces the default body, by a pin.
        ambiguous: another accepted kernel has the same rank.
        dequantized: its quantized weights are dequantized at load, because no kernel of this op takes their format.
        own_hot: the op itself is hot: without a kernel its body is a slow reference, whatever its children are bound
            to.
        dequantize: which quantized weights under the kernel are dequantized at load.
        decided_by: what decided.
        pin: name of the pin that decided.
        activation_quant_skipped: why the activation quantization that the checkpoint requests is not applied; empty if
            it is, or if none is requested.
        kv_dtype_unread: the kernel that would run it if the KV cache were in the plan's dtype, where torch's operators
            run it instead, in words; empty elsewhere.
        faster_dtype: "bfloat16" or "float16", in which a kernel would run it that torch's operators run in the plan's
            dtype; empty elsewhere.
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
    dequantize: Dequantize = "never"
    decided_by: DecidedBy = "rank"
    pin: str | None = None
    activation_quant_skipped: str = ""
    kv_dtype_unread: str = ""
    faster_dtype: str = ""

    @property
    def runs_on_torch(self) -> bool:
        """Whether a hot op runs by operators of torch: its body, or a kernel composed from them."""
        by_itself = self.own_hot or (self.hot and not self.binds_children)
        return by_itself and (self.kernel is None or self.kernel.rank <= RANK_COMPOSED)

    @property
    def binds_children(self) -> bool:
        """Whether what is below has choices of its own: under a body, or a kernel that inlines its children."""
        return self.kernel is None or bool(self.kernel.inlines)

    @property
    def label(self) -> str:
        """What runs here, as explain prints it."""
        if self.kernel is not None:
            return self.kernel.name
        if self.variant is not None:
            return f"{DECOMPOSITION} ({self.variant})"
        return DECOMPOSITION if self.children and not self.own_hot else REFERENCE


@dataclass
class Options:
    """The user's options for binding.

    Args:
        pins: site or op name (shell patterns allowed in sites) -> provider, "reference", "decomposition" or a variant.
            A site's own name goes before patterns, patterns before op names. A larger kernel is never chosen above a
            site that has its own pin. "reference" holds for everything below.
        lock: "op|step_kind|signature" -> kernel name.
        demoted: kernels that failed the canary -> the reason.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    lock: Mapping[str, str] = field(default_factory=dict)
    demoted: Mapping[Kernel, str] = field(default_factory=dict)


def reads_index_keys_alone(op: Op) -> bool:
    """Whether the caches that an op reads or writes are index keys, whose dtype has an option of its own."""
    return {request.kind for request in op.kv_requests()} == {"index_keys"}
