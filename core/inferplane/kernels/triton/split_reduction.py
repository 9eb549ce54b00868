"""Programs that share a result: each stores its part and is counted, and the last one to come puts the parts together.

Parts are added in their own order, whoever comes last, so results do not depend on timing. Counters are zeros before a
launch and after it: a recorded step finds them as it left them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def last_of(counter, parts):
    """Count this program in; whether it is the last of `parts`. What the others stored is then there to be read."""
    tl.debug_barrier()  # all of this program's threads have stored
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def last_of_each(counters, parts, mask):
    """The same for several results at once: `counters` are pointers, `parts` how many come to each."""
    tl.debug_barrier()
    last = mask & (tl.atomic_add(counters, 1, mask=mask, sem="acq_rel", scope="gpu") == parts - 1)
    tl.store(counters, 0, mask=last)
    return last


@triton.jit
def kept(pointers, mask):
    """Load what another program has stored during this launch: not from a cache of this multiprocessor's own."""
    return tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
