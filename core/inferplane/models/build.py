"""What family constructors share: naming weights, sharding them, counting cache layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models.config import Config
from inferplane.models.rope import rope_table
from inferplane.ops import AddRMSNorm, AllGather, AllReduce, Embedding, GatedMLP, Linear, LMHead, RMSNorm
from inferplane.types import PLAIN, WHOLE, Placement, Shard, Weight

HEAD = "lm_head"
FormatOf = Callable[[str], str]
"""Weight format of a checkpoint tensor, by its name."""


def _plain(name: str) -> str:
    return PLAIN


@dataclass(frozen=True)
class Build:
    """Everything a constructor needs beside its family's arithmetic.

    Args:
        config: the checkpoint's config.
        placement: this process among those that share the model.
        format_of: weight format by checkpoint name.
        positions: positions the rotary tables must cover.
        mtp: also build the multi-token-prediction layers.
        ignored: shell patterns of checkpoint tensors that the family knows and does not read, filled by `ignore`.
        acts: weight format -> how activations are coded that meet such weights.
        row_formats: quantized formats of which the device's kernels read single rows. An embedding that is tied to a
            head in one of them is the head's weight, kept once; else it stays plain beside the head.

    Raises:
        UnsupportedModelError: the placement divides experts and layers among different numbers of processes.
    """

    config: Config
    placement: Placement = field(default_factory=Placement)
    format_of: FormatOf = _plain
    positions: int = 4096
    mtp: bool = False
    ignored: list[str] = field(default_factory=list, compare=False)
    acts: Mapping[str, str] = field(default_factory=dict)
    row_formats: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        p = self.placement
        if p.ep_size > 1 and (p.ep_rank, p.ep_size) != (p.tp_rank, p.tp_size):
            raise UnsupportedModelError(
                f"ep_size = {p.ep_size} beside tp_size = {p.tp_size} is not implemented.",
                there_is="the same ranks for both, or ep_size = 1, with tp_size to divide every expert",
                remedy="use Placement.shared(rank, size)",
            )

    def ignore(self, *patterns: str) -> None:
        """Name checkpoint tensors that are expected and not read; others that nothing reads are reported."""
        self.ignored.extend(patterns)

    # -- weights

    def weight(
        self,
        names: Iterable[str],
        shape: tuple[int, ...],
        axis: int | None = None,
        shards: tuple[Shard, ...] | None = None,
        rows: tuple[int, ...] = (),
        **options: Any,
    ) -> Weight:
        """A weight made of the tensors `name.weight`; `axis` is divided over the tensor-parallel ranks, unless `shards`
        says what is read of each part. `rows` are those of each part on this rank; left out, all have equally many.

        Raises:
            CheckpointError: the parts are stored in different formats.
        """
        parts = tuple(f"{name}.weight" for name in names)
        formats = {self.format_of(part) for part in parts}
        if len(formats) > 1:
            raise CheckpointError(
                f"{parts[0]} and {len(parts) - 1} more are fused, but stored in formats {', '.join(sorted(formats))}.",
                remedy="quantize all parts of a fused weight alike",
            )
        rows = rows or (math.prod(shape[:-1]) // len(parts),) * len(parts)
        cut, format = shards or self.shard(axis), formats.pop()
        return Weight(parts, shape, format=format, shard=cut, rows=rows, act=self.acts.get(format, ""), **options)

    def shard(self, axis: int | None) -> Shard:
        """The slice of a divided weight that this rank reads."""
        p = self.placement
        return WHOLE if axis is None or p.tp_size == 1 else Shard(axis, p.tp_rank, p.tp_size)

    def share(self, name: str, size: int) -> int:
        """This rank's share of a dimension."""
        return self.placement.part(name, size)

    def linear(
        self,
        *names: str,
        rows: int | tuple[int, ...],
        columns: int,
        axis: int | None = None,
        bias: bool = False,
        shards: tuple[Shard, ...] | None = None,
        **options: Any,
    ) -> Linear:
        """A linear whose parts are stacked by rows; `rows` and `columns` are this rank's, `rows` of all parts together
        where they are equal, else of each.

        `axis` 0 divides the outputs, 1 the inputs (the results are then summed over ranks by the op's `reduce`, so that
        only the first rank may add the bias). `shards` says what is read of each part, where that differs.
        """
        total, each = (rows, (rows // len(names),) * len(names)) if isinstance(rows, int) else (sum(rows), rows)
        biases = None
        if bias and not (axis == 1 and self.placement.tp_rank):
            cut = shards or self.shard(0 if axis == 0 else None)
            biases = Weight(tuple(f"{n}.bias" for n in names), (total,), shard=cut, rows=each)
        return Linear(self.weight(names, (total, columns), axis, shards, each), biases, **options)

    def router(self, name: str, experts: int, width: int) -> Linear:
        """A router: its product is taken in float32."""
        return self.linear(name, rows=experts, columns=width, out_dtype=torch.float32)

    def rms(self, name: str, width: int, eps: float | None = None) -> RMSNorm:
        """An RMS norm with the config's epsilon, unless the family fixes another."""
        if eps is None:
            eps = self.config.number("rms_norm_eps", 1e-6)
        return RMSNorm(Weight((f"{name}.weight",), (width,)), eps)

    def add_rms(self, name: str, width: int) -> AddRMSNorm:
        """The same behind an addition."""
        return AddRMSNorm(self.rms(name, width))

    def reduce(self) -> AllReduce | None:
        """The sum over ranks behind a row-parallel linear; None on one rank."""
        return AllReduce(self.placement.tp_size) if self.placement.tp_size > 1 else None

    def mlp(self, name: str, inner: int, width: int, entry: str = "intermediate_size") -> GatedMLP:
        """A gated MLP of `gate_proj`, `up_proj`, `down_proj`; `inner` is the size over all ranks, from the config's
        `entry`."""
        mine = self.share(entry, inner)
        return GatedMLP(
            gate_up=self.linear(f"{name}.gate_proj", f"{name}.up_proj", rows=2 * mine, columns=width, axis=0),
            down=self.linear(f"{name}.down_proj", rows=width, columns=mine, axis=1),
            reduce=self.reduce(),
        )

    def embedding(self, name: str, vocab: int, width: int) -> Embedding:
        """The token embedding; each rank has a range of the vocabulary."""
        mine = self.share("vocab_size", vocab)
        weight = self.weight((name,), (mine, width), 0)
        head = self.format_of(f"{HEAD}.weight")
        if self.config.flag("tie_word_embeddings") and weight.format == PLAIN and head in self.row_formats:
            weight = replace(weight, format=head)
        return Embedding(weight, self.placement.tp_rank * mine, self.reduce())

    def head(self, embed: Embedding, vocab: int, width: int, name: str = HEAD) -> LMHead:
        """The output head: the embedding's own weight when the config ties them."""
        if self.config.flag("tie_word_embeddings"):
            self.ignore(f"{name}.weight")  # some exports write it all the same
            format = self.format_of(f"{name}.weight")
            if format == embed.weight.format or self.format_of(embed.weight.parts[0]) == format:
                return LMHead(embed.weight)
            return LMHead(replace(embed.weight, format=format))  # quantized while it is read, for the head alone
        return LMHead(self.weight((name,), (self.share("vocab_size", vocab), width), 0))

    def gather(self) -> AllGather | None:
        """What joins the ranks' columns of the logits; None on one rank."""
        return AllGather(self.placement.tp_size) if self.placement.tp_size > 1 else None

    def rope(self, dim: int, theta: float = 10000.0) -> Weight:
        """The rotary table for `dim` entries a head; `theta` is the base where the config states none."""
        most = self.config.get("max_position_embeddings")
        settings = {"max_position_embeddings": most, **self.config.rotary(theta)}
        return rope_table(settings, dim, self.positions)
