"""What recurrent layers keep of a sequence: tensors of a fixed size, whatever its length, in a slot of its own.

A sequence has two slots, the same ones in every layer. A step reads the states before it from one slot and writes those
after it to the other; the next step exchanges them. So a step that is repeated after a failure reads the same states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from inferplane.types.scratch import Scratch

PADDING_SLOT = 0
"""The slot that padded sequences read and write; no sequence has it."""


class StateSlots(NamedTuple):
    """The two slots of one sequence: that of its states before a step, and that of its states after it."""

    read: int
    write: int


class StateRows(NamedTuple):
    """The slots of a step's sequences, int64 `[B]` each: of the states before the step, and after it. Padded sequences
    have `PADDING_SLOT` in both."""

    read: torch.Tensor
    write: torch.Tensor


@dataclass(frozen=True)
class StateTensor:
    """One tensor among those that a layer keeps of each sequence.

    Args:
        shape: of the tensor of one sequence.
        dtype: of its entries; None: the plan's dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = torch.float32


@dataclass(frozen=True)
class StateRequest:
    """What one layer keeps of each sequence.

    Args:
        tensors: such as a convolution's last inputs, and the state of a recurrence.
    """

    tensors: tuple[StateTensor, ...]

    def count_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one slot of one layer, where `dtype` is the plan's."""
        return sum(math.prod(tensor.shape) * (tensor.dtype or dtype).itemsize for tensor in self.tensors)


class StateCache(Scratch):
    """The states of one layer in plain torch tensors, which serves every device.

    Args:
        request: what the layer keeps of each sequence.
        slots: number of slots, `PADDING_SLOT` included.
        dtype: the plan's dtype.
        device: of the tensors.

    Attributes: `request`; `slots`; `tensors`, one `[slots, *shape]` for each tensor of the request.
    """

    def __init__(self, request: StateRequest, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.request, self.slots = request, slots
        self.tensors = tuple(
            torch.zeros((slots, *tensor.shape), dtype=tensor.dtype or dtype, device=device)
            for tensor in request.tensors
        )

    def copy_to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> StateCache:
        """The same states in memory of their own.

        Args:
            device: of the copy.
            dtype: of the copy; None: each tensor's own.
        """
        return self.copy_with(tensors=tuple(t.detach().to(device, dtype, copy=True) for t in self.tensors))

    def read(self, rows: StateRows) -> tuple[torch.Tensor, ...]:
        """The states before the step, `[B, *shape]` each. Those of sequences that begin in the step are of an earlier
        owner of the slot: an op does not read them, and begins with zeros.

        Args:
            rows: the step's slots, `batch.list_states()`.
        """
        return tuple(tensor.index_select(0, rows.read) for tensor in self.tensors)

    def write(self, rows: StateRows, *states: torch.Tensor) -> None:
        """Store the states after the step. What a sequence reads in this step stays as it is.

        Args:
            rows: the step's slots, `batch.list_states()`.
            states: `[B, *shape]` for each tensor of the request.
        """
        for tensor, state in zip(self.tensors, states, strict=True):
            tensor.index_copy_(0, rows.write, state.to(tensor.dtype))
