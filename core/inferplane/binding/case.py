"""The parts of a test case: caches full of stale numbers, steps padded as under capture, checks of changed inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch

from inferplane.errors import in_words
from inferplane.ops import Draw
from inferplane.ops.op import as_tuple
from inferplane.ops.oracle import to_host
from inferplane.types import (
    Batch,
    CompressedCache,
    CompressorCache,
    HostLens,
    HybridCache,
    IndexedCache,
    KVCache,
    KVLayout,
    KVRequest,
    LayerKV,
    QTensor,
    Selection,
    StateCache,
)
from inferplane.types.batch import TableRows
from inferplane.types.state import PADDING_SLOT, StateRows

PADDED_SEQUENCES = 2
STALE_SCALE = 4.0
"""Stale entries are drawn larger than fresh ones, so that attending to one of them gives a clearly wrong result."""

MAX_SCALE_ERROR = 0.25
"""By which share the size of a row may differ from the oracle's."""
NOISE = 1 / 64
"""Share of the accepted error below which a row of a result is noise."""
OP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of activations."""


class Caches:
    """Builds a case's caches. Every slot holds stale finite numbers, as in a cache that has been in use.

    Args:
        layouts: the layout of each cache request.
        dtype: the plan's dtype.
        device: torch device.
        seed: of the stale numbers.
    """

    def __init__(self, layouts: dict[KVRequest, KVLayout], dtype: torch.dtype, device: str, seed: int) -> None:
        self.layouts, self.dtype, self.device = layouts, dtype, device
        self._draw = Draw(seed + 7919, dtype, device)
        self._built: dict[int, tuple[LayerKV, int]] = {}

    def build(self, request: KVRequest, blocks: int) -> LayerKV:
        """A cache of `blocks` blocks, all slots written."""
        kv = self.layouts[request].build(request, blocks, self.dtype, torch.device(self.device))
        slots = torch.arange(blocks * kv.block_tokens).to(self.device)
        kv.write(slots, *(t * STALE_SCALE for t in self._draw.kv_entries(request, len(slots))))
        self._built[id(kv)] = kv, blocks
        return kv

    def poison(self, kv: LayerKV, batch: Batch) -> None:
        """Fill every slot that belongs to no sequence of the step with NaN: a used cache may hold any bits.

        Args:
            kv: a cache from `build`.
            batch: the step as the cache sees it (`views_in`); its sequences are in the cache already.
        """
        lens, (_, blocks) = batch.lens(), self._built[id(kv)]
        used = torch.zeros(blocks * kv.block_tokens, dtype=torch.bool)
        for n, table in zip(lens.seq_lens, to_host(batch.block_tables).long(), strict=True):
            place = torch.arange(n)
            used[table[place // kv.block_tokens] * kv.block_tokens + place % kv.block_tokens] = True
        slots = torch.where(~used)[0].to(self.device)
        kv.write(slots, *(t * torch.nan for t in self._draw.kv_entries(kv.request, len(slots))))

    def read_all(self, kv: LayerKV) -> tuple[torch.Tensor, ...]:
        """All entries by slot, `[blocks * block_tokens, ...]` float32 on the host."""
        _, blocks = self._built[id(kv)]
        table = torch.arange(blocks, dtype=torch.int32).to(self.device)
        held: tuple[torch.Tensor, ...] = to_host(tuple(kv.read(table, blocks * kv.block_tokens)), widen=True)
        return held


def caches_in(args: Iterable[Any]) -> list[LayerKV]:
    """The layers' caches among an op's arguments."""
    out: list[LayerKV] = []
    for arg in args:
        if isinstance(arg, IndexedCache):
            out += [kv for kv in arg[:2] if kv is not None]
            continue
        if isinstance(arg, (CompressorCache, CompressedCache)):
            out += [part.kv for part in arg.list_parts()]
            continue
        arg = arg.kv if isinstance(arg, HybridCache) else arg
        out += arg.layers if isinstance(arg, KVCache) else [arg] if isinstance(arg, LayerKV) else []
    return out


def views_in(args: Iterable[Any]) -> list[Batch]:
    """For each of `caches_in`, the step as its layer sees it; none without a batch."""
    args = tuple(args)
    if (batch := batch_in(args)) is None:
        return []
    numbers = [number for arg in args for number in _tables_of(arg)]
    return [batch.for_table(number).for_entries(kv) for kv, number in zip(caches_in(args), numbers, strict=True)]


def _tables_of(arg: Any) -> Sequence[int]:
    """The number of the block table of each of `caches_in`."""
    if isinstance(arg, (CompressorCache, CompressedCache)):
        return [part.table for part in arg.list_parts()]
    return arg.list_tables() if isinstance(arg, KVCache) else (0,) * len(caches_in([arg]))


def batch_in(args: Iterable[Any]) -> Batch | None:
    """The batch among an op's arguments, if there is one."""
    return next((a for a in args if isinstance(a, Batch)), None)


def pad(args: tuple[Any, ...], draw: Draw, *, lens_known: bool) -> tuple[Any, ...]:
    """The same step with two padded sequences at the end, as a captured step has them: each has no tokens, and as many
    rows as the step's longest sequence.

    Args:
        args: arguments of an op; one is a batch of kind "decode".
        draw: fills the padded rows of activations and states with random numbers.
        lens_known: the host knows the lengths; otherwise `host_lens` is None.
    """
    batch = batch_in(args)
    assert batch is not None and batch.kind == "decode", "only decode steps are padded"
    tokens, lens, rows = batch.tokens, batch.lens(), count_padded_rows(batch)
    extra = range(1, PADDED_SEQUENCES + 1)
    starts = (*lens.query_start, *(tokens + i * batch.max_query_tokens for i in extra))
    block_tokens = next((kv.covered_tokens or kv.block_tokens for kv in caches_in(args)), 1)
    padded = replace(
        batch,
        ids=_append(batch.ids, 0, rows),
        positions=_append(batch.positions, 0, rows),
        slots=_append(batch.slots, -1, rows),
        query_start=torch.tensor(starts, dtype=torch.int32).to(batch.query_start.device),
        seq_lens=_append(batch.seq_lens, 0, PADDED_SEQUENCES),
        block_tables=_append(batch.block_tables, 0, PADDED_SEQUENCES),
        more_tables=tuple(
            TableRows(_append(slots, -1, rows), _append(tables, 0, PADDED_SEQUENCES))
            for slots, tables in batch.more_tables
        ),
        states=batch.states and StateRows(*(_append(slots, PADDING_SLOT, PADDED_SEQUENCES) for slots in batch.states)),
        max_seq_tokens=max(batch.max_seq_tokens, batch.block_tables.shape[1] * block_tokens),
        host_lens=HostLens(starts, (*lens.seq_lens, *(0 for _ in extra))) if lens_known else None,
    )

    more = {batch.seq_lens.shape[0]: PADDED_SEQUENCES, tokens: rows}  # both where each sequence has one token

    def grow(arg: Any) -> Any:
        if arg is batch:
            return padded
        if isinstance(arg, IndexedCache) and (chosen := arg.selection.positions) is not None:
            return arg._replace(selection=Selection(_append(chosen, -1, rows)))
        if isinstance(arg, torch.Tensor) and arg.dim() and arg.shape[0] in more:
            n = more[arg.shape[0]]
            if not arg.is_floating_point():
                return _append(arg, 0, n)
            return torch.cat((arg, draw.normal(n, *arg.shape[1:], dtype=arg.dtype)))
        return arg

    return tuple(grow(arg) for arg in args)


def count_padded_rows(batch: Batch) -> int:
    """Number of token rows that `pad` adds to a step."""
    return PADDED_SEQUENCES * batch.max_query_tokens


def _append(tensor: torch.Tensor, value: int, rows: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_full((rows, *tensor.shape[1:]), value)))


class Untouched:
    """A copy of a kernel's inputs before it runs: arguments, the batch's tensors, weights.

    Args:
        args: the op's arguments.
        weights: packed weights.
    """

    def __init__(self, args: tuple[Any, ...], weights: Iterable[Any]) -> None:
        self.args, self.weights = args, list(weights)
        self.before = [(words, tensor, to_host(tensor)) for words, tensor in self._tensors()]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, arg in enumerate(self.args):
            if isinstance(arg, torch.Tensor):
                yield f"argument {i}", arg
            elif isinstance(arg, Batch):
                for f in fields(arg):
                    if isinstance(value := getattr(arg, f.name), torch.Tensor):
                        yield f"the batch's {f.name}", value
                yield from (("a further block table of the batch", t) for rows in arg.more_tables for t in rows)
                yield from (("the batch's state slots", t) for t in arg.states or ())
        for weight in self.weights:
            quantized = isinstance(weight, QTensor)
            parts = (weight.data, weight.scale, weight.minimum) if quantized else (weight,)
            yield from (("a weight", t) for t in parts if isinstance(t, torch.Tensor))

    def describe_change(self) -> str:
        """In words, the first input that changed; empty if none did."""
        for words, tensor, before in self.before:
            now = to_host(tensor)
            if now.shape != before.shape or not bool(same_entries(now, before).all()):
                return f"it changed {words}"
        return ""


def same_entries(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two tensors of the same shape have equal entries, NaN being equal to NaN; bool of that shape."""
    return (one == other) | ((one != one) & (other != other))


def real_rows(got: Any, expected: Any, args: tuple[Any, ...], batch: Batch) -> Any:
    """Results of a padded step without the rows that `pad` adds: of tokens, and of sequences where the op has an
    argument with a row for each. Results with an unexpected number of rows stay as they are and fail later."""
    more = {batch.tokens: count_padded_rows(batch)}
    if any(isinstance(arg, torch.Tensor) and arg.shape[:1] == batch.seq_lens.shape for arg in args):
        more = {batch.seq_lens.shape[0]: PADDED_SEQUENCES, **more}

    def drop_padding(g: Any, u: torch.Tensor | None) -> Any:
        n = u.shape[0] if u is not None and u.dim() else 0
        if n not in more:
            return g
        high = isinstance(g, torch.Tensor) and g.shape[:1] == (n + more[n],)
        what = "token" if n == batch.tokens else "sequence"
        return g[:n] if high else f"{list(getattr(g, 'shape', ()))} with {n + more[n]} {what} rows given"

    results, expected_results = as_tuple(got), as_tuple(expected)
    if len(results) != len(expected_results):
        return got
    out = tuple(drop_padding(g, u) for g, u in zip(results, expected_results, strict=True))
    return out if isinstance(got, tuple) else out[0]


def shape_error(got: Any, expected: Any) -> str:
    """In words, how a result differs from the expected one in number, shape, dtype or finiteness; empty if it fits."""
    if expected is None:
        return "" if got is None else f"returned {type(got).__name__} instead of nothing"
    results, expected_results = as_tuple(got), as_tuple(expected)
    if len(results) != len(expected_results):
        return f"{len(results)} results instead of {len(expected_results)}"
    for i, (g, u) in enumerate(zip(results, expected_results, strict=True)):
        if g is None and u is None:
            continue
        if u is None:
            return f"result {i} is {type(g).__name__} instead of nothing"
        if not isinstance(g, torch.Tensor):
            return f"result {i} is {g if isinstance(g, str) else type(g).__name__}, not a tensor"
        if tuple(g.shape) != tuple(u.shape):
            return f"result {i} has shape {list(g.shape)} instead of {list(u.shape)}"
        if g.dtype != u.dtype and not (_is_index(g) and _is_index(u)):
            return f"result {i} has dtype {g.dtype} instead of {u.dtype}"
        if g.is_floating_point() and not torch.isfinite(g.float()).all():
            return f"result {i} holds NaN or Inf"
    return ""


def scale_error(got: Any, ideal: Any, tolerance: float) -> str:
    """In words, the first row whose size is wrong; empty if there is none.

    The tolerance is a share of a result's largest value. Beside a large row, a small one could be halved or left out
    within it. So each row, projected on the oracle's, must be about once the oracle's: rounding averages out there.

    Args:
        got, ideal: result and oracle's, of the same shapes; the first dimension is that of rows.
        tolerance: of the op.
    """
    for i, (g, u) in enumerate(zip(as_tuple(got), as_tuple(ideal), strict=True)):
        if not isinstance(u, torch.Tensor) or not u.is_floating_point() or not u.numel():
            continue
        rows, expected_rows = (t.reshape(t.shape[0] if t.dim() > 1 else 1, -1).double() for t in (g, u))
        size = expected_rows.square().mean(1)
        ratio = (rows * expected_rows).mean(1) / size
        is_noise = size.sqrt() <= tolerance * expected_rows.abs().max() * NOISE
        allowed = min(max(MAX_SCALE_ERROR, tolerance / 2), 2 * MAX_SCALE_ERROR - 0.1)  # activations of 4 bits, twice
        wrong = ~is_noise & ~((ratio - 1).abs() <= allowed)
        if wrong.any():
            row = int(wrong.int().argmax())
            return f"row {row} of result {i} has {ratio[row]:.2g} times the size that it should have"
    return ""


def reuse_memory(function: Callable[..., Any], given: tuple[Any, ...], returned: Any) -> str:
    """In words, that a second call with other values changes the result of the first; empty if it does not.

    Args:
        function: a bound kernel. given: the arguments of its first call. returned: its result, on the device.
    """
    before = to_host(as_tuple(returned))
    others = (a / 2 if isinstance(a, torch.Tensor) and a.dtype in OP_DTYPES else a for a in given)
    try:
        function(*others)
    except Exception as raised:
        return f"a second call raised {in_words(raised)}"
    for i, (now, first) in enumerate(zip(to_host(as_tuple(returned)), before, strict=True)):
        if isinstance(first, torch.Tensor) and not bool(same_entries(now, first).all()):
            return f"a second call changed result {i} of the first: it returns memory that it keeps"
    return ""


def _is_index(t: torch.Tensor) -> bool:
    return t.dtype in (torch.int32, torch.int64)


def describe(args: tuple[Any, ...]) -> str:
    """Arguments in words: "[3, 64] bfloat16, 2 sequences of 4 tokens, KV paged_16"."""
    out = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            strides = "" if arg.is_contiguous() else f" strides {list(arg.stride())}"
            out.append(f"{list(arg.shape)} {str(arg.dtype).removeprefix('torch.')}{strides}")
        elif isinstance(arg, Batch):
            lens = arg.lens()
            news = [b - a for a, b in zip(lens.query_start, lens.query_start[1:], strict=False)]
            pairs = ", ".join(f"{new} of {total}" for new, total in zip(news, lens.seq_lens, strict=True))
            out.append(f"batch of {len(news)} sequences (new tokens of all: {pairs})")
        elif isinstance(arg, LayerKV):
            out.append(f"KV {arg.layout}")
        elif isinstance(arg, (StateCache, HybridCache)):
            states = arg.states if isinstance(arg, HybridCache) else arg
            out.append(f"states of {states.slots} slots")
        else:
            out.append(type(arg).__name__ if isinstance(arg, KVCache) else str(arg))
    return "; ".join(out)


@contextmanager
def poison_memory() -> Iterator[None]:
    """Inside, torch fills fresh memory with NaN (integers: the largest), so that unwritten results are detected.

    Source: torch.utils.deterministic.fill_uninitialized_memory.
    """
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings.fill_uninitialized_memory = True
    _set_deterministic(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        _set_deterministic(was[0], warn_only=was[1])
        settings.fill_uninitialized_memory = fill


# The public function also imports torch's compiler, which takes more than a second at start-up.
_set_deterministic = getattr(torch._C, "_set_deterministic_algorithms", torch.use_deterministic_algorithms)
