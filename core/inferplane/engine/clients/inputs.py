"""`InputProcessor`: from a prompt and its parameters to what the engine takes: token ids, detokenizer, constraint."""

from __future__ import annotations

from functools import partial
from threading import RLock
from typing import Any

from inferplane.engine.request.arguments import Prompt
from inferplane.engine.request.constraint import Constraint
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.text import Detokenizer, Tokenizer, end_ids
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.sampling.grammars import Grammars
from inferplane.engine.sampling.spans.constraints import ModelFacts
from inferplane.engine.sampling.spans.marks import MarkedTokens
from inferplane.engine.sampling.spans.start import start_constraint
from inferplane.engine.sampling.spans.token_text import TokenText
from inferplane.errors import CheckpointError, UsageError


class InputProcessor:
    """A model's tokenizer and grammars, each loaded at first use. Its methods may be called from any thread.

    Args:
        files: the model's.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.max_model_len: int | None = None
        """Most tokens of a sequence, once that is known; texts with more are not encoded as a whole."""
        self._end_ids = _end_ids(files)  # once: the folder may be gone, or another's, while the model serves
        self._tokenizer: Tokenizer | None = None
        self._grammars: Grammars | None = None
        self._tokens: MarkedTokens | None = None
        self._loading = RLock()  # guards the tokenizer, the grammars and the tokens

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, loaded at first use; other threads wait meanwhile.

        Raises:
            UsageError: the model has no folder. CheckpointError: the folder has no usable tokenizer.
        """
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer(self._files.folder, max_tokens=self.max_model_len)
                self._tokenizer.model_name = self._files.name
            return self._tokenizer

    def end_ids(self) -> frozenset[int]:
        """Ids of the tokens that end a text: those of the model's files, and of the tokenizer once it is loaded."""
        if self._tokenizer is None or self._files.folder is None:
            return self._end_ids
        return self._end_ids | self._tokenizer.own_end_ids

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a string is tokenized, token ids (also an array or a tensor) become a list of ints.

        Raises:
            UsageError: it is not valid Unicode. CapacityError: it has more tokens than a sequence may have.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        ids: list[Any] = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        return [i.item() if hasattr(i, "item") else i for i in ids]

    def needs_detokenizer(self, params: SamplingParams) -> bool:
        """Whether generated tokens become text; not for a model without a tokenizer, unless stop strings need it."""
        return self._tokenizer is not None or self._files.has_tokenizer or bool(params.stop)

    def detokenizer(self, prompt: list[int], params: SamplingParams) -> Detokenizer:
        """A new decoder for the tokens generated after `prompt`, which stops at the stop strings of `params`."""
        visible = self.tokenizer.find_ids(params.visible_tokens) if params.visible_tokens else frozenset[int]()
        return Detokenizer(self.tokenizer, params.stop or (), prompt, visible, params.reasoning)

    def constraint(self, params: SamplingParams, vocab: int) -> Constraint | None:
        """What constrains the text of the parameters, or counts its thought, at its initial state, with grammars that
        are compiled or from the cache; None when they have none.

        Args:
            params: with a JSON schema, a regular expression, a grammar, structural tags or a reasoning span, or none.
            vocab: V, columns of the model's logits, which masks must cover.

        Raises:
            UsageError: it is not valid, not supported, or too complex, or the model has no usable tokenizer.
        """
        if params.reasoning is None and not params.needs_grammar:
            return None
        with self._loading:
            try:
                tokenizer = self.tokenizer
            except (UsageError, CheckpointError) as error:
                subject, rule = _name_rule(params)
                what = f"{subject} text, which needs the model's tokenizer. {error.what}"
                raise UsageError(what, remedy=f"add its tokenizer.json, or leave the {rule} out") from error
            end_ids = self.end_ids()
            if self._grammars is None and params.needs_grammar:
                self._grammars = Grammars(tokenizer.fast, vocab, end_ids)
            if self._tokens is None:
                encode = partial(tokenizer.encode, special=False)
                self._tokens = MarkedTokens(TokenText(tokenizer.fast).bytes_of, encode, vocab)
        facts = ModelFacts(self._tokens, frozenset(i for i in end_ids if i < vocab), -(-vocab // 32))
        return start_constraint(params, facts, self._grammars if params.needs_grammar else None)

    def close(self) -> None:
        """End the process that compiles grammars, if it runs; a later constraint starts another."""
        if self._grammars is not None:
            self._grammars.close()


def _name_rule(params: SamplingParams) -> tuple[str, str]:
    """What of the parameters needs a tokenizer: as the beginning of a sentence about text, and its name."""
    if params.constraint is not None:
        return f"A {params.constraint[0]} constrains", "constraint"
    if params.structural_tags:
        return "A structural tag constrains", "structural tags"
    return "A reasoning span has marks that are", "reasoning span"


def _end_ids(files: ModelFiles) -> frozenset[int]:
    """Ids of the tokens that end a text, by a folder's configs, or by `eos_token_id` of a config without a folder."""
    if files.folder is not None:
        return end_ids(files.folder)
    value = files.config.get("eos_token_id")
    return frozenset([value] if isinstance(value, int) else value or ())
