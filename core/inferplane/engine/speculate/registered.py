"""Proposers of methods that load no network: made from what plugins and core registered, and watched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane import plugins
from inferplane.engine.request.state import Request
from inferplane.engine.schedule.scheduler import ScheduledChunk
from inferplane.engine.speculate.methods import find_maker
from inferplane.engine.speculate.proposer import Proposer, ProposerContext, VerifiedChunk
from inferplane.errors import InferplaneError, PluginError, in_words, warn


def make_registered(context: ProposerContext) -> Proposer:
    """The proposer of a method without a network. One of a plugin is watched (`WatchedProposer`).

    Raises:
        UsageError: an option has a value that the method refuses.
        PluginError: its plugin raised something else, or made no proposer.
    """
    method = context.config.method
    host, maker = plugins.host(), find_maker(method)
    try:
        made: Any = maker(context, **context.config.options)
    except InferplaneError:
        raise
    except Exception as error:
        raise host.fail_proposer(method, error) from error
    if not isinstance(made, Proposer):
        raise host.fail_proposer(method, f"it made a {type(made).__name__}, which derives from no Proposer")
    origin = host.proposers()[method].origin
    return made if origin.in_tree else WatchedProposer(made, f"{method!r} of {origin}", context.vocab)


class WatchedProposer(Proposer):
    """A plugin's proposer whose drafts are checked before a step verifies them.

    Args:
        inner: the proposer.
        words: its method and its plugin, for messages.
        vocab: number of token ids.
    """

    def __init__(self, inner: Proposer, words: str, vocab: int) -> None:
        self.inner, self.words, self.vocab = inner, words, vocab
        self.trial_tokens = inner.trial_tokens
        self._has_warned = False

    def propose(
        self, chunks: Sequence[VerifiedChunk], max_drafts: Sequence[int], hidden: torch.Tensor
    ) -> list[list[int]]:
        """See `Proposer.propose`.

        Raises:
            PluginError: there is not one list for each sequence, or one has too many drafts, or one that is no token.
        """
        self.inner.is_paused = self.is_paused
        found = self.inner.propose(chunks, max_drafts, hidden)
        if not isinstance(found, Sequence) or len(found) != len(chunks):
            raise self._error(
                f"returned {_size(found)} for {len(chunks)} sequence(s)", "return one list for each chunk"
            )
        for drafts, most in zip(found, max_drafts):
            if not isinstance(drafts, Sequence) or isinstance(drafts, str):
                raise self._error(f"returned a {type(drafts).__name__}", "return lists of token ids")
            if len(drafts) > most:
                what = f"returned {len(drafts)} drafts for a sequence that may have {most}"
                raise self._error(what, "return at most `max_drafts` of each")
            for token in drafts:
                if type(token) is not int or not 0 <= token < self.vocab:
                    what = f"drafted {token!r:.40}, which is no token: there are {self.vocab}"
                    raise self._error(what, "draft ints from 0 to `context.vocab` - 1")
        return [list(drafts) for drafts in found]

    def needs_step(self, chunks: Sequence[ScheduledChunk], max_drafts: Sequence[int]) -> bool:
        """See `Proposer.needs_step`."""
        return self.inner.needs_step(chunks, max_drafts)

    def complete(self, ended: Sequence[VerifiedChunk], hidden: torch.Tensor) -> None:
        """See `Proposer.complete`."""
        self.inner.complete(ended, hidden)

    def forget(self, request: Request) -> None:
        """See `Proposer.forget`. What it raises is a warning, once: a request has to end whatever its proposer does."""
        try:
            self.inner.forget(request)
        except Exception as error:
            if not self._has_warned:
                warn(f"Proposer {self.words} cannot forget a request ({in_words(error)}); what it holds may grow.")
            self._has_warned = True

    def _error(self, what: str, remedy: str) -> PluginError:
        return PluginError(f"Proposer {self.words} {what}.", remedy=remedy)


def _size(found: Any) -> str:
    return f"{len(found)} list(s)" if isinstance(found, Sequence) else f"a {type(found).__name__}"
