"""Mixers: what stands in a recurrent layer where another layer has its attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.ops.collective import AllReduce
from inferplane.ops.draw import Draw, Sequences
from inferplane.ops.linear import Linear
from inferplane.ops.op import BLOCK, Op, Sample, extension, placeholder, values
from inferplane.ops.recurrent.conv import CausalConv1d
from inferplane.ops.recurrent.delta_rule import DeltaRuleGates, GatedDeltaRule
from inferplane.ops.recurrent.norm import GatedRMSNorm, SiluGate
from inferplane.ops.recurrent.ragged import draw_batch
from inferplane.ops.recurrent.scan import SelectiveScan
from inferplane.types import Batch, StateTensor, Weight

DECODE: Sequences = [(1, 5), (1, 0), (3, 90)]
MIXED: Sequences = [(1, 100), (2, 0), (40, 0), (11, 60)]
SAMPLE_EPS = 0.03
"""Of norms in samples. Without it a result near 0, as that of a first token whose q and k are almost orthogonal, would
be scaled up to mere rounding."""


class GatedDeltaNet(Op, name="gated_delta_net"):
    """A linear attention: project, convolve q, k and v, apply the gated delta rule, norm with a gate, project back.

    `q, k, v, z = split(qkvz(x)); b, a = split(ba(x)); q, k, v = conv([q | k | v]);
    y = rule(q, k, v, *gates(a, b)); return o(norm(y, z))`.

    Args of the call:
        x: `[T, D]`. batch: the step.
        conv_state: `[B, C, k - 1]` with C = 2 G K + H V, in the plan's dtype. state: float32 `[B, H, K, V]`.

    Returns:
        y, `[T, D]` in the dtype of `x` (padded rows are undefined), and both states after the step. No argument is
        changed.

    Fields: `qkvz` linear D -> C + H V; `ba` linear D -> 2 H; `grouped` whether their rows are ordered by key heads,
    each with its q, k, v and z (b and a), not by q, k, v and z (b and a) of all heads; `o` linear H V -> D;
    `heads` (G, H) of this rank; `dims` (K, V); `reduce` sums over ranks.

    Source: Gated DeltaNet, arXiv 2412.06464, in the form of Qwen3-Next (transformers' Qwen3NextConfig).
    """

    tolerance = BLOCK
    is_delta_net = True

    qkvz: Linear
    ba: Linear
    conv: CausalConv1d
    gates: DeltaRuleGates
    rule: GatedDeltaRule
    norm: GatedRMSNorm
    o: Linear
    heads: tuple[int, int]
    dims: tuple[int, int]
    grouped: bool = False
    reduce: AllReduce | None = extension(None)

    def __call__(
        self, x: torch.Tensor, batch: Batch, conv_state: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (groups, heads), (k_dim, v_dim) = self.heads, self.dims
        keys, values = groups * k_dim, heads * v_dim
        projected, ba = self.qkvz(x), self.ba(x)
        if self.grouped:
            each = heads // groups
            parts = projected.unflatten(1, (groups, -1)).split((k_dim, k_dim, each * v_dim, each * v_dim), 2)
            q, k, v, z = (part.flatten(1) for part in parts)
            mixed = torch.cat((q, k, v), 1)
            b, a = (part.flatten(1) for part in ba.unflatten(1, (groups, -1)).split((each, each), 2))
        else:
            mixed, z = projected.split((2 * keys + values, values), 1)
            b, a = ba.split((heads, heads), 1)
        mixed, conv_state = self.conv(mixed, batch, conv_state)
        q, k, v = mixed.split((keys, keys, values), 1)
        q, k = (t.unflatten(1, (groups, k_dim)) for t in (q, k))
        y, state = self.rule(q, k, v.unflatten(1, (heads, v_dim)), *self.gates(a, b), batch, state)
        y = self.o(self.norm(y, z.unflatten(1, (heads, v_dim))).flatten(1))
        return sum_over_ranks(y, self.reduce), conv_state, state

    def list_states(self) -> tuple[StateTensor, ...]:
        """What it keeps of a sequence: the states of its call, in order."""
        (_, heads), (k_dim, v_dim) = self.heads, self.dims
        return list_convolution_inputs(self.conv), StateTensor((heads, k_dim, v_dim))

    def list_inputs(self) -> tuple[Linear, ...]:
        """The linear layers that read its input."""
        return (self.qkvz, self.ba)

    @property
    def width(self) -> int:
        """Entries of a row of its inputs and results."""
        return self.qkvz.weight.shape[1]

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode and mixed steps, both orders of rows."""
        groups, heads, k_dim, v_dim = 2, 4, 16, 32
        keys, values = groups * k_dim, heads * v_dim
        f32 = lambda: placeholder(heads, dtype=torch.float32)  # noqa: E731

        def sample(label: str, sequences: Sequences, *, grouped: bool) -> Sample:
            op = GatedDeltaNet(
                qkvz=Linear(placeholder(2 * keys + 2 * values, 64)),
                ba=Linear(placeholder(2 * heads, 64)),
                conv=CausalConv1d(placeholder(2 * keys + values, 4)),
                gates=DeltaRuleGates(slow_rates(heads), f32()),
                rule=GatedDeltaRule((groups, heads), (k_dim, v_dim)),
                norm=GatedRMSNorm(placeholder(v_dim), SAMPLE_EPS),
                o=Linear(placeholder(64, values)),
                heads=(groups, heads),
                dims=(k_dim, v_dim),
                grouped=grouped,
            )
            return mixer_sample(label, op, sequences)

        return [
            sample("decode", DECODE, grouped=False),
            sample("mixed", MIXED, grouped=False),
            sample("grouped_decode", DECODE, grouped=True),
            sample("grouped_mixed", MIXED, grouped=True),
        ]


class Mamba2Mixer(Op, name="mamba2_mixer"):
    """Mamba-2: project, convolve x, b and c, scan, norm with a gate, project back.

    `z, x, b, c, dt = split(proj(x) * factors); x, b, c = conv([x | b | c]); return o(norm(scan(x, dt, b, c), z))`.

    Args of the call:
        x: `[T, D]`. batch: the step.
        conv_state: `[B, C, k - 1]` with C = H P + 2 G N, in the plan's dtype. state: float32 `[B, H, P, N]`.

    Returns:
        y, `[T, D]` in the dtype of `x` (padded rows are undefined), and both states after the step. No argument is
        changed.

    Fields: `proj` linear D -> H P + C + H; `norm` with a gate, or the gate alone; `o` linear H P -> D; `heads` (G, H)
    of this rank; `dims` (P, N); `factors` float32 `[H P + C + H]`, or None for ones; `reduce` sums over ranks.

    Source: Mamba-2, arXiv 2405.21060, section 7; without a norm, and with factors, as in Falcon-H1, arXiv 2507.22448.
    """

    tolerance = BLOCK
    is_mamba2 = True

    proj: Linear
    conv: CausalConv1d
    scan: SelectiveScan
    norm: GatedRMSNorm | SiluGate
    o: Linear
    heads: tuple[int, int]
    dims: tuple[int, int]
    factors: Weight | None = extension(None)
    reduce: AllReduce | None = extension(None)

    def __call__(
        self, x: torch.Tensor, batch: Batch, conv_state: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (groups, heads), (dim, size) = self.heads, self.dims
        inner, channels = heads * dim, heads * dim + 2 * groups * size
        projected = self.proj(x)
        if self.factors is not None:
            projected = (projected.float() * values(self.factors)).to(projected.dtype)  # type: ignore[arg-type]
        z, mixed, dt = projected.split((inner, channels, heads), 1)
        mixed, conv_state = self.conv(mixed, batch, conv_state)
        h, b, c = mixed.split((inner, groups * size, groups * size), 1)
        b, c = (t.unflatten(1, (groups, size)) for t in (b, c))
        y, state = self.scan(h.unflatten(1, (heads, dim)), dt, b, c, batch, state)
        return sum_over_ranks(self.o(self.norm(y.flatten(1), z)), self.reduce), conv_state, state

    def list_states(self) -> tuple[StateTensor, ...]:
        """What it keeps of a sequence: the states of its call, in order."""
        return list_convolution_inputs(self.conv), StateTensor((self.heads[1], *self.dims))

    def list_inputs(self) -> tuple[Linear, ...]:
        """The linear layers that read its input."""
        return (self.proj,)

    @property
    def width(self) -> int:
        """Entries of a row of its inputs and results."""
        return self.proj.weight.shape[1]

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode and mixed steps; one group and several; biases; factors and a gate without a norm."""

        def sample(
            label: str, sequences: Sequences, groups: int, *, bias: bool = False, plain_gate: bool = False
        ) -> Sample:
            heads, dim, size = 4, 16, 32
            inner, channels = heads * dim, heads * dim + 2 * groups * size
            f32 = lambda: placeholder(heads, dtype=torch.float32)  # noqa: E731
            at = lambda n: placeholder(n) if bias else None  # noqa: E731
            norm = lambda n, groups: GatedRMSNorm(placeholder(n), SAMPLE_EPS, groups, gate_first=True)  # noqa: E731
            op = Mamba2Mixer(
                proj=Linear(placeholder(inner + channels + heads, 48), at(inner + channels + heads)),
                conv=CausalConv1d(placeholder(channels, 4), at(channels)),
                scan=SelectiveScan(slow_rates(heads), f32(), f32(), groups, dim, size),
                norm=SiluGate() if plain_gate else norm(inner, groups),
                o=Linear(placeholder(48, inner), at(48)),
                heads=(groups, heads),
                dims=(dim, size),
                factors=placeholder(inner + channels + heads, dtype=torch.float32) if plain_gate else None,
            )
            return mixer_sample(label, op, sequences)

        return [
            sample("decode", DECODE, 1),
            sample("mixed", MIXED, 2),
            sample("bias_decode", DECODE, 2, bias=True),
            sample("bias_mixed", MIXED, 1, bias=True),
            sample("gate_decode", DECODE, 1, plain_gate=True),
            sample("gate_mixed", MIXED, 2, plain_gate=True),
        ]


class ShortConv(Op, name="short_conv"):
    """A gated short convolution: `b, c, h = split(proj(x)); return o(c * conv(b * h))`.

    Args of the call:
        x: `[T, D]`. batch: the step. conv_state: `[B, C, k - 1]` in the plan's dtype.

    Returns:
        y, `[T, D]` in the dtype of `x` (padded rows are undefined), and the states after the step. No argument is
        changed.

    Fields: `proj` linear D -> 3 C, with C this rank's channels; `o` linear C -> D; `reduce` sums over ranks.

    Source: LFM2 (transformers' Lfm2Config).
    """

    tolerance = BLOCK
    is_short_convolution = True

    proj: Linear
    conv: CausalConv1d
    o: Linear
    reduce: AllReduce | None = extension(None)

    def __call__(self, x: torch.Tensor, batch: Batch, conv_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, c, h = self.proj(x).chunk(3, 1)
        y, conv_state = self.conv(b * h, batch, conv_state)
        return sum_over_ranks(self.o(c * y), self.reduce), conv_state

    def list_states(self) -> tuple[StateTensor, ...]:
        """What it keeps of a sequence: the states of its call, in order."""
        return (list_convolution_inputs(self.conv),)

    def list_inputs(self) -> tuple[Linear, ...]:
        """The linear layers that read its input."""
        return (self.proj,)

    @property
    def width(self) -> int:
        """Entries of a row of its inputs and results."""
        return self.proj.weight.shape[1]

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode and mixed steps, with and without biases; whole 128s of channels."""

        def sample(label: str, sequences: Sequences, *, bias: bool = False, channels: int = 48) -> Sample:
            at = lambda n: placeholder(n) if bias else None  # noqa: E731
            conv = CausalConv1d(placeholder(channels, 3), at(channels), silu=False)
            proj, o = (Linear(placeholder(n * channels, channels), at(n * channels)) for n in (3, 1))
            return mixer_sample(label, ShortConv(proj, conv, o), sequences)

        return [
            sample("decode", DECODE),
            sample("mixed", MIXED, bias=True),
            sample("c128_decode", DECODE, channels=128),
            sample("c128_mixed", MIXED, channels=128),
        ]


def sum_over_ranks(y: torch.Tensor, reduce: AllReduce | None) -> torch.Tensor:
    """The sum over ranks, if the heads are divided over several."""
    return y if reduce is None else reduce(y)


def list_convolution_inputs(conv: CausalConv1d) -> StateTensor:
    """The last inputs of a convolution, in the plan's dtype."""
    channels, size = conv.weight.shape
    return StateTensor((channels, size - 1), None)


def slow_rates(heads: int) -> Weight:
    """Rates of decay for samples at which states last for some tokens."""
    return Weight((), (heads,), torch.float32, make=lambda: torch.linspace(-4.0, -1.0, heads))


def mixer_sample(label: str, op: Any, sequences: Sequences) -> Sample:
    """A sample of a mixer with random states."""

    def inputs(d: Draw) -> tuple[Any, ...]:
        batch = draw_batch(d, sequences)
        drawn = [d.normal(len(sequences), *state.shape, dtype=state.dtype) for state in op.list_states()]
        return d.normal(batch.tokens, op.width), batch, *drawn

    return Sample(label, op, inputs, "decode" if sequences is DECODE else "mixed")
