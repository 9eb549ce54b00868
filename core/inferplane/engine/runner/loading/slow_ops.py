"""What a plan says of hot ops without a fast kernel, for the warnings of loading."""

from __future__ import annotations

from collections.abc import Iterator

from inferplane.binding import Plan, reads_index_keys_alone
from inferplane.engine.runner.options import RunnerOptions


def describe_slow_ops(plan: Plan, options: RunnerOptions, name: str) -> Iterator[str]:
    """Say which hot ops run on their slow reference, which on torch because of the KV cache's dtype, and which because
    `dtype` is "auto" and the checkpoint is in a dtype of 16 bits in which the device has no kernels, but in the other
    one. A checkpoint in float32 is taken for its exactness.

    Args:
        plan: of the model on its device.
        options: of the runner.
        name: the model's.
    """
    device = f"device {plan.settings.device!r}"
    if left := plan.hot_references():
        yield (
            f"On {device} hot ops run on their slow reference: {', '.join(sorted({op for _, _, op in left}))}. "
            f"See `inferplane explain {name} --device {plan.settings.device}` for the reasons; strict=True refuses "
            "such a plan."
        )
    unread: dict[str, set[str]] = {}
    for _, _, op, choice in plan.unread_caches():
        is_own = options.index_key_dtype != "auto" and reads_index_keys_alone(op)
        option = "index_key_dtype" if is_own else "kv_cache_dtype"
        unread.setdefault(option, set()).add(f"{op.name} ({choice.kv_dtype_unread})")
    for option, reasons in sorted(unread.items()):
        yield (
            f"On {device} hot ops run on torch because of {option} = {getattr(options, option)!r}: "
            f"{', '.join(sorted(reasons))}. Leave it out for speed; strict=True refuses such a plan."
        )
    dtype = plan.settings.dtype
    if str(options.dtype) == "auto" and dtype.itemsize == 2:
        stated = str(dtype).removeprefix("torch.")
        for other, ops in plan.faster_dtypes().items():
            yield (
                f"{name} is in {stated}, in which {device} runs {', '.join(ops)} by torch's own operators. "
                f"dtype={other!r} rounds the weights and is faster; dtype={stated!r} says that this is meant."
            )
