"""Collectives as ops: children of the layers whose parts they join. They use torch.distributed's default group.

Their cost is not counted: they are bound by the links, not by the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from inferplane.errors import DeviceError
from inferplane.ops.op import EXACT, Op, Sample


@contextmanager
def rank_errors() -> Iterator[None]:
    """Turns the transport's error about an ended rank into a DeviceError."""
    try:
        yield
    except RuntimeError as error:
        words = str(error).splitlines()[0]
        raise DeviceError(f"A rank that shares the model has ended ({words}).", remedy="see its own message") from error


class AllReduce(Op, name="all_reduce"):
    """Sum over the ranks that share a layer: `y = sum_r x_r`; with one rank, `x` itself.

    Args of the call:
        x: `[T, D]`; may be overwritten.

    Returns:
        `[T, D]` in the dtype of `x`, equal on all ranks.

    Fields: `ranks`, the number of processes that share the layer (torch.distributed's default group).

    Raises:
        ValueError: `ranks` > 1 and no process group is initialised (from torch.distributed).
        DeviceError: another rank has ended.

    Source: Megatron-LM, arXiv 1909.08053.
    """

    tolerance = EXACT
    body_capture_safe = True  # one rank returns `x`; steps of several ranks are not captured
    may_change_inputs = True

    ranks: int = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.ranks > 1:
            with rank_errors():
                dist.all_reduce(x)
        return x

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One rank; several ranks are tested end to end."""
        return [Sample("alone", AllReduce(1), lambda d: (d.normal(3, 64),))]


class AllGather(Op, name="all_gather"):
    """The columns of all ranks side by side: `y = [x_0 | x_1 | ...]`; with one rank, `x` itself.

    Args of the call:
        x: `[T, N]`, of the same shape on each rank.

    Returns:
        `[T, ranks N]` in the dtype of `x`, equal on all ranks.

    Fields: `ranks`, the number of processes that share the layer (torch.distributed's default group).

    Raises:
        ValueError: `ranks` > 1 and no process group is initialised (from torch.distributed).
        DeviceError: another rank has ended.

    Source: vocabulary sharding as in Megatron-LM, arXiv 1909.08053.
    """

    tolerance = EXACT

    ranks: int = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.ranks == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        with rank_errors():
            dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One rank; several ranks are tested end to end."""
        return [Sample("alone", AllGather(1), lambda d: (d.normal(3, 64),))]
