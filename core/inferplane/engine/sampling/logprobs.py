"""Log-probabilities of tokens, and of the most likely alternatives.

They are the model's own: computed from its logits before penalties, biases, constraints and temperature. (Other engines
do so by default, too, and evaluation harnesses need it.) Sums are of integers, as in `ops/sampling.py`, so
that they do not depend on the batch, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inferplane.engine.request.results import TokenLogprob
from inferplane.engine.sampling.batch_rows import max_rows_at_once
from inferplane.ops.sampling import WEIGHT_BITS, stable_topk, token_weights
from inferplane.types import HOST


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of N tokens, and of the K most likely tokens of the same rows, on the device.

    Args:
        tokens: int64 `[N]`.
        logprobs: float32 `[N]`, natural logarithms.
        ranks: int64 `[N]`: 1 + the number of tokens with a larger logit.
        top_ids: int64 `[N, K]`, the most likely tokens, the most likely first.
        top: float32 `[N, K]`, their log-probabilities.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    def to_host(self, alternatives: Sequence[int] | None = None) -> list[TokenLogprob]:
        """Copy to the host, waiting for the device; returns a record per token.

        Args:
            alternatives: how many of its K alternatives each token keeps; None: all.
        """
        columns = (self.tokens, self.logprobs, self.ranks, self.top_ids, self.top)
        on_host = [c.to(HOST).tolist() for c in columns]
        counts = alternatives if alternatives is not None else [self.top.shape[1]] * len(on_host[0])
        return [TokenLogprob(t, p, r, tuple(zip(ids[:n], top))) for t, p, r, ids, top, n in zip(*on_host, counts)]


def score(logits: torch.Tensor, tokens: torch.Tensor, alternatives: int = 0) -> Logprobs:
    """Log-probabilities of one token per row. The result stays on the device.

    For a prompt, pass the logits after its tokens, and as `tokens` the tokens that follow: the first token of a prompt
    has none.

    Args:
        logits: float32 `[N, V]`, the model's own, before penalties and temperature; they are not changed.
        tokens: int64 `[N]`, the token of each row.
        alternatives: K, how many of the most likely tokens to return with each; at most V.
    """
    rows = max_rows_at_once(logits.shape[-1], logits.device)
    if logits.shape[0] <= rows:
        return _score(logits, tokens, alternatives)
    parts = [_score(x, t, alternatives) for x, t in zip(logits.split(rows), tokens.split(rows))]
    return Logprobs(*(torch.cat([getattr(p, name) for p in parts]) for name in Logprobs.__dataclass_fields__))


def _score(logits: torch.Tensor, tokens: torch.Tensor, alternatives: int) -> Logprobs:
    """`score` for as many rows as should be processed at once."""
    own = logits.gather(1, tokens[:, None])
    # log(sum(exp(logits))): the weights are exp(logits - largest) as integers
    total = token_weights(logits).sum(-1, keepdim=True).float().log() - WEIGHT_BITS * math.log(2.0)
    largest = logits.amax(-1, keepdim=True)
    ranks = (logits > own).sum(-1) + 1
    top, ids = stable_topk(logits, min(alternatives, logits.shape[-1]))
    return Logprobs(tokens, (own - largest - total)[:, 0], ranks, ids, top - largest - total)
