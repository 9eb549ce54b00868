"""`LLM`: a model on a device, for scripts and notebooks."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any

import torch

from inferplane.engine.clients.engine_lock import Turns
from inferplane.engine.loop.engine import DEFAULT_STEP_TOKENS, Engine
from inferplane.engine.request import arguments
from inferplane.engine.request.arguments import Prompt as Prompt
from inferplane.engine.request.embedding import check_dimensions, embedding_params, finished
from inferplane.engine.request.params import SamplingParams, known_keywords
from inferplane.engine.request.results import Delta, Result
from inferplane.engine.request.state import SEE_EXPLAIN, Request, results_of, tell_failures
from inferplane.engine.request.text import Detokenizer, Tokenizer, end_ids
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.model_runner import Runner, RunnerOptions, explained, explained_text
from inferplane.engine.runner.ranks import ranks_for
from inferplane.engine.sampling.grammars import Constraint, Grammars
from inferplane.engine.sampling.rng import as_int64, child_seed
from inferplane.engine.speculate import SpeculativeConfig, with_drafter
from inferplane.errors import GenerationError, UsageError
from inferplane.plugins import host

Progress = Callable[[int, int], None]


class LLM:
    """A model on one device. Calls from several threads take turns.

        llm = LLM("demo")
        print(llm.generate(["def main():"], SamplingParams(max_tokens=40))[0].text)

    Args:
        model: "demo", a folder in the Hugging Face layout, or a config (mapping or transformers config) with
            `load_format="dummy"`.
        device: a backend's name ("auto" takes the best one available, and says which). Never another device than asked.
        index: which of several devices of that kind, from 0.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16", "float16", or a torch dtype.
        max_model_len: most tokens of a sequence; None takes what the model allows and the cache can hold.
        strict: refuse to run when a hot op is left on its slow reference.
        ops: pins: site or op name -> provider, "reference", "decomposition" or a variant of the op.
        kv_dtype: how the cache stores entries: "auto" (as dtype), "fp8", "int8" where the backend offers them.
        quantization: quantize linear weights while they are read: "weight_only_int8", "weight_only_int4",
            "a8w8" (int8, and activations in int8 where a kernel codes them), or "a8w8_fp8_wint4" (experts in int4, the
            rest in FP8, activations in FP8 where a kernel codes them); None keeps what the checkpoint has.
        kv_cache_bytes: memory for the cache; None takes 30 % of what is free.
        max_batch: sequences in a step.
        max_step_tokens: tokens in a step; longer prompts are cut into chunks.
        deterministic: bind only kernels whose results do not depend on the batch.
        load_format: "auto", or "dummy" for random weights.
        mtp: also load the multi-token-prediction layers.
        lock: a lock file with measured kernel choices.
        progress: told `(bytes done, bytes in all)` while weights are loaded.
        prefix_cache: reuse the cache's blocks for equal beginnings of prompts.
        max_waiting: requests that may wait; None: any number.
        speculative: draft and verify several tokens a step (`SpeculativeConfig`, or a mapping with its fields).
        tensor_parallel_size: processes that share the model; None takes all that torchrun started. Rank 0 goes on and
            schedules; in the others this call follows it, and ends the process when rank 0 closes the model.
        capture: record decode steps and replay them, on devices that can; False runs every step eagerly.

    Raises:
        UsageError, DeviceError, UnsupportedModelError, CheckpointError, BindError, CapacityError: each says what was
        asked, what there is and what to do; nothing stays allocated.
    """

    @known_keywords
    def __init__(
        self,
        model: Any = "demo",
        *,
        device: str = "auto",
        index: int = 0,
        dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        strict: bool = False,
        ops: Mapping[str, str] | None = None,
        kv_dtype: str = "auto",
        quantization: str | None = None,
        kv_cache_bytes: int | None = None,
        max_batch: int = 32,
        max_step_tokens: int = DEFAULT_STEP_TOKENS,
        deterministic: bool = False,
        load_format: str = "auto",
        mtp: bool = False,
        lock: str | Path | None = None,
        progress: Progress | None = None,
        prefix_cache: bool = True,
        max_waiting: int | None = None,
        speculative: SpeculativeConfig | Mapping[str, Any] | None = None,
        tensor_parallel_size: int | None = None,
        capture: bool = True,
    ) -> None:
        if load_format not in ("auto", "dummy"):
            raise UsageError(f"load_format = {load_format!r}.", there_is="'auto', 'dummy'")
        max_batch = arguments.whole("max_batch", max_batch, 1)
        max_step_tokens = arguments.whole("max_step_tokens", max_step_tokens, 1)
        max_model_len = None if max_model_len is None else arguments.whole("max_model_len", max_model_len, 1)
        kv_cache_bytes = None if kv_cache_bytes is None else arguments.whole("kv_cache_bytes", kv_cache_bytes, 0)
        max_waiting = None if max_waiting is None else arguments.whole("max_waiting", max_waiting, 0)
        arguments.check_kinds(device=device, dtype=dtype, kv_dtype=kv_dtype, ops=ops, lock=lock, progress=progress)
        config = arguments.speculation(speculative)
        options = RunnerOptions(
            dtype=dtype,
            kv_dtype=kv_dtype,
            quantization=quantization,
            max_model_len=max_model_len,
            max_batch=max_batch,
            kv_cache_bytes=kv_cache_bytes,
            strict=strict,
            deterministic=deterministic,
            ops=dict(ops or {}),
            lock=str(lock) if lock is not None else None,
            load_format=load_format,
            mtp=mtp,
            ranks=ranks_for(tensor_parallel_size),
            capture=capture,
        )
        options = with_drafter(options, config)
        options.check()
        self.files = ModelFiles(model)
        self._end_ids = _end_ids(self.files)  # once: the folder may be gone, or be another's, while the model serves
        self.runner = Runner.open(self.files, host(), device, options, progress, index=index)
        if self.runner.ranks is not None:
            if self.runner.ranks.rank:
                self.runner.follow()
                self.runner.close()
                raise SystemExit(0)
            atexit.register(self.runner.ranks.close)
        self.engine = Engine(
            self.runner,
            max_batch=max_batch,
            max_step_tokens=max_step_tokens,
            prefix_cache=prefix_cache,
            max_waiting=max_waiting,
            speculative=config,
        )
        self._tokenizer: Tokenizer | None = None
        self._grammars: Grammars | None = None
        self._loading = RLock()  # of the tokenizer and of the grammars
        self._turns = Turns(self.engine)

    # -- text

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, loaded at first use.

        Raises:
            UsageError: the model has no folder. CheckpointError: the folder has no usable tokenizer.
        """
        with self._loading:
            if self._tokenizer is None:
                if self.files.folder is None:
                    raise UsageError("A model given as a config has no tokenizer.", remedy="pass prompts as token ids")
                self._tokenizer = Tokenizer(self.files.folder)
            return self._tokenizer

    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        if self._tokenizer is None or self.files.folder is None:
            return self._end_ids
        return self._end_ids | self._tokenizer.own_end_ids

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        return [i.item() if hasattr(i, "item") else i for i in ids]

    def _detokenizer(self, prompt: list[int], params: SamplingParams) -> Detokenizer | None:
        """None for a folder or config without a tokenizer, unless text is needed."""
        if self._tokenizer is None and not self.files.has_tokenizer and not params.stop:
            return None
        self.engine.check(prompt)
        return Detokenizer(self.tokenizer, params.stop or (), prompt)

    # -- generating

    @known_keywords
    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Continue each prompt; one result a prompt, in their order. All run in one batch, as far as there is room.

        Args:
            prompts: a string, a list of token ids, or a list of either.
            params: one for all, or one a prompt.

        Raises:
            UsageError: no prompts, an empty one, a token outside the vocabulary, or not as many params as prompts.
            CapacityError: a prompt with its `max_tokens` is longer than the model or the cache allows.
            GenerationError: every request failed while it ran. Some failing is a warning; their results say why.
        """
        many = arguments.prompt_list(prompts)
        each = arguments.sampling_list(params, len(many))
        groups: list[list[Request]] = []
        with self._turns:
            encoded = [self._encode(p) for p in many]
            try:
                for ids, p in zip(encoded, each):
                    groups.append([])
                    for i in range(p.n):
                        groups[-1].append(self.add(ids, p, i))
                while any(r.finish_reason is None for group in groups for r in group):
                    self._turns.step()
            finally:
                for request in (r for group in groups for r in group):
                    self.engine.end(request, "abort")
        tell_failures([r for group in groups for r in group])
        return [results_of(group) for group in groups]

    def add(self, prompt: Prompt, params: SamplingParams, index: int = 0, **more: Any) -> Request:
        """Queue a prompt without running it; `engine.step()` does. For front ends with a loop of their own.

        Args:
            prompt: a string or a list of token ids.
            params: how to sample.
            index: which of the prompt's `n` sequences; each draws its own random numbers.
            more: request_id, priority, tenant; `constraint`, when it is compiled already.

        Raises:
            UsageError, CapacityError: the request is refused.
        """
        ids = self._encode(prompt)
        seed = None if params.seed is None else child_seed(as_int64(params.seed), index)
        text = self._detokenizer(ids, params)
        if more.get("constraint") is None:
            more["constraint"] = self.constraint(params)
        return self.engine.add(ids, params, self.end_ids(), text, seed=seed, **more)

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """What the parameters demand of the text, compiled; None when they demand nothing. From any thread.

        Raises:
            UsageError: it is not valid, not supported, or too complex.
        """
        if params.constraint is None:
            return None
        with self._loading:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer.fast, self.engine.vocab, self.end_ids())
        return self._grammars.start(params)

    @known_keywords
    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Continue one prompt, piece by piece. Closing the iterator early ends the request and frees its blocks.

        Args:
            prompt: a string or a list of token ids.
            params: how to sample.

        Raises:
            As `generate`, at the first piece; GenerationError later, when the request fails while it runs.
        """
        prompt, params = arguments.one_prompt(prompt), arguments.sampling(params)
        if params.n > 1:
            raise UsageError(f"stream with n = {params.n}.", remedy="use generate, or one stream a sequence")
        with self._turns:
            request = self.add(prompt, params)
        text, sent, before = request.text, 0, None
        try:
            while True:
                with self._turns:
                    # Other streams and calls step this request too, while nobody asks for its next piece.
                    while request.finish_reason is None and sent == len(request.generated):
                        self._turns.step()
                    reason, new = request.finish_reason, request.generated[sent:]
                    before = request.prompt_logprobs if sent == 0 else None
                    sent += len(new)
                    piece = text.take(end=reason is not None) if text else ""
                    scored = None if request.logprobs is None else request.logprobs[sent - len(new) : sent]
                if reason == "error":
                    raise GenerationError(f"The request failed while it ran: {request.error}.", remedy=SEE_EXPLAIN)
                if reason is not None:
                    yield Delta(piece, new, reason, request.timings(), "", scored, before, request.embedding)
                    return
                yield Delta(piece, new, logprobs=scored, prompt_logprobs=before)
        finally:
            self._turns.leave(request)

    @known_keywords
    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> Result:
        """The reply to a conversation, rendered by the checkpoint's own chat template.

        Args:
            messages: `{"role": ..., "content": ...}`, oldest first.
            params: how to sample.

        Raises:
            UsageError: no chat template, or it refuses the messages. Otherwise as `generate`.
        """
        return self.generate([self.tokenizer.chat(arguments.conversation(messages))], arguments.sampling(params))[0]

    @known_keywords
    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """As `chat`, piece by piece."""
        return self.stream(self.tokenizer.chat(arguments.conversation(messages)), arguments.sampling(params))

    @known_keywords
    def logits(self, prompts: Sequence[Sequence[int]], *, chunk_tokens: int | None = None) -> list[torch.Tensor]:
        """Logits after every token of each prompt.

        Args:
            prompts: lists of token ids.
            chunk_tokens: tokens a step; None takes whole prompts up to `max_step_tokens`.

        Returns:
            A float32 tensor `[tokens, vocab]` on the host for each prompt.

        Raises:
            UsageError, CapacityError: as `generate`.
        """
        with self._turns:
            return [self.engine.logits(self._encode(p), chunk_tokens) for p in arguments.prompt_list(prompts)]

    @known_keywords
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "last",
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> list[list[float]]:
        """A vector for each prompt: its hidden states after the final norm, pooled.

        Args:
            prompts: as for `generate`; of at most `max_model_len` - 1 tokens.
            pooling: "last" (the last token's) or "mean" (of all).
            dimensions: keep so many of the first entries; None: all. normalize: make the vectors of length 1.

        Raises:
            As `generate`; UsageError also for another pooling, or dimensions there are not.
        """
        check_dimensions(dimensions, self.runner.model.embed.weight.shape[1])
        results = self.generate(prompts, embedding_params(pooling))
        return [finished(r.embedding, dimensions, normalize=normalize, error=r.error) for r in results]

    # -- looking inside

    def explain(self) -> dict[str, Any]:
        """The plan as data: per site the kernel, why, and every loser with its reason (docs/schemas/explain.json)."""
        return explained(self.runner)

    def explain_text(self, *, verbose: bool = False) -> str:
        """The plan as text; `verbose` adds every loser."""
        return explained_text(self.runner, verbose=verbose)

    @property
    def device(self) -> str:
        """The backend's name."""
        return self.runner.backend.name

    def close(self) -> None:
        """Free the weights and the cache; what still runs is aborted. A second call does nothing."""
        with self._turns:
            self.engine.close()
            if self._grammars is not None:
                self._grammars.close()
            self.runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _end_ids(files: ModelFiles) -> frozenset[int]:
    """Tokens that end a text by what a model's files or config say."""
    if files.folder is not None:
        return end_ids(files.folder)
    value = files.config.get("eos_token_id")
    return frozenset([value] if isinstance(value, int) else value or ())
