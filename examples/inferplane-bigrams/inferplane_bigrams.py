"""A complete proposer: it drafts, for each token, the one that followed it last in the same request."""

from itertools import pairwise

from inferplane.engine.speculate import Proposer
from inferplane.plugin import hookimpl

INFERPLANE_API = (1, 1)


class Bigrams(Proposer):
    def __init__(self, context, *, min_text: int = 8):
        self.min_text = min_text
        self.known = {}  # request id -> (number of tokens that are counted, token -> the next one)

    def propose(self, chunks, max_drafts, hidden):
        return [self.draft(chunk.request, most) if most else [] for chunk, most in zip(chunks, max_drafts)]

    def draft(self, request, most):
        done, follows = self.known.get(request.request_id, (1, {}))
        text = request.slice(done - 1, request.tokens)  # with the last token that was counted
        follows.update(pairwise(text))
        self.known[request.request_id] = request.tokens, follows
        drafts, last = [], text[-1]
        while request.tokens >= self.min_text and len(drafts) < most and last in follows:
            last = follows[last]
            drafts.append(last)
        return drafts

    def forget(self, request):
        self.known.pop(request.request_id, None)


@hookimpl
def inferplane_register_proposers(register):
    register("bigrams", Bigrams)
