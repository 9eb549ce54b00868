"""Conditions of this backend's kernels (`When.needs`: a sentence and a predicate), and the rank of unproved kernels."""

from __future__ import annotations

RANK_UNPROVED = 40
"""Below the portable kernels: compiled and emulated, but not run on a GPU yet. Such a kernel is taken by a pin, or
where it was measured to be the fastest."""

V3_LATENTS = ("latents of 512 entries and rotated keys of 64", lambda op: (op.dims.latent, op.dims.rope) == (512, 64))
V3_HEADS = ("heads of 128 + 64 entries and values of 128", lambda op: (op.dims.nope, op.dims.value) == (128, 128))
MANY_QUERIES = ("many query tokens", lambda op: op.queries == "many")
HEADS_128 = ("heads of 128 entries", lambda op: (op.kv.dim, op.kv.v_dim) == (128, 128))
NO_WINDOW = ("no sliding window", lambda op: op.kv.window is None)

FP8_ACTIVATIONS_128 = (
    "activations quantized to FP8 by 128 columns, or unquantized",
    lambda op: (
        op.activation_quant is None
        or (op.activation_quant.format, op.activation_quant.group, op.activation_group) == ("fp8", 128, 128)
    ),
)
FP8_BLOCK_LINEAR = (
    ("a weight in FP8 blocks", lambda op: op.weight.format == "fp8_block"),
    ("rows of a multiple of 16 bytes", lambda op: op.weight.shape[-1] % 16 == 0),
    ("a result in the plan's dtype", lambda op: op.out_dtype is None),
)
FP8_BLOCK_EXPERTS = (
    ("rows of a multiple of 16 bytes", lambda op: op.gate_up.shape[-1] % 16 == 0),
    ("an inner size that is a multiple of 128", lambda op: op.down.shape[-1] % 128 == 0),
)
