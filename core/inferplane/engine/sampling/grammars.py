"""Constrained output: JSON that fits a schema, text that matches a regular expression or a grammar.

llguidance turns a constraint into a matcher, which tells for each place in the text which tokens may come. The matcher
works on bytes, so that any byte-level tokenizer serves, and tokens that hold half a character are handled.

In each gap of JSON at most `SPACES` characters of white space may stand: some models otherwise emit it for ever.

Source: https://github.com/guidance-ai/llguidance, docs/syntax.md and docs/json_schema.md.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling.grammar_sandbox import Trial
from inferplane.errors import UsageError

COMPILE_S = 2.0
"""Seconds that compiling one constraint may take."""
KEPT_CONSTRAINTS = 64
"""Compiled constraints, and refusals, that are remembered."""
SLOW_KEPT_S = 60.0
"""Seconds that a constraint which took too long is refused unseen; the machine may have been busy."""
NO_TEXT = "NoExtensionBias"
"""What llguidance says of a grammar that no token can begin."""
_PLACE = re.compile(r"^at \d+\(\d+\):\s*")
_MENDED = {
    "json_schema": "mend the schema; llguidance's docs/json_schema.md lists what is taken",
    "regex": "mend the expression; it is in the syntax of Rust's crate regex",
    "grammar": "mend the grammar; its syntax is in llguidance's docs/syntax.md",
}
STACK_BYTES = 64 * 2**20
"""Stack on which constraints are compiled: well above that on which they were tried out."""
SPACES = 40
JSON_OPTIONS = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{SPACES}}}",
    "lenient": False,  # a keyword that is not understood is refused, not ignored
    "coerce_one_of": False,  # oneOf is not the same as anyOf
}


class Constraint:
    """Where one sequence stands in its constraint. `Grammars.start` makes it.

    It is told every token of the text, the one that ends it included. Once the constraint allows nothing but the end of
    the text, masks contain the end tokens only; when one of them was accepted, `ended` is true, and the sequence is to
    be ended even if `ignore_eos` is set.
    """

    def __init__(self, matcher: Any, ends: frozenset[int], words: int) -> None:
        self._matcher, self._ends, self._words = matcher, ends, words
        self.ended = False
        self._only_ends = np.zeros(words, np.uint32)
        for token in ends:
            self._only_ends[token // 32] |= np.uint32(1 << (token % 32))

    @property
    def complete(self) -> bool:
        """Whether the text so far satisfies the constraint as it is."""
        return self.ended or self._matcher.is_accepting()

    def masks(self, drafts: Sequence[int] = ()) -> np.ndarray:
        """What may come next, and what after each of these drafts: int32 `[1 + drafts, ceil(V / 32)]`, a bit a token.

        Rows behind a draft that may not come allow all: they are never used. The constraint stays where it was.

        Raises:
            UsageError: the constraint has become too complex to follow.
        """
        masks = np.full((1 + len(drafts), self._words), -1, np.int32)
        consumed = 0
        for i in range(1 + len(drafts)):
            masks[i] = self._mask()
            if i == len(drafts) or drafts[i] in self._ends or not self._matcher.validate_tokens([drafts[i]]):
                break
            self._matcher.consume_token(drafts[i])
            consumed += 1
        if consumed:
            self._matcher.rollback(consumed)
        return masks

    def _mask(self) -> np.ndarray:
        if self.ended or self._matcher.is_stopped():
            self._check()
            return self._only_ends.view(np.int32)
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]
        self._check()
        return mask

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on by these tokens.

        Raises:
            UsageError: the constraint does not allow them, or has become too complex to follow.
        """
        for token in tokens:
            if token in self._ends and not self.ended and self._matcher.is_accepting():
                self.ended = True
            elif self.ended or not self._matcher.validate_tokens([token]):
                self._check()
                raise UsageError(f"Token {token} does not continue the constrained text.")
            else:
                self._matcher.consume_token(token)
                self._check()

    def rollback(self, count: int) -> None:
        """Go back by this many accepted tokens."""
        if self.ended and count:
            self.ended = False
            count -= 1
        if count:
            self._matcher.rollback(count)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UsageError(
                f"The constraint cannot be followed any further: {_reason(self._matcher.get_error())}.",
                remedy="simplify the schema, regular expression or grammar",
            )


class Grammars:
    """Compiles constraints for one model, and remembers them. Its methods may be called from any thread.

    Args:
        tokenizer: a fast tokenizer of transformers, a `tokenizers.Tokenizer`, or its JSON text.
        vocab: V, columns of the model's logits; at least the tokenizer's.
        end_ids: tokens that end a text; at least one.
        compile_s: seconds that one constraint may take.

    Raises:
        UsageError: llguidance is not installed, or cannot read the tokenizer, or there is no end token.
    """

    def __init__(self, tokenizer: Any, vocab: int, end_ids: Collection[int], compile_s: float = COMPILE_S) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise UsageError(
                "Constrained output needs the package llguidance, which is not installed.",
                remedy="pip install 'inferplane[constrained]'",
            ) from error
        self._ends = frozenset(i for i in end_ids if i < vocab)
        if not self._ends:
            raise UsageError("Constrained output needs to know the model's end-of-text token.", remedy="name it")
        self._vocab, self._compile_s = vocab, compile_s
        self._text = _tokenizer_text(tokenizer)
        try:
            self._tokenizer = llguidance.LLTokenizer(self._text, n_vocab=vocab, eos_token=sorted(self._ends))
        except ValueError as error:
            raise UsageError(f"llguidance cannot use this model's tokenizer: {error}.") from error
        self._llguidance: Any = llguidance
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._lock = threading.Lock()  # of what is known
        self._compiling = threading.Lock()  # of the trial
        self._known: OrderedDict[tuple[str, str], Any] = OrderedDict()  # a matcher, or a refusal and its end
        self._trial: Trial | None = None

    def start(self, params: SamplingParams) -> Constraint | None:
        """The constraint that the parameters ask for, at its beginning; None when they ask for none.

        Takes as long as compiling does, up to some seconds, unless the constraint is remembered.

        Raises:
            UsageError: the constraint is not valid, not supported, or too complex.
        """
        if params.constraint is None:
            return None
        found = self._remembered(params.constraint)
        if found is None:
            with self._compiling:
                found = self._remembered(params.constraint)  # somebody else may have been at it
                if found is None:
                    found = self._compile(*params.constraint)
                    with self._lock:
                        self._known[params.constraint] = found
                        if len(self._known) > KEPT_CONSTRAINTS:
                            self._known.popitem(last=False)
        if isinstance(found, tuple):
            kind = params.constraint[0]
            why = "no text fits it" if found[0] == NO_TEXT else found[0]
            if kind != "grammar":  # a place in a text that was made of it
                why = _PLACE.sub("", why)
            raise UsageError(f"The {kind} is refused: {why}.", remedy=_MENDED[kind])
        return Constraint(found.deep_copy(), self._ends, -(-self._vocab // 32))

    def close(self) -> None:
        """End the process in which constraints are tried out. A later `start` starts another."""
        with self._compiling:
            if self._trial is not None:
                self._trial.close()
                self._trial = None

    def _remembered(self, constraint: tuple[str, str]) -> Any:
        with self._lock:
            found = self._known.get(constraint)
            if isinstance(found, tuple) and found[1] < time.monotonic():
                del self._known[constraint]
                return None
            if found is not None:
                self._known.move_to_end(constraint)
            return found

    def _compile(self, kind: str, text: str) -> Any:
        """A matcher; or why there is none, and until when that holds on a monotonic clock."""
        make = self._llguidance.LLMatcher
        try:
            if kind == "json_schema":
                grammar = make.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
            else:
                grammar = (make.grammar_from_regex if kind == "regex" else make.grammar_from_lark)(text)
        except ValueError as problem:
            return _reason(str(problem)), math.inf
        if self._trial is None:
            setup = {"path": sys.path, "tokenizer": self._text, "vocab": self._vocab, "ends": sorted(self._ends)}
            self._trial = Trial(setup)
        error = self._trial.error(grammar, self._compile_s)
        if not self._trial.alive:
            self._trial = None
            return error, time.monotonic() + SLOW_KEPT_S
        if error:
            return _reason(error), math.inf
        matcher = _on_large_stack(lambda: make(self._tokenizer, grammar, log_level=0, limits=self._limits))
        return (_reason(matcher.get_error()), math.inf) if matcher.is_error() else matcher


def _tokenizer_text(tokenizer: Any) -> str:
    """A tokenizer as the JSON text that llguidance reads.

    Raises:
        UsageError: it is none that has such a text.
    """
    from tokenizers import Tokenizer

    if isinstance(tokenizer, str):
        return tokenizer
    fast = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(fast, Tokenizer):
        raise UsageError("Constrained output needs a fast tokenizer (a tokenizer.json).")
    copy = Tokenizer.from_str(fast.to_str())
    copy.no_padding()
    copy.no_truncation()
    return str(copy.to_str())


_stack_size = threading.Lock()


def _on_large_stack(work: Any) -> Any:
    """Run in a thread whose stack does not depend on the platform's default."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(work()), daemon=True)
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return result[0]


def _reason(error: str) -> str:
    """The first line of an error; and what is wrong with a regular expression, which stands in a line of its own."""
    first, *rest = error.strip().split("\n") or [""]
    wrong = next((line for line in rest if line.startswith("error: ")), "")
    shown = first.rstrip(":. ")[: 100 if wrong else 200]
    return f"{shown}: {wrong[7:].rstrip('.')[:100]}" if wrong else shown
