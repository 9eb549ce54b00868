"""The seam between callers and an engine, wherever it runs: a thread of this process, or a process of its own."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.results import Delta

RequestId = int | str
Question = Literal["stats", "health", "explain"]


@dataclass(frozen=True)
class Order:
    """A request on its way to an engine.

    Args:
        request_id: unique among its caller's live requests.
        prompt: token ids.
        params: how to sample.
        index: which of the prompt's n sequences; each draws its own random numbers.
        priority: lower runs first.
        tenant: cached entries are shared within a tenant only.
        alone: refused while another request with the same lives, of the same tenant and any caller; "": nobody cares.
    """

    request_id: RequestId
    prompt: list[int]
    params: SamplingParams
    index: int = 0
    priority: int = 0
    tenant: str = ""
    alone: str = ""


@dataclass(frozen=True)
class ModelInfo:
    """What callers may know of the model that an engine runs.

    Args:
        name: as it was asked for.
        folder: its files; None for a model given as a config.
        architecture: the first of the config's `architectures`.
        device: the backend's name.
        device_name: the device's own name.
        dtype: of activations, such as "bfloat16".
        kv_dtype: how the cache stores entries.
        vocab: token ids are below this.
        width: D, entries of a hidden state, and of an embedding.
        max_model_len: most tokens of a sequence.
        max_batch: sequences in a step.
        kv_blocks: blocks of the cache.
        block_tokens: tokens in a block.
        end_ids: tokens that end a text.
        speculative: how drafts are made; "" without speculation.
        tokenizer: `kind` of the `Tokenizer` that an engine in a process of its own has loaded.
    """

    name: str
    folder: str | None
    architecture: str
    device: str
    device_name: str
    dtype: str
    kv_dtype: str
    vocab: int
    width: int
    max_model_len: int
    max_batch: int
    kv_blocks: int
    block_tokens: int
    end_ids: tuple[int, ...] = ()
    speculative: str = ""
    tokenizer: str = ""


@dataclass(frozen=True)
class Health:
    """Whether an engine does its work.

    Args:
        alive: it takes requests.
        busy: requests wait or run.
        steps: steps done so far.
        quiet_s: seconds since it last ended a step or took a message; long while busy means that it is stuck.
        failure: why it is not alive.
    """

    alive: bool
    busy: bool = False
    steps: int = 0
    quiet_s: float = 0.0
    failure: str = ""

    def ready(self, stuck_s: float = 30.0) -> bool:
        """Whether requests are being served: it is alive, and idle or moving."""
        return self.alive and (not self.busy or self.quiet_s < stuck_s)


class Sink(Protocol):
    """Where the pieces of a caller's streams go. Called from the engine's side, once a step; it must not block."""

    def deliver(self, pieces: list[tuple[RequestId, Delta]]) -> None:
        """Take the pieces of one step, each with its request's id."""


class EngineClient(Protocol):
    """How an engine is reached. Every method may be called from any thread."""

    info: ModelInfo

    def submit(self, order: Order, sink: Sink) -> Future[None]:
        """Queue a request; done when it is accepted, or with the error that refused it.

        Accepted requests deliver pieces, the last of which has a `finish_reason`. Cancelling the future in time means
        that the request is never queued.
        """

    def abort(self, request_id: RequestId, sink: Sink) -> None:
        """End a request with "abort"; unknown and ended ones are ignored."""

    def ask(self, question: Question) -> Future[dict[str, Any]]:
        """Counters ("stats"), the fields of `Health` ("health"), or the plan ("explain"), JSON-ready."""

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give live ones up to `drain_s` seconds, abort the rest, free the model. It blocks."""
