"""Compiles constraints: JSON that fits a schema, text that matches a regular expression or a grammar.

llguidance turns a constraint into a matcher, which computes the tokens allowed at each position of the text. The
matcher works on bytes, so it supports any byte-level tokenizer, and tokens that hold half a character.

JSON may have at most `MAX_SPACES` characters of white space in a row: some models otherwise emit it for ever.

Source: https://github.com/guidance-ai/llguidance, docs/syntax.md and docs/json_schema.md.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from inferplane.engine.request.constraint import Constraint, first_lines
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling.grammar_sandbox import GrammarSandbox
from inferplane.errors import UsageError

COMPILE_S = 2.0
"""Maximum seconds to compile one constraint."""
MAX_CACHED = 64
"""Maximum number of compiled and of rejected constraints in the cache."""
REJECT_TTL_S = 60.0
"""How long a timed-out constraint stays on the reject list before it is tried again: the machine may have been busy."""
NO_TEXT = "NoExtensionBias"
"""llguidance's error for a grammar that no token can begin."""
_POSITION = re.compile(r"^at \d+\(\d+\):\s*")
_MENDED = {
    "json_schema": "mend the schema; llguidance's docs/json_schema.md lists what is supported",
    "regex": "mend the expression; it is in the syntax of Rust's crate regex",
    "grammar": "mend the grammar; its syntax is in llguidance's docs/syntax.md",
}
STACK_BYTES = 64 * 2**20
"""Stack on which constraints are compiled: well above the sandbox's, in which they were compiled first."""
MAX_SPACES = 40
JSON_OPTIONS = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_SPACES}}}",
    "lenient": False,  # a keyword that is not understood is refused, not ignored
    "coerce_one_of": False,  # oneOf is not the same as anyOf
}


class Grammars:
    """Compiles constraints for one model, and caches them. Its methods may be called from any thread.

    Args:
        tokenizer: a fast tokenizer of transformers, a `tokenizers.Tokenizer`, or its JSON text.
        vocab: V, columns of the model's logits; at least the tokenizer's.
        end_ids: tokens that end a text; at least one.
        compile_s: maximum seconds to compile one constraint.

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
        self._end_ids = frozenset(i for i in end_ids if i < vocab)
        if not self._end_ids:
            raise UsageError("Constrained output needs to know the model's end-of-text token.", remedy="name it")
        self._vocab, self._compile_s = vocab, compile_s
        self._text = _tokenizer_text(tokenizer)
        try:
            self._tokenizer = llguidance.LLTokenizer(self._text, n_vocab=vocab, eos_token=sorted(self._end_ids))
        except ValueError as error:
            raise UsageError(f"llguidance cannot use this model's tokenizer: {error}.") from error
        self._llguidance: Any = llguidance
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._lock = threading.Lock()  # guards the cache
        self._compiling = threading.Lock()  # guards the sandbox
        self._cache: OrderedDict[tuple[str, str], Any] = OrderedDict()  # a matcher, or an error and when it expires
        self._sandbox: GrammarSandbox | None = None

    def start(self, params: SamplingParams) -> Constraint | None:
        """The initial state of the constraint in the parameters, for one sequence; None when they hold none.

        Compiling takes up to some seconds, unless the constraint is in the cache; one is compiled at a time, and other
        callers wait. The first call starts the sandbox process. Rejected constraints are cached too.

        Raises:
            UsageError: the constraint is not valid, not supported, or too complex.
        """
        if params.constraint is None:
            return None
        found = self._cached(params.constraint)
        if found is None:
            with self._compiling:
                found = self._cached(params.constraint)  # another thread may have compiled it meanwhile
                if found is None:
                    found = self._compile(*params.constraint)
                    with self._lock:
                        self._cache[params.constraint] = found
                        if len(self._cache) > MAX_CACHED:
                            self._cache.popitem(last=False)
        if isinstance(found, tuple):
            kind = params.constraint[0]
            why = "no text fits it" if found[0] == NO_TEXT else found[0]
            if kind != "grammar":  # the position refers to a grammar that was made of it
                why = _POSITION.sub("", why)
            raise UsageError(f"The {kind} is refused: {why}.", remedy=_MENDED[kind])
        return Constraint(found.deep_copy(), self._end_ids, -(-self._vocab // 32))

    def close(self) -> None:
        """End the sandbox process, waiting for a compilation that runs. A later `start` starts another."""
        with self._compiling:
            if self._sandbox is not None:
                self._sandbox.close()
                self._sandbox = None

    def _cached(self, constraint: tuple[str, str]) -> Any:
        """The cached matcher of a constraint, or its error and when that expires; None if there is none, or if it
        expired.
        """
        with self._lock:
            found = self._cache.get(constraint)
            if isinstance(found, tuple) and found[1] < time.monotonic():
                del self._cache[constraint]
                return None
            if found is not None:
                self._cache.move_to_end(constraint)
            return found

    def _compile(self, kind: str, text: str) -> Any:
        """Compile a constraint, first in the sandbox: a matcher, or the error and the monotonic time at which it
        expires.
        """
        make = self._llguidance.LLMatcher
        try:
            if kind == "json_schema":
                grammar = make.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
            else:
                grammar = (make.grammar_from_regex if kind == "regex" else make.grammar_from_lark)(text)
        except ValueError as problem:
            return first_lines(str(problem)), math.inf
        if self._sandbox is None:
            setup = {"path": sys.path, "tokenizer": self._text, "vocab": self._vocab, "ends": sorted(self._end_ids)}
            self._sandbox = GrammarSandbox(setup)
        error = self._sandbox.error(grammar, self._compile_s)
        if not self._sandbox.alive:
            self._sandbox = None
            return error, time.monotonic() + REJECT_TTL_S
        if error:
            return first_lines(error), math.inf
        matcher = _on_large_stack(lambda: make(self._tokenizer, grammar, log_level=0, limits=self._limits))
        return (first_lines(matcher.get_error()), math.inf) if matcher.is_error() else matcher


def _tokenizer_text(tokenizer: Any) -> str:
    """The JSON text of a tokenizer, which llguidance reads.

    Raises:
        UsageError: the tokenizer has no such text.
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
    """Run `work` in a thread with a stack of `STACK_BYTES`, whatever the platform's default is; waits, and returns its
    result.
    """
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
