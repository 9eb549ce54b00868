"""The block of a recurrent layer: a mixer over the states that the layer keeps of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from inferplane.ops.draw import Draw
from inferplane.ops.linear import Linear
from inferplane.ops.op import BLOCK, Op, Sample
from inferplane.ops.recurrent.kimi_delta import KimiDeltaAttention
from inferplane.ops.recurrent.mixers import DECODE, MIXED, GatedDeltaNet, Mamba2Mixer, ShortConv
from inferplane.ops.recurrent.ragged import draw_batch
from inferplane.types import Batch, StateCache, StateRequest

Mixer = GatedDeltaNet | KimiDeltaAttention | Mamba2Mixer | ShortConv


class RecurrentBlock(Op, name="recurrent_block", extension=True):
    """A mixer that reads the states before the step from the layer's cache, and stores those after it.

    `y, *states = mixer(x, batch, *kv.read(rows)); kv.write(rows, *states); return y`, where `rows` are the slots of the
    step's sequences. The slots that the step reads do not change.

    Args of the call:
        x: `[T, D]`. batch: the step, with state slots. kv: the layer's `StateCache`, changed.

    Returns:
        y, `[T, D]` in the dtype of `x`; padded rows are undefined.

    Fields: `states`, what the mixer keeps: the inputs of its convolution in the plan's dtype, and the state of its
    recurrence, if it has one, in float32.

    Source: Mamba-2, arXiv 2405.21060; two slots a sequence: docs/decisions/0034-two-state-slots-a-sequence.md.
    """

    tolerance = BLOCK
    has_recurrence = True

    mixer: Mixer
    states: StateRequest

    @classmethod
    def around(cls, mixer: Mixer) -> RecurrentBlock:
        """The block of a mixer, with the states that the mixer takes."""
        return cls(mixer, StateRequest(mixer.list_states()))

    def __call__(self, x: torch.Tensor, batch: Batch, kv: StateCache) -> torch.Tensor:
        rows = batch.list_states()
        y, *states = self.mixer(x, batch, *kv.read(rows))
        kv.write(rows, *states)
        return y

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode and mixed steps of each mixer; linear layers in 8 bits."""
        cases: Sequence[tuple[type[Mixer], str]] = (
            (ShortConv, "decode"),
            (ShortConv, "mixed"),
            (GatedDeltaNet, "decode"),
            (GatedDeltaNet, "grouped_decode"),
            (GatedDeltaNet, "grouped_mixed"),
            (Mamba2Mixer, "bias_decode"),
            (Mamba2Mixer, "gate_decode"),
            (Mamba2Mixer, "mixed"),
            (KimiDeltaAttention, "decode"),
            (KimiDeltaAttention, "odd_decode"),
            (KimiDeltaAttention, "mixed"),
        )
        plain = [next(s for s in mixer.samples() if s.label == label) for mixer, label in cases]
        quantized = [
            replace(plain[i], label=f"{plain[i].label}_int8", op=quantize_mixer(plain[i].op, "int8_group"))
            for i in (2, 6, 8)
        ]
        return [_sample(s) for s in (*plain, *quantized)]


GATES = ("ba", "b", "fg_a", "f_b", "g_b")
"""Fields of mixers with the linear layers of gates and decays, which have few rows or a low rank: they stay plain."""


def quantize_mixer(mixer: Any, format: str) -> Any:
    """A sample's mixer with its linear layers in another format, but for those of gates."""
    linears = {name: value for name, value in mixer.items() if isinstance(value, Linear) and name not in GATES}
    quantized = {name: replace(x, weight=replace(x.weight, format=format)) for name, x in linears.items()}
    return replace(mixer, **quantized)


def _sample(like: Sample) -> Sample:
    """A sample of the block around a sample's mixer."""
    mixer: Any = like.op
    block, sequences = RecurrentBlock.around(mixer), DECODE if like.step_kind == "decode" else MIXED

    def inputs(d: Draw) -> tuple[Any, ...]:
        batch = draw_batch(d, sequences, states=True)
        return d.normal(batch.tokens, mixer.width), batch, d.fill_states(block.states, len(sequences))

    return Sample(f"{mixer.name}_{like.label}", block, inputs, like.step_kind)
