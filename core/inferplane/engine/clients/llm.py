"""`LLM`: a model on a device, for scripts and notebooks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, overload

import torch

from inferplane.engine.clients.chat import (
    ChatDelta,
    ChatModel,
    ChatPlan,
    ChatReader,
    ChatResult,
    are_conversations,
    plan_each,
)
from inferplane.engine.clients.chat_options import ChatOptions
from inferplane.engine.clients.embedding import check_dimensions, embedding_params, finish_embedding
from inferplane.engine.clients.engine_lock import EngineLock
from inferplane.engine.clients.inputs import InputProcessor
from inferplane.engine.clients.options import EngineOptions, options_text, signature_with_options
from inferplane.engine.loop.engine import Engine
from inferplane.engine.loop.prompt_logits import prompt_logits
from inferplane.engine.loop.switch_speculation import switch_speculation
from inferplane.engine.loop.why_waited import describe_overlap, describe_overlap_in_words
from inferplane.engine.request import arguments
from inferplane.engine.request.arguments import Prompt as Prompt
from inferplane.engine.request.constraint import Constraint
from inferplane.engine.request.params import SamplingParams, check_keywords
from inferplane.engine.request.results import Delta, Result
from inferplane.engine.request.seeds import as_int64, child_seed
from inferplane.engine.request.state import PieceReader, Request, failure_of, report_failures, result_of
from inferplane.engine.request.text import Tokenizer
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.model_runner import Runner, check_before_download
from inferplane.engine.runner.ranks import num_ranks
from inferplane.engine.speculate import SpeculativeConfig, with_draft
from inferplane.errors import UsageError
from inferplane.plugins import host


class LLM:
    """A model on one device. Several threads may call it; their calls run one after the other.

        llm = LLM("demo")
        print(llm.generate(["def main():"], SamplingParams(max_tokens=40))[0].text)

    Args:
        model: "demo", a folder in the Hugging Face layout, a name of a model to download (`hf:ORG/NAME`, see
            docs/python.md), or a config (mapping or transformers config) with `load_format="dummy"`.
        options: the fields of `EngineOptions`, by keyword:
        OPTIONS

    Raises:
        UsageError, DeviceError, UnsupportedModelError, CheckpointError, DownloadError, BindError, CapacityError: each
        says what is wrong, what there is and what to do; nothing stays allocated.
    """

    def __init__(self, model: Any = "demo", **options: Any) -> None:
        chosen = EngineOptions.of(options)
        config = SpeculativeConfig.of(chosen.speculative_config)
        self._options = chosen.runner_options(num_ranks(chosen.tensor_parallel_size))
        planned = with_draft(self._options, config)
        where: dict[str, Any] = {"host": host(), "device": chosen.device, "options": planned, "index": chosen.index}
        self.files = ModelFiles(model, check=partial(check_before_download, model=str(model), **where))
        self._inputs = InputProcessor(self.files)
        self.runner = Runner.open(self.files, progress=chosen.progress, **where)
        self.runner.follow_rank_0()
        self._inputs.max_model_len = self.runner.max_model_len
        self.engine = Engine(
            self.runner,
            max_num_seqs=chosen.max_num_seqs,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            enable_prefix_caching=chosen.enable_prefix_caching,
            max_waiting=chosen.max_waiting,
            speculative_config=config,
            insertion=chosen.insertion,
            async_scheduling=chosen.async_scheduling,
        )
        self._lock = EngineLock(self.engine)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, loaded at first use.

        Raises:
            UsageError: the model has no folder. CheckpointError: the folder has no usable tokenizer.
        """
        return self._inputs.tokenizer

    def end_ids(self) -> frozenset[int]:
        """Ids of the tokens that end a text, of the model's files and of its tokenizer once that is loaded."""
        return self._inputs.end_ids()

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """Compile what constrains the text of the parameters, or take it from the cache: its initial state for one
        sequence, with the count of its thought; None when they have none. From any thread; compiling may take seconds.

        Raises:
            UsageError: it is not valid, not supported, or too complex.
        """
        return self._inputs.constraint(params, self.engine.vocab)

    # -- generating

    @check_keywords
    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Continue each prompt, and wait for all; one result per prompt, in their order. All run in one batch if the
        limits allow it.

        Args:
            prompts: a string, a list of token ids, or a list of either.
            params: one for all prompts, or one per prompt; None: the defaults.

        Raises:
            UsageError: no prompts, an empty one, a token outside the vocabulary, or not as many params as prompts.
            CapacityError: a prompt with its `max_tokens` is longer than the model or the cache allows.
            GenerationError: every request failed while it ran. Some failing is a warning; their results say why.
        """
        many = arguments.as_prompts(prompts)
        each = arguments.as_sampling_params_list(params, len(many))
        groups: list[list[Request]] = []
        with self._lock:
            encoded = [self._inputs.encode(p) for p in many]
            try:
                for ids, p in zip(encoded, each):
                    groups.append([])
                    for i in range(p.n):
                        groups[-1].append(self.add(ids, p, i))
                while any(r.finish_reason is None for group in groups for r in group):
                    self._lock.step()
            finally:
                requests = [r for group in groups for r in group]
                self._lock.end_all(requests)
        report_failures(requests)
        return [result_of(group) for group in groups]

    def add(self, prompt: Prompt, params: SamplingParams, index: int = 0, **more: Any) -> Request:
        """Queue a prompt and return its live request; nothing runs until `engine.step()`. For front ends with a loop of
        their own, which must call it from the thread that steps.

        Args:
            prompt: a string or a list of token ids.
            params: how to sample.
            index: which of the prompt's `n` sequences; each has its own random numbers.
            more: request_id, priority, tenant; `constraint`, if it is compiled already.

        Raises:
            UsageError, CapacityError: the request is refused.
        """
        ids = self._inputs.encode(prompt)
        seed = None if params.seed is None else child_seed(as_int64(params.seed), index)
        text = None
        if self._inputs.needs_detokenizer(params):
            self.engine.check(ids)
            text = self._inputs.detokenizer(ids, params)
        if more.get("constraint") is None:
            more["constraint"] = self.constraint(params)
        return self.engine.add(ids, params, self.end_ids(), text, seed=seed, **more)

    @check_keywords
    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Continue one prompt, piece by piece. Closing the iterator early ends the request and frees its blocks.

        Args:
            prompt: a string or a list of token ids.
            params: how to sample.

        Raises:
            As `generate`, at the first piece; GenerationError later, when the request fails while it runs.
        """
        prompt, params = arguments.as_prompt(prompt), arguments.as_sampling_params(params)
        if params.n > 1:
            raise UsageError(f"stream with n = {params.n}.", remedy="use generate, or one stream per sequence")
        with self._lock:
            request = self.add(prompt, params)
        pieces, reason = PieceReader(request), None
        try:
            while reason is None:
                with self._lock:
                    # Other streams and calls step this request too, between two pieces.
                    while (piece := pieces.next_piece()) is None:
                        self._lock.step()
                reason = piece.finish_reason
                if reason == "error":
                    raise failure_of("The request failed while it ran", piece.error or "", piece.error_place)
                yield piece
        finally:
            self._lock.abandon(request)

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> ChatResult: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[ChatResult]: ...

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> ChatResult | list[ChatResult]:
        """The model's reply to a conversation, which the checkpoint's own chat template turns into a prompt. Waits for
        the end.

        Args:
            messages: `{"role": ..., "content": ...}`, oldest first, in the forms that the server takes
                (`inferplane.dialogue.messages`): content is text or a list of text parts; `tool_calls` may be there.
                Or a list of such conversations, whose results are a list in their order.
            params: how to sample; for a list of conversations one for all, or one per conversation.
            options: the fields of `ChatOptions`, by keyword.

        Raises:
            UsageError: no chat template, or it refuses the messages, or these are not valid. Otherwise as `generate`.
        """

        def plan(one: Any, chosen: Any) -> ChatPlan:
            return self.plan_chat(one, chosen, **options)

        plans = plan_each(plan, messages, params)
        results = self.generate([plan.prompt for plan in plans], [plan.params for plan in plans])
        found = [plan.finish(result) for plan, result in zip(plans, results)]
        return found if are_conversations(messages) else found[0]

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[ChatDelta]:
        """The reply to a conversation, as of `chat`, but as an iterator of pieces as of `stream`."""
        plan = self.plan_chat(messages, params, **options)
        reader, pieces = ChatReader(plan), self.stream(plan.prompt, plan.params)
        return map(reader.read, pieces)

    def plan_chat(self, messages: Any, params: SamplingParams | None = None, **options: Any) -> ChatPlan:
        """The prompt and the parameters of a conversation, of which `generate` and `stream` make a reply; arguments and
        errors as of `chat`.
        """
        chosen = ChatOptions.of("LLM.chat", options)
        model_type = str(self.files.config.get("model_type") or "")
        model = ChatModel(self.tokenizer, model_type, host().reply_forms())
        return model.plan(messages, params, chosen).without_refused_tags(self.constraint)

    @check_keywords
    def logits(self, prompts: Sequence[Sequence[int]], *, chunk_tokens: int | None = None) -> list[torch.Tensor]:
        """Run the model over each prompt and return its logits after every token, without sampling: for evaluation. One
        prompt after the other, without the prefix cache.

        Args:
            prompts: lists of token ids.
            chunk_tokens: tokens per step; None takes up to `max_num_batched_tokens`.

        Returns:
            A float32 tensor `[tokens, vocab]` on the host for each prompt.

        Raises:
            UsageError, CapacityError: as `generate`.
        """
        with self._lock:
            return [
                prompt_logits(self.engine, self._inputs.encode(p), chunk_tokens) for p in arguments.as_prompts(prompts)
            ]

    @check_keywords
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "last",
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> list[list[float]]:
        """A vector for each prompt: its hidden states after the final norm, pooled. Waits for all.

        Args:
            prompts: as for `generate`; of at most `max_model_len` - 1 tokens.
            pooling: "last" (the last token's hidden state) or "mean" (the mean over all tokens of the prompt).
            dimensions: how many of the first entries to return; None: all.
            normalize: divide each vector by its length, after shortening, so that dot products are cosines.

        Raises:
            As `generate`; UsageError also for an unknown pooling, or more dimensions than the model has.
        """
        arguments.as_bool("normalize", normalize)
        check_dimensions(dimensions, self.runner.model.embed.weight.shape[1])
        results = self.generate(prompts, embedding_params(pooling))
        return [finish_embedding(r.embedding, dimensions, normalize=normalize, error=r.error) for r in results]

    # -- looking inside, and changing how it drafts

    def set_speculation(self, speculative_config: SpeculativeConfig | Mapping[str, Any] | None) -> None:
        """Draft by another method from now on; the model's weights are not read again (docs/python.md, "Speculation").

        Args:
            speculative_config: as of `LLM`; None: one token a step.

        Raises:
            UsageError: requests run or wait, or ranks would have to load something. Otherwise as `LLM`. After an error
                everything is as before, unless memory ran out while the new caches were built: then the LLM is closed.
        """
        config = SpeculativeConfig.of(speculative_config)
        with self._lock:
            switch_speculation(self.engine, config, with_draft(self._options, config))
            self._inputs.max_model_len = self.runner.max_model_len

    def explain(self) -> dict[str, Any]:
        """The plan as data: per site the chosen kernel and why, and every rejected kernel with its reason
        (docs/schemas/explain.json).
        """
        return {**self.runner.explain(), "async_scheduling": describe_overlap(self.engine)}

    def explain_text(self, *, verbose: bool = False) -> str:
        """The plan as text for a terminal; `verbose` adds every rejected kernel with its reason."""
        return f"{self.runner.explain_text(verbose=verbose)}\n{describe_overlap_in_words(self.engine)}"

    @property
    def device(self) -> str:
        """The backend's name."""
        return self.runner.backend.name

    def close(self) -> None:
        """Abort what still runs, and free the weights, the cache and the process that compiles grammars; waits for a
        call of another thread. A second call does nothing.
        """
        with self._lock:
            self.engine.close()
            self._inputs.close()
            self.runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


LLM.__init__.__signature__ = signature_with_options(LLM.__init__)  # type: ignore[attr-defined]
if LLM.__doc__ is not None:  # as it is under `python -OO`
    LLM.__doc__ = inspect.cleandoc(LLM.__doc__).replace("    OPTIONS", options_text("    "))
