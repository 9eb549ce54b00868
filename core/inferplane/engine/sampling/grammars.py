"""Compiles constraints: JSON that fits a schema, text that matches a regular expression or a grammar.

llguidance turns a constraint into a matcher, which computes the tokens allowed at each position of the text. The
matcher works on bytes, so it supports any byte-level tokenizer, and tokens that hold half a character.

JSON may have at most `MAX_SPACES` characters of white space in a row: some models otherwise emit it for ever.

A matcher's lexer grows with the texts it follows, and `deep_copy` shares it: the growth would stay as long as any copy,
and one sequence could use up the states of another. So every sequence has a matcher of its own, whose memory goes with
it, and the cache remembers only which constraints compile. `grammar_check.LIMITS` bounds one matcher.

Source: https://github.com/guidance-ai/llguidance, docs/syntax.md and docs/json_schema.md.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from inferplane.engine.request.constraint import GrammarConstraint, first_lines
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling.grammar_check import LIMITS
from inferplane.engine.sampling.grammar_sandbox import GrammarSandbox
from inferplane.engine.sampling.grammar_tokens import TextTokens
from inferplane.errors import UsageError, install_hint, sentence

COMPILE_S = 2.0
"""Maximum seconds to compile one constraint."""
MAX_CACHED = 1024
"""Maximum number of accepted and of rejected constraints that are remembered, each in some hundred bytes."""
REJECT_TTL_S = 60.0
"""How long a timed-out constraint stays on the reject list before it is tried again: the machine may have been busy."""
TOO_COMPLEX = re.compile(r"too (complex|many|large|big|deeply)|more than \d+ MiB|longer than [\d.]+ seconds", re.I)
"""What errors about a constraint that is valid, but exceeds a limit, have in common."""
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


_Verdict = tuple[str, float]
"""The error of a constraint, or "" if it compiles, and the monotonic time at which that expires."""


class Grammars:
    """Compiles constraints for one model, and remembers which compile. Its methods may be called from any thread.

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
                remedy=install_hint("constrained"),
            ) from error
        self._end_ids = frozenset(i for i in end_ids if i < vocab)
        if not self._end_ids:
            raise UsageError("Constrained output needs to know the model's end-of-text token.", remedy="name it")
        self._vocab, self._compile_s = vocab, compile_s
        self._text = _tokenizer_text(tokenizer)
        try:
            end_ids = sorted(self._end_ids)
            own = llguidance.LLTokenizer(self._text, n_vocab=vocab, eos_token=end_ids)
            tokens: Any = TextTokens(own, self._text, end_ids)
            self._tokenizer = llguidance.LLTokenizer(tokens, n_vocab=vocab, eos_token=end_ids)
        except ValueError as error:
            raise UsageError(
                f"llguidance cannot use this model's tokenizer: {error}.", remedy="ask for text without a constraint"
            ) from error
        self._llguidance: Any = llguidance
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._lock = threading.Lock()  # guards the cache
        self._compiling = threading.Lock()  # guards the sandbox
        self._cache: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._sandbox: GrammarSandbox | None = None

    def start(self, params: SamplingParams) -> GrammarConstraint | None:
        """The initial state of the constraint in the parameters, for one sequence; None when they hold none. Otherwise
        as `start_grammar`.
        """
        if params.constraint is None:
            return None
        return self.start_grammar(*params.constraint)

    def start_grammar(self, kind: str, text: str, name: str = "") -> GrammarConstraint:
        """The initial state of a constraint, for one sequence.

        A constraint that is not remembered is tried out first, which takes up to some seconds; one is tried at a time,
        and other callers wait. The first call starts the sandbox process. Rejected constraints are remembered too.

        Args:
            kind: "json_schema", "regex" or "grammar".
            text: the constraint.
            name: of the constraint, for the error; "": "The" and its kind.

        Raises:
            UsageError: the constraint is not valid, not supported, or too complex.
        """
        key = hashlib.sha256(f"{kind}:{text}".encode(errors="surrogatepass")).digest()
        verdict = self._find_cached(key)
        if verdict is None:
            with self._compiling:
                verdict = self._find_cached(key)  # another thread may have tried it meanwhile
                if verdict is None:
                    verdict = self._compile(kind, text)
                    with self._lock:
                        self._cache[key] = verdict
                        if len(self._cache) > MAX_CACHED:
                            self._cache.popitem(last=False)
        error = verdict[0]
        if not error:
            grammar = self._grammar(kind, text)
            make = self._llguidance.LLMatcher
            matcher = _on_large_stack(lambda: make(self._tokenizer, grammar, log_level=0, limits=self._limits))
            error = first_lines(matcher.get_error())
            if not error:
                return GrammarConstraint(matcher, self._end_ids, self.words)
        why, name = "no text fits it" if error == NO_TEXT else error, name or f"The {kind}"
        if kind != "grammar":  # the position refers to a grammar that was made of it
            why = _POSITION.sub("", why)
        if TOO_COMPLEX.search(why):
            raise UsageError(sentence(f"{name} is refused as too complex: {why}"), remedy=f"simplify the {kind}")
        raise UsageError(sentence(f"{name} is refused: {why}"), remedy=_MENDED[kind])

    @property
    def words(self) -> int:
        """Length of a mask: a bit per token, in integers of 32 bits."""
        return -(-self._vocab // 32)

    def close(self) -> None:
        """End the sandbox process, waiting for a compilation that runs. A later `start` starts another."""
        with self._compiling:
            if self._sandbox is not None:
                self._sandbox.close()
                self._sandbox = None

    def _find_cached(self, key: bytes) -> _Verdict | None:
        """What is remembered of a constraint; None if there is nothing, or if it expired."""
        with self._lock:
            found = self._cache.get(key)
            if found is not None and found[1] < time.monotonic():
                del self._cache[key]
                return None
            if found is not None:
                self._cache.move_to_end(key)
            return found

    def _grammar(self, kind: str, text: str) -> str:
        """A constraint as llguidance's grammar; ValueError if it is none."""
        make = self._llguidance.LLMatcher
        if kind == "json_schema":
            return str(make.grammar_from_json_schema(text, overrides=JSON_OPTIONS))
        return str((make.grammar_from_regex if kind == "regex" else make.grammar_from_lark)(text))

    def _compile(self, kind: str, text: str) -> _Verdict:
        """Compile a constraint in the sandbox, and forget the result: only whether it compiles is of interest."""
        try:
            grammar = self._grammar(kind, text)
        except ValueError as problem:
            return first_lines(str(problem)), math.inf
        if self._sandbox is None:
            setup = {"path": sys.path, "tokenizer": self._text, "vocab": self._vocab, "ends": sorted(self._end_ids)}
            self._sandbox = GrammarSandbox(setup)
        error = self._sandbox.error(grammar, self._compile_s)
        if not self._sandbox.alive:
            self._sandbox = None
            return error, time.monotonic() + REJECT_TTL_S
        return first_lines(error), math.inf


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
        raise UsageError(
            "Constrained output needs a fast tokenizer.", remedy="add the model's tokenizer.json to its folder"
        )
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
