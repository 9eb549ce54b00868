"""Processes that share a model. torchrun starts them; rank 0 schedules and samples, the others follow.

Before each step rank 0 broadcasts the queries of its sequences, as int64 numbers over a gloo group of its own. All
ranks then make the same batch and run the same step, in which the layers' collectives join their parts. No object is
pickled. A forward of a draft layer is a step like any other, with the rows of hidden states that it reads: these are
equal on all ranks, and never sent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from inferplane.errors import DeviceError, GenerationError, UsageError
from inferplane.kvcache import root_hash
from inferplane.types import HOST, Batch, Placement, StateSlots
from inferplane.types.batch import Query

FIRST = 1024
"""Numbers in a step's first message; a longer step sends the rest in a second one."""
STOP = -1
MAX_IDLE = timedelta(days=365)
"""How long a rank waits for the next step. It notices at once when rank 0's process ends."""


class DraftCall(NamedTuple):
    """A forward of a draft layer.

    Args:
        layer: its number.
        continues: whether it reads hidden states of the last such forward; else those of the model's last step.
        rows: of these hidden states, in order.
    """

    layer: int
    continues: bool
    rows: tuple[int, ...]


def launcher_ranks() -> tuple[int, int, int]:
    """This process's rank, the number of ranks, and the rank on this machine, as set by torchrun; else 0, 1, 0.

    Raises:
        UsageError: the launcher's variables are no numbers, or no rank of that many.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return 0, 1, 0
    try:
        rank, size, local = (int(os.environ.get(name, 0)) for name in names)
    except ValueError:
        found = ", ".join(f"{name}={os.environ.get(name)!r}" for name in names)
        raise UsageError(f"The launcher's variables are no numbers: {found}.", remedy="start with torchrun") from None
    if not 0 <= rank < size:
        raise UsageError(f"The launcher's variables say rank {rank} of {size}.", remedy="start with torchrun")
    return rank, size, local


def num_ranks(requested: int | None) -> int:
    """The number of processes that share the model: the requested one, or all that were started if none is requested. 1
    in a launch of several means that each process has the model by itself.

    Raises:
        UsageError: another number was started.
    """
    _, size, _ = launcher_ranks()
    if requested is None or requested in (1, size):
        return size if requested is None else requested
    raise UsageError(
        f"tensor_parallel_size = {requested}, but {size} process(es) were started.",
        there_is="1, for each process by itself, and the number of processes",
        remedy=f"start with torchrun --nproc-per-node {requested}",
    )


class Ranks:
    """This process among those that share a model. Making one joins the process group, and waits for all other ranks.

    Args:
        backend: the torch.distributed backend for the layers' collectives.

    Attributes: `rank`, `size`, `placement`; `weight_bytes`, bytes of weights on each rank, known after `agree`;
    `broken`, why no further step can run, "" if one can.
    """

    _ended = False  # also for later models of this process: the process group is gone

    def __init__(self, backend: str) -> None:
        if Ranks._ended:
            raise UsageError(
                "The ranks that shared the first model have ended with it.", remedy="start one model a launch"
            )
        self.rank, self.size, self.local_rank = launcher_ranks()
        self.placement = Placement.shared(self.rank, self.size)
        self.weight_bytes: tuple[int, ...] = ()
        self.broken = ""
        try:
            if not dist.is_initialized():
                dist.init_process_group(backend, rank=self.rank, world_size=self.size)
            self._control = dist.new_group(backend="gloo", timeout=MAX_IDLE)
        except Exception as error:
            raise DeviceError(
                f"The {self.size} ranks cannot reach each other over {backend!r} ({type(error).__name__}: {error}).",
                remedy="check that all of them were started, and MASTER_ADDR and GLOO_SOCKET_IFNAME",
            ) from error

    def agree(self, blocks: int, facts: tuple[object, ...], weight_bytes: int) -> int:
        """Check that all ranks run the same model; waits for all of them. Returns the smallest of their numbers of
        blocks, which every rank then uses.

        Args:
            blocks: the number that fits on this rank.
            facts: what must be equal everywhere; the version of torch is added.
            weight_bytes: of this rank's weights.

        Raises:
            DeviceError: a rank failed before. UsageError: ranks were started with different models or settings.
        """
        digest = root_hash(facts, torch.__version__)[:8]
        rows = self._gather([0, blocks, int.from_bytes(digest, "little", signed=True), weight_bytes])
        if failed := [i for i, row in enumerate(rows) if row[0]]:
            raise DeviceError(
                f"Rank {failed[0]} of {self.size} could not open the model.", remedy="see that rank's own message"
            )
        if other := [i for i, row in enumerate(rows) if row[2] != rows[0][2]]:
            raise UsageError(
                f"Rank {other[0]} has another model, other settings or other versions than rank 0.",
                remedy="start all ranks with the same command, files and installation",
            )
        self.weight_bytes = tuple(row[3] for row in rows)
        return min(row[1] for row in rows)

    def fail(self) -> None:
        """Tell the other ranks, which wait in `agree`, that this rank failed: their `agree` raises. Never raises
        itself.
        """
        with contextlib.suppress(Exception):
            self._gather([1, 0, 0, 0])

    def _gather(self, own: list[int]) -> list[list[int]]:
        """Every rank's numbers, by rank; waits for all ranks. DeviceError if one has ended."""
        rows = [torch.zeros(len(own), dtype=torch.int64) for _ in range(self.size)]
        try:
            dist.all_gather(rows, torch.tensor(own), group=self._control)
        except RuntimeError as error:
            raise DeviceError(f"A rank has ended ({error}).", remedy="see its own message") from error
        return [row.tolist() for row in rows]

    # -- steps

    @contextlib.contextmanager
    def step(self, batch: Batch, block_tokens: int, draft: DraftCall | None = None) -> Iterator[None]:
        """On rank 0: broadcast a step of the model, or a forward of a draft layer, and run it inside the block. A
        failure in the block leaves the ranks out of step for good: `broken` is set, and later calls raise
        GenerationError.
        """
        with self._in_step(lambda: [*encode_draft(draft), 0, *encode_batch(batch, block_tokens)]):
            yield

    @contextlib.contextmanager
    def step_behind(self, batch: Batch, queries: Sequence[Query], rows: Sequence[int]) -> Iterator[None]:
        """As `step`, for a step of the model behind one that is in flight, without waiting for that: the ids of the
        tokens `rows`, which the host does not know yet, go from device to device.

        Args:
            batch: the step. queries: those that it was made from. rows: token rows of it.
        """
        with self._in_step(lambda: [*encode_draft(None), len(rows), *rows, *encode_queries(queries)]):
            if rows:
                self.fill_ids(batch, rows)
            yield

    def fill_ids(self, batch: Batch, rows: Sequence[int]) -> None:
        """Give all ranks rank 0's ids of these token rows, in place. Every rank calls it at the same place."""
        at = torch.tensor(rows).to(batch.ids.device, non_blocking=True)
        ids = batch.ids.index_select(0, at)
        dist.broadcast(ids, 0)
        if self.rank:
            batch.ids.index_copy_(0, at, ids)

    @contextlib.contextmanager
    def _in_step(self, message: Callable[[], list[int]]) -> Iterator[None]:
        """Send a step to the other ranks, and run it inside the block."""
        if self.broken:
            raise GenerationError(f"The ranks are out of step: {self.broken}.", remedy="start the model anew")
        try:
            self._send(message())
            yield
        except BaseException as error:
            self.broken = f"a step failed on rank 0 with {type(error).__name__}: {error}"
            raise

    def steps(self) -> Iterator[tuple[list[Query], DraftCall | None, list[int]]]:
        """On the other ranks: the queries of each step, the draft layer if one runs in place of the model, and the
        token rows whose ids come by `fill_ids`, until rank 0 closes the model.

        Ctrl-C and SIGTERM, which a launcher sends to all ranks, are ignored meanwhile: rank 0 may have requests to
        finish. If rank 0 ends without closing the model, this process ends with exit code 1.
        """
        main = threading.current_thread() is threading.main_thread()
        handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM) if main}
        handlers = {n: how for n, how in handlers.items() if how is not None}  # None: not Python's, cannot be restored
        try:
            for number in handlers:
                signal.signal(number, signal.SIG_IGN)
            while (step := self._receive()) is not None:
                yield step
        except RuntimeError as error:
            sys.stderr.write(f"Rank {self.rank} ends: rank 0 has ended ({str(error).splitlines()[0]}).\n")
            raise SystemExit(1) from error
        finally:
            for number, how in handlers.items():
                signal.signal(number, how)

    def _receive(self) -> tuple[list[Query], DraftCall | None, list[int]] | None:
        """Wait for the next step that rank 0 broadcasts; returns what `steps` yields, None when rank 0 closes the
        model.
        """
        first = torch.empty(FIRST, dtype=torch.int64)
        dist.broadcast(first, 0, group=self._control)
        length = int(first[0])
        if length == STOP:
            return None
        rest = torch.empty(max(0, length - (FIRST - 1)), dtype=torch.int64)
        if rest.numel():
            dist.broadcast(rest, 0, group=self._control)
        draft, message = decode_draft([*first[1 : length + 1].tolist(), *rest.tolist()])
        unknown, message = message[1 : 1 + message[0]], message[1 + message[0] :]
        return decode_queries(message), draft, unknown

    def _send(self, message: Sequence[int]) -> None:
        """Broadcast a message from rank 0, in one or two tensors."""
        first = torch.zeros(FIRST, dtype=torch.int64)
        head = message[: FIRST - 1]
        first[0] = len(message)
        first[1 : len(head) + 1] = torch.tensor(head, dtype=torch.int64)
        dist.broadcast(first, 0, group=self._control)
        if len(message) > len(head):
            dist.broadcast(torch.tensor(message[FIRST - 1 :], dtype=torch.int64), 0, group=self._control)

    def close(self) -> None:
        """Leave the process group for good; on rank 0, first end the others' `steps`. A second call does nothing."""
        if Ranks._ended:
            return
        Ranks._ended = True
        with contextlib.suppress(Exception):
            if self.rank == 0 and not self.broken:
                message = torch.zeros(FIRST, dtype=torch.int64)
                message[0] = STOP
                dist.broadcast(message, 0, group=self._control)
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def encode_draft(draft: DraftCall | None) -> list[int]:
    """What runs, as integers: the number of a draft layer and 1 (0: the model), whether it continues, its rows with
    their number before them.
    """
    return [0, 0, 0] if draft is None else [draft.layer + 1, int(draft.continues), len(draft.rows), *draft.rows]


def decode_draft(message: list[int]) -> tuple[DraftCall | None, list[int]]:
    """What `encode_draft` was given, and the rest of a message that begins with its integers."""
    layer, continues, count = message[:3]
    rows, rest = tuple(message[3 : 3 + count]), message[3 + count :]
    return DraftCall(layer - 1, bool(continues), rows) if layer else None, rest


def encode_batch(batch: Batch, block_tokens: int) -> list[int]:
    """A batch as integers; `decode_queries` returns the queries that it was made from.

    Layout: number of sequences, of block tables, and of state slots of a sequence (0 or 2); for each sequence its new
    tokens, tokens before, blocks per table, logit rows (-1: all); then the token ids, then the blocks of each sequence,
    table after table, then the state slots that are read, and those that are written.
    """
    lens = batch.lens()
    ids = batch.ids.to(HOST).tolist()
    tables = [t.block_tables.to(HOST).tolist() for t in batch.list_tables()]
    logit_rows = None if batch.logit_rows is None else batch.logit_rows.to(HOST).tolist()
    heads: list[int] = []
    blocks: list[int] = []
    for i, total in enumerate(lens.seq_lens):
        start, stop = lens.query_start[i], lens.query_start[i + 1]
        count = -(-total // block_tokens)
        num_logits = -1 if logit_rows is None else sum(start <= row < stop for row in logit_rows)
        heads += (stop - start, total - (stop - start), count, num_logits)
        for table in tables:
            blocks += table[i][:count]
    states = [slots.to(HOST).tolist() for slots in batch.states or ()]
    return [len(lens.seq_lens), len(tables), len(states), *heads, *ids, *blocks, *chain(*states)]


def encode_queries(queries: Sequence[Query]) -> list[int]:
    """Queries as the integers of `encode_batch`, from what the host knows alone."""
    heads: list[int] = []
    ids: list[int] = []
    blocks: list[int] = []
    for q in queries:
        heads += (len(q.ids), q.before, len(q.blocks), -1 if q.logits is None else min(q.logits, len(q.ids)))
        ids += q.ids
        for table in (q.blocks, *q.more_blocks):
            blocks += table
    states = [q.state for q in queries if q.state is not None]
    slots = list(chain(*zip(*states)))
    return [len(queries), 1 + len(queries[0].more_blocks), 2 * bool(states), *heads, *ids, *blocks, *slots]


def decode_queries(message: Sequence[int]) -> list[Query]:
    """The queries that a batch was made from, out of the integers of `encode_batch`."""
    sequences, num_tables, num_states = message[:3]
    heads = [message[3 + 4 * i : 7 + 4 * i] for i in range(sequences)]
    ids_at = [*accumulate((h[0] for h in heads), initial=3 + 4 * sequences)]
    blocks_at = [*accumulate((h[2] * num_tables for h in heads), initial=ids_at[-1])]
    queries = []
    states: list[StateSlots | None] = [None] * sequences
    if num_states:
        reads, writes = message[blocks_at[-1] :][:sequences], message[blocks_at[-1] + sequences :]
        states = list(map(StateSlots, reads, writes))
    for (n, before, count, rows), i, start, state in zip(heads, ids_at, blocks_at, states):
        blocks, *more_blocks = [message[b : b + count] for b in range(start, start + count * num_tables, count)]
        queries.append(Query(message[i : i + n], before, blocks, None if rows < 0 else rows, more_blocks, state))
    return queries
