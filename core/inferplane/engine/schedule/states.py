"""Where the steps of sequences with states end, and how much of a prefix is known with its states. Integers only."""

from __future__ import annotations

from inferplane.engine.request.state import Request
from inferplane.engine.schedule.tables import SequenceTables
from inferplane.kvcache import StatePool


def find_states(usable: list[bytes], tables: SequenceTables, states: StatePool) -> tuple[tuple[int, ...], list[bytes]]:
    """Numbers of tokens at which a sequence's steps have to end, and the longest prefix of its blocks whose entries and
    states are both known.

    The steps end where known blocks end, as another sequence may share just these, and before the last known token.

    Args:
        usable: hashes of its full blocks that may be found, in order.
        tables: where entries are found.
        states: where states are found.
    """
    shared = count = tables.count_known(usable)
    while (known := states.count_prefix(usable[:count])) != count:
        count = tables.count_known(usable[:known])
    boundaries = sorted({shared, len(usable)} - {0})
    return tuple(end * tables.block_tokens for end in boundaries), usable[:count]


def limit_chunk(request: Request, count: int, block_tokens: int) -> int:
    """The number of tokens of a chunk of at most `count` tokens: it ends at the sequence's `stops`, or at a block's end
    if it does not reach the last known token. There the states can be found.

    Args:
        request: the sequence.
        count: of tokens that it could have in the step.
        block_tokens: tokens per block.
    """
    if count <= 1:
        return count
    end = request.computed + count
    stop = next((stop for stop in request.stops if request.computed < stop < end), 0)
    if not stop and end < request.tokens:
        stop = end - end % block_tokens
    return stop - request.computed if stop > request.computed else count
