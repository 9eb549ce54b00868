"""Drafts from the request's own text and from earlier answers, as long as these texts have agreed so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from inferplane.engine.request.state import Request
from inferplane.engine.schedule.scheduler import ScheduledChunk
from inferplane.engine.speculate.proposer import Proposer, ProposerContext, VerifiedChunk
from inferplane.engine.speculate.text.suffix_index import NO_DRAFTS_FOUND, SuffixIndex
from inferplane.engine.speculate.verify import needs_probabilities

MAX_NEW_TOKENS = 4096
"""Most tokens of a request that are indexed in one step; a longer prompt is indexed in several before it has drafts."""


class EarlierAnswers:
    """Answers of requests that have ended, an index for each tenant: requests of one never see those of another, as it
    is with cached prefixes. The oldest answers of all tenants are dropped first.

    Args:
        max_depth: see `SuffixIndex`.
        max_requests: most answers. max_tokens: most tokens of all answers.
    """

    def __init__(self, max_depth: int, max_requests: int, max_tokens: int) -> None:
        self.max_depth, self.max_requests, self.max_tokens = max_depth, max_requests, max_tokens
        self.tokens = 0
        self._of_tenant: dict[str, SuffixIndex] = {}
        self._oldest: deque[tuple[str, int]] = deque()

    def __len__(self) -> int:
        """Number of answers."""
        return len(self._oldest)

    def of(self, tenant: str) -> SuffixIndex | None:
        """The answers of a tenant; None without any."""
        return self._of_tenant.get(tenant)

    def add(self, tenant: str, answer: Sequence[int]) -> None:
        """Keep an answer, and drop the oldest ones beyond the limits; one that exceeds them by itself is not kept."""
        size = len(answer) + 1
        if not self.max_requests or size > self.max_tokens:
            return
        while len(self._oldest) >= self.max_requests or self.tokens + size > self.max_tokens:
            self._drop_oldest()
        index = self._of_tenant.setdefault(tenant, SuffixIndex(self.max_depth))
        index.extend(answer)
        index.end_text()
        self._oldest.append((tenant, size))
        self.tokens += size

    def _drop_oldest(self) -> None:
        tenant, size = self._oldest.popleft()
        index = self._of_tenant[tenant]
        index.drop_first_text(size)
        self.tokens -= size
        if not len(index):
            del self._of_tenant[tenant]


class SuffixProposer(Proposer):
    """Copies what followed the last tokens before, on the host: in the prompt, in the answer so far, or in earlier
    answers of the same tenant.

    A request is indexed when it gets drafts, so it costs nothing while drafting does not pay.

    Args:
        context: the limits are its config's fields `suffix_decoding_...`.

    Source: SuffixDecoding, arXiv 2411.04975.
    """

    def __init__(self, context: ProposerContext) -> None:
        config = context.config
        self.max_depth = config.suffix_decoding_max_tree_depth
        self.per_match = config.suffix_decoding_max_spec_factor
        self.min_probability = config.suffix_decoding_min_token_prob
        self.answers = EarlierAnswers(
            self.max_depth, config.suffix_decoding_max_cached_requests, config.suffix_decoding_max_cached_tokens
        )
        self.decides_draws = needs_probabilities(config)
        self.own: dict[int | str, SuffixIndex] = {}

    def needs_step(self, chunks: Sequence[ScheduledChunk], max_drafts: Sequence[int]) -> bool:
        """See `Proposer.needs_step`: it reads tokens alone."""
        return False

    def propose(
        self, chunks: Sequence[VerifiedChunk], max_drafts: Sequence[int], hidden: torch.Tensor
    ) -> list[list[int]]:
        """See `Proposer.propose`; `hidden` is not read."""
        return [self._draft(c.request, n) for c, n in zip(chunks, max_drafts)]

    def _draft(self, request: Request, max_drafts: int) -> list[int]:
        """Up to `max_drafts` drafts of a sequence, from its own text or the earlier answers, whichever promise more."""
        if not max_drafts and self.is_paused:
            return []
        own = self.own.setdefault(request.request_id, SuffixIndex(self.max_depth))
        done, known = len(own), len(request.prompt) + len(request.generated)
        depends = self._drafts_decide(request)
        own.extend(request.slice(done, known if depends else min(known, done + MAX_NEW_TOKENS)))
        if not max_drafts or len(own) < known:
            return []
        suffix, best = own.tokens[-self.max_depth :], NO_DRAFTS_FOUND
        for index in (own, None if depends else self.answers.of(request.tenant)):
            if index is not None and best.score < max_drafts:
                found = index.draft(suffix, max_drafts, self.per_match, self.min_probability)
                best = found if found.score > best.score else best
        return best.tokens

    def _drafts_decide(self, request: Request) -> bool:
        """Whether drafts decide what a seed draws: they may then depend on the request alone, not on what else ran."""
        params = request.params
        return self.decides_draws and params.seed is not None and params.temperature > 0

    def forget(self, request: Request) -> None:
        """Free the index of a request that has ended, and keep its answer for later ones."""
        self.own.pop(request.request_id, None)
        if request.generated:
            self.answers.add(request.tenant, request.generated)
