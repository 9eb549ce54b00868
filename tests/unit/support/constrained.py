"""What the tests of constrained output share: the demo model's tokenizer, and a loop that writes at random."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from tokenizers import Tokenizer

import inferplane
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling.batch_rows import BatchRow
from inferplane.engine.sampling.grammars import Grammars
from inferplane.engine.sampling.sampler import Sampler
from inferplane.ops import SampleTokens
from inferplane.types import HOST
from tests.unit.support.small import bound

FOLDER = Path(inferplane.__file__).parent / "models" / "demo"
V = 4100  # a few more than the tokenizer has, as padded heads have
END = 1
CLOSING = '"}]0@.'


@functools.cache
def tokenizer():
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def grammars(**options):
    return Grammars(tokenizer(), V, {END}, **options)


def ids_of(text):
    return tokenizer().encode(text, add_special_tokens=False).ids


def text_of(ids):
    return tokenizer().decode(ids, skip_special_tokens=True)


def allowed(mask):
    """Token ids whose bits are set in a row of `Constraint.masks`."""
    flags = (torch.from_numpy(mask.copy())[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return {i for i in flags.reshape(-1).nonzero()[:, 0].tolist() if i < V}


def write(constraints, steps, seed=0):
    """Texts that random logits write under constraints, all in one batch; None for those that did not end.

    The logits favour tokens that close something: otherwise a string ends once in a thousand tokens.
    """
    sampler = Sampler(bound(SampleTokens()), V, HOST)
    g = torch.Generator().manual_seed(seed)
    liked = torch.zeros(V)
    liked[[END, *(ids_of(c)[0] for c in CLOSING)]] = 7.0
    made = [[] for _ in constraints]
    for _ in range(steps):
        live = [i for i, c in enumerate(constraints) if not c.ended]
        if not live:
            break
        params = SamplingParams(temperature=1.0)
        rows = [BatchRow(params, i, len(made[i]), allowed=constraints[i].masks()[0]) for i in live]
        logits = torch.randn(len(live), V, generator=g) * 1.5 + liked
        for i, token in zip(live, sampler.sample(logits, sampler.prepare(rows)).tolist()):
            constraints[i].accept([token])
            made[i].append(token)
    return [text_of(ids) if c.ended else None for ids, c in zip(made, constraints)]
