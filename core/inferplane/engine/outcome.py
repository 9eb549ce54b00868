"""What a call's requests came to: their results, and what to tell of those that failed."""

from __future__ import annotations

from dataclasses import replace

from inferplane.engine.request.results import Result
from inferplane.engine.request.state import Request
from inferplane.errors import GenerationError, warn

SEE_EXPLAIN = "see explain for the kernels in use, and pin another provider"


def tell_failures(requests: list[Request]) -> None:
    """Raise when every request failed; warn when some did: their results carry the reason."""
    failed = [r for r in requests if r.finish_reason == "error"]
    if not failed:
        return
    what = f"{len(failed)} of {len(requests)} requests failed while they ran: {failed[0].error}."
    if len(failed) == len(requests):
        raise GenerationError(what, remedy=SEE_EXPLAIN)
    warn(what)


def results_of(group: list[Request]) -> Result:
    """The first sequence's result, with those of all of them when there are several."""
    each = tuple(map(_result, group))
    return each[0] if len(each) == 1 else replace(each[0], samples=each)


def _result(request: Request) -> Result:
    if request.text is not None:
        request.text.take(end=True)
    return Result(
        request.text.text if request.text is not None else "",
        request.generated,
        request.finish_reason or "abort",
        request.timings(),
        request.prompt,
        request.error,
        request.logprobs,
        request.prompt_logprobs,
        embedding=request.embedding,
    )
