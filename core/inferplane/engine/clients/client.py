"""`EngineClient`: the interface of an engine in a thread of this process, or in a process of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.results import Delta
from inferplane.errors import deprecation_message

RequestId = int | str
Question = Literal["stats", "health", "explain"]


@dataclass(frozen=True)
class Submission:
    """A request on its way to an engine.

    Args:
        request_id: unique among its caller's live requests.
        prompt: token ids.
        params: how to sample.
        index: which of the prompt's n sequences; each has its own random numbers.
        priority: lower runs first.
        tenant: cached entries are shared within a tenant only.
        exclusive_id: rejected while another live request of this tenant has the same id; "" disables the check.
    """

    request_id: RequestId
    prompt: list[int]
    params: SamplingParams
    index: int = 0
    priority: int = 0
    tenant: str = ""
    exclusive_id: str = ""


@dataclass(frozen=True)
class ModelInfo:
    """Public facts about the model that an engine runs.

    Args:
        name: as passed to `LLM`.
        folder: its files; None for a model given as a config.
        architecture: the first of the config's `architectures`.
        device: the backend's name.
        device_name: the device's own name.
        dtype: of activations, such as "bfloat16".
        kv_cache_dtype: how the cache stores entries.
        vocab: token ids are below this.
        width: D, entries of a hidden state, and of an embedding.
        max_model_len: maximum number of tokens of a sequence.
        max_num_seqs: maximum number of sequences in a step.
        kv_blocks: blocks of the cache.
        block_tokens: tokens per block.
        end_ids: tokens that end a text.
        speculative: the method of speculation; "" without.
        tokenizer: `kind` of the `Tokenizer` that an engine in a process of its own has loaded.
        model_type: of the config.
        reply_forms: forms of thoughts and tool calls that plugins have registered.
    """

    name: str
    folder: str | None
    architecture: str
    device: str
    device_name: str
    dtype: str
    kv_cache_dtype: str
    vocab: int
    width: int
    max_model_len: int
    max_num_seqs: int
    kv_blocks: int
    block_tokens: int
    end_ids: tuple[int, ...] = ()
    speculative: str = ""
    tokenizer: str = ""
    model_type: str = ""
    reply_forms: tuple[ReplyForm, ...] = ()


@dataclass(frozen=True)
class Health:
    """Whether an engine makes progress.

    Args:
        alive: it accepts requests.
        busy: requests wait or run.
        steps: steps done so far.
        quiet_s: seconds since its last step or message; a long time while busy means that it is stuck.
        failure: why it is not alive.
    """

    alive: bool
    busy: bool = False
    steps: int = 0
    quiet_s: float = 0.0
    failure: str = ""

    def is_ready(self, stuck_s: float = 30.0) -> bool:
        """Whether it serves requests: it is alive, and either idle or its last step or message is less than `stuck_s`
        seconds ago. For readiness probes.
        """
        return self.alive and (not self.busy or self.quiet_s < stuck_s)


def _read_ready(health: Health) -> Callable[..., bool]:
    warnings.warn(deprecation_message("ready", "is_ready"), DeprecationWarning, stacklevel=2)
    return health.is_ready


Health.ready = property(_read_ready)  # type: ignore[attr-defined]


class Sink(Protocol):
    """Receives the pieces of a caller's streams. Called from the engine's side, once per step; it must not block."""

    def deliver(self, pieces: list[tuple[RequestId, Delta]]) -> None:
        """Receive the new pieces of one step, each with the id that this sink's caller gave its request. An exception
        raised here ends these requests with "error".
        """


class EngineClient(Protocol):
    """An engine as its callers see it. Every method may be called from any thread."""

    info: ModelInfo

    def submit(self, submission: Submission, sink: Sink) -> Future[None]:
        """Queue a request; returns at once a future that is done when the request is accepted, or holds the error that
        refused it (UsageError, CapacityError, EngineError).

        An accepted request delivers pieces to `sink`, from a thread of the engine; the last of them has a
        `finish_reason`. `sink` and the submission's `request_id` together name the request. If the future is cancelled
        in time, the request is never queued.
        """

    def abort(self, request_id: RequestId, sink: Sink) -> None:
        """End the request that was submitted with this id and sink; its last piece has the reason "abort". Returns at
        once; an unknown or ended request is ignored.
        """

    def inspect(self, question: Question) -> Future[dict[str, Any]]:
        """Returns at once a future with JSON-ready data: the engine's counters ("stats"), the fields of `Health`
        ("health"), or the plan with the reasons for each kernel ("explain").
        """

    def close(self, drain_s: float = 0.0, kill_s: float | None = None) -> None:
        """Reject new requests, let live ones run for up to `drain_s` seconds, abort the rest, free the model. Blocks
        until that is done; a second call does no harm. A process of the engine's own is killed if it has not ended
        `kill_s` seconds after draining; None: if it neither closes nor exits for long.
        """
