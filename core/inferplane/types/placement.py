"""A process's part of a model that several processes share."""

from __future__ import annotations

from dataclasses import dataclass

from inferplane.errors import UsageError


@dataclass(frozen=True)
class Placement:
    """Tensor-parallel and expert-parallel rank and size of this process; `Placement()` is one process alone.

    Args:
        tp_rank: number of this process among those that share each layer, 0 <= tp_rank < tp_size.
        tp_size: number of processes that share each layer.
        ep_rank: number of this process among those that share the experts, 0 <= ep_rank < ep_size.
        ep_size: number of processes that share the experts.

    Raises:
        UsageError: a rank is not below its size.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        for kind, rank, size in (("tp", self.tp_rank, self.tp_size), ("ep", self.ep_rank, self.ep_size)):
            if not 0 <= rank < size:
                raise UsageError(
                    f"Placement with {kind}_rank={rank} of {kind}_size={size}.",
                    there_is=f"ranks 0 to {size - 1}" if size > 0 else "no ranks: the size must be at least 1",
                    remedy="number the ranks from 0",
                )

    @classmethod
    def shared(cls, rank: int, size: int) -> Placement:
        """A model shared by `size` processes: layers by tensor parallelism, experts by expert parallelism."""
        return cls(rank, size, rank, size)

    def part(self, name: str, size: int) -> int:
        """This rank's share of a dimension of `size` entries under tensor parallelism.

        Args:
            name: the dimension's name, for the error.
            size: entries over all ranks.

        Returns:
            Entries on this rank.

        Raises:
            UsageError: `size` is not divisible by `tp_size`; the message names the dimension.
        """
        return _equal_share(f"{name} = {size}", size, self.tp_size)

    def heads(self, name: str, count: int) -> tuple[int, Shard]:
        """This rank's KV heads: an equal share, or one head if there are more ranks than heads.

        Args:
            name: the dimension's name, for the error.
            count: KV heads over all ranks.

        Returns:
            Heads on this rank, and the slice of the rows that hold them.

        Raises:
            UsageError: neither number divides the other.
        """
        if count >= self.tp_size or self.tp_size % count:
            return self.part(name, count), Shard(0, self.tp_rank, self.tp_size)
        return 1, Shard(0, self.tp_rank * count // self.tp_size, count)

    def experts(self, name: str, count: int) -> range:
        """This rank's experts under expert parallelism.

        Raises:
            UsageError: `count` is not divisible by `ep_size`; the message names the dimension.
        """
        each = _equal_share(f"{name} = {count}", count, self.ep_size, "number of ranks")
        return range(self.ep_rank * each, (self.ep_rank + 1) * each)


@dataclass(frozen=True)
class Shard:
    """The slice of every checkpoint part that one rank reads.

    Args:
        axis: dimension of the part that is divided (0: rows, the outputs of a linear; 1: columns, its inputs).
        rank: this rank's index.
        size: number of ranks; 1 reads everything.
        section: first entry, entries and total of the part of the dimension that is divided, where several are stored
            one after another; None: all of it. A dimension of other lengths (scales of blocks) has it in proportion.
    """

    axis: int = 0
    rank: int = 0
    size: int = 1
    section: tuple[int, int, int] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of a part."""
        return self.size == 1 and self.section is None

    def bounds(self, length: int) -> tuple[int, int]:
        """First and one-past-last index of this rank's slice of a dimension of `length` entries.

        Raises:
            UsageError: `length`, or its section, is not divisible by the number of ranks.
        """
        first, count = 0, length
        if self.section is not None:
            start, part, total = self.section
            if length * start % total or length * part % total:
                raise UsageError(
                    f"A dimension of {length} entries cannot be divided where {total} entries have a section of "
                    f"{part} from {start} on.",
                    remedy="run it on one rank",
                )
            first, count = length * start // total, length * part // total
        step = _equal_share(f"A dimension of {count} entries", count, self.size)
        return first + self.rank * step, first + (self.rank + 1) * step


WHOLE = Shard()


def _equal_share(what: str, size: int, ranks: int, choice: str = "tensor-parallel size") -> int:
    """Each rank's share of the `size` entries of `what`; UsageError if they cannot be shared equally. `choice` names
    the number of ranks, for the remedy.
    """
    if size % ranks:
        raise UsageError(
            f"{what} cannot be shared equally by {ranks} ranks.", remedy=f"choose a {choice} that divides {size}"
        )
    return size // ranks
