"""Adding up a result that several programs share: each stores its part and is counted, the last to arrive adds them.

Parts are added in their own order, whichever program is last, so results do not depend on timing. Counters are zero
before a launch and after it, so a captured step finds them as it left them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_last_arrival(counter, parts):
    """Count this program in, after it has stored its part; True for the last of `parts` programs, which may then read
    what the others stored. The counter is 0 again afterwards.
    """
    tl.debug_barrier()  # all of this program's threads have stored
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def are_last_arrivals(counters, parts, mask):
    """`is_last_arrival` for several results at once: `counters` are pointers, `parts` the programs that share each
    result; only entries in `mask` are counted. Returns a vector of booleans.
    """
    tl.debug_barrier()
    last = mask & (tl.atomic_add(counters, 1, mask=mask, sem="acq_rel", scope="gpu") == parts - 1)
    tl.store(counters, 0, mask=last)
    return last


@triton.jit
def load_shared_part(pointers, mask):
    """Load what another program stored during this launch: past the L1 cache, which may hold older values."""
    return tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
