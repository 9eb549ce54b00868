"""Whether counts are those of a distribution."""

import math

import torch


def chi_square_p(counts, p):
    """P(chi-square at least as large); cells of fewer than 5 expected are put together. Wilson-Hilferty."""
    n = counts.sum()
    want = p.double() * n
    small = want < 5
    seen = torch.cat((counts[~small].double(), counts[small].sum()[None].double()))
    want = torch.cat((want[~small], want[small].sum()[None]))
    if want[-1] == 0:
        assert seen[-1] == 0, "a token without probability was drawn"
        seen, want = seen[:-1], want[:-1]
    k = len(want) - 1
    x = float(((seen - want) ** 2 / want.clamp(min=1e-12)).sum())
    z = ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))
