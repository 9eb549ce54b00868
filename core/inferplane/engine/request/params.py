"""`SamplingParams`: how the tokens of a request are chosen, and when it stops. Without torch."""

from __future__ import annotations

import functools
import inspect
import json
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Real
from typing import Any, ParamSpec, TypeVar

from inferplane.dialogue.schema_dialects import modernize
from inferplane.engine.request.fields import (
    MAX_COUNT,
    MAX_GRAMMAR_BYTES,
    MAX_MARK_CHARACTERS,
    MAX_STRUCTURAL_TAGS,
    MAX_TAG_GRAMMARS_BYTES,
    MAX_VISIBLE_TOKENS,
    ReasoningSpan,
    StructuralTag,
    are_tags,
    are_texts,
    as_tuple,
    describe_value,
    is_integer,
    is_number,
    is_text,
)
from inferplane.engine.request.other_engines import advice
from inferplane.errors import UsageError, deprecation_message

P = ParamSpec("P")
R = TypeVar("R")

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this count as 0: the most likely token is chosen."""
MAX_TEMPERATURE = 1e6
"""Above this the probabilities of a model's tokens no longer differ in float32, in which they are computed."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
"""Logits that are divided or multiplied by these are finite in float32."""
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
"""Seeds are signed 64-bit integers in messages and tensors: beyond, two seeds would be one."""
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 1024
MAX_SEQUENCES = 128
MAX_LOGPROBS = 20
POOLINGS = ("last", "mean")
BEYOND_LIMITS = "The constraint cannot be followed any further"
"""Begins the error of a sequence whose constraint exceeds a limit while it runs; the server tells it by these words."""

OLD_ATTRIBUTES = {"cuts": "filters"}
"""Names of attributes until 0.2 -> present names."""


def check_keywords(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function or method: unknown keyword arguments raise a UsageError in place of a TypeError.

    The error names the argument that was probably meant; for a field of `SamplingParams`, how to pass it.
    """
    known = {
        name: p for name, p in inspect.signature(call).parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD
    }
    names = [name for name, p in known.items() if name != "self" and p.kind is not inspect.Parameter.POSITIONAL_ONLY]

    @functools.wraps(call)
    def checked(*args: P.args, **more: P.kwargs) -> R:
        for name in more:
            if name not in known:
                raise unknown_keyword(
                    call.__qualname__.removesuffix(".__init__"), name, more[name], names, advice(name)
                )
        return call(*args, **more)

    return checked


def unknown_keyword(call: str, name: str, value: Any, known: Sequence[str], advice: str = "") -> UsageError:
    """The error, to be raised by the caller, for a keyword argument that a call does not take. It names the keyword
    that was probably meant.

    Args:
        call: the call's name. name: the keyword. value: what was passed. known: the keywords that the call takes.
        advice: what to do if it is no parameter of sampling; "": pass the keyword that it resembles.
    """
    close = get_close_matches(name, known, n=1)
    if call != SamplingParams.__name__ and name in {f.name for f in fields(SamplingParams)}:
        where = "" if "params" in known else " of generate, stream or chat"
        remedy = f"pass params{where}: params=SamplingParams({name}={value!r})"
    else:
        remedy = advice or (f"perhaps {close[0]} was meant" if close else "")
    return UsageError(f"{call} takes no {name}.", there_is=", ".join(known), remedy=remedy)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop. The names are those users know from other engines.

    Logits are changed in this order, which is that of transformers: repetition_penalty, frequency_penalty and
    presence_penalty, logit_bias, min_tokens, the constraint, temperature, top_k, top_p, min_p.

    Args:
        max_tokens: maximum number of tokens to generate, at least 1.
        temperature: 0 takes the most likely token each time; larger is more random; at most 10^6.
        top_p: keep the most likely tokens that together reach this probability, in (0, 1].
        top_k: keep this many of the most likely tokens; 0 keeps all.
        min_p: keep tokens with at least this share of the most likely token's probability, in [0, 1].
        seed: equal seeds give equal tokens whatever else is in the batch; None draws a fresh seed. From
            -2^63 to 2^63 - 1.
        stop: a string or strings that end the text; they are not part of it. At most 16 of at most 256 characters. Held
            as a tuple.
        stop_token_ids: token ids that end the text, beside the model's own. Held as a tuple.
        ignore_eos: do not end at the model's end-of-text tokens.
        min_tokens: end-of-text tokens cannot be chosen before this many tokens, unless a constraint allows nothing
            else.
        repetition_penalty: tokens of the prompt and of the text so far have a positive logit divided by this and a
            negative one multiplied; above 1 discourages repetition, 1 changes nothing; 10^-6 to 10^6.
        frequency_penalty: taken from a token's logit for each time it was generated, -2 to 2.
        presence_penalty: taken from a token's logit when it was generated at all, -2 to 2.
        logit_bias: token id -> what is added to its logit, -100 to 100; at most 1024 entries.
        logprobs: also return the log-probability of each generated token and of this many most likely ones, 0 to 20;
            None returns none. They are the model's own, before anything above has changed its logits.
        prompt_logprobs: the same for the tokens of the prompt.
        pooling: also return the prompt's hidden states after the final norm, pooled to one vector: "last" takes the
            last token's, "mean" the mean of all; None returns none.
        n: sequences to generate for the prompt, 1 to 128; each draws its own random numbers.
        json_schema: the text is JSON that this schema accepts: a schema as a mapping or as JSON text. Kept as JSON text
            of at most 64 KiB.
        regex: the whole text matches this regular expression (Rust's syntax), at most 4 KiB.
        grammar: the text belongs to this context-free grammar (llguidance's dialect of Lark), at most 64 KiB.
        timeout_s: seconds from arrival after which the request is ended; None waits for ever.
        reasoning: how the model writes its thought before the answer: a `ReasoningSpan`, or a mapping of its fields.
            Its tokens are counted, it may be limited, and a constraint begins after it. None: all text is answer.
        structural_tags: parts of the text that belong to a grammar from a trigger on, such as calls of tools: each a
            `StructuralTag`, or a mapping of its fields; at most 64. Held as a tuple.
        visible_tokens: special tokens, as the tokenizer spells them, that stay in the text; others are left out of it.
            Those that the tokenizer does not have change nothing. At most 256. Held as a tuple.

    Raises:
        UsageError: a value lies outside its range, or more than one of json_schema, regex, grammar and structural_tags
            is given.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: int | Sequence[int] | None = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: str | None = None
    n: int = 1
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    timeout_s: float | None = None
    reasoning: ReasoningSpan | None = None
    structural_tags: Sequence[StructuralTag] = ()
    visible_tokens: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, convert in _CONVERTED:
            self._set(name, convert, getattr(self, name))
        for names, convert in ((_FLOATS, _plain), (_INTEGERS, plain_integer)):
            for name in names:
                self._set(name, convert, getattr(self, name))
        if isinstance(self.top_k, int) and self.top_k == -1:  # another common spelling of "all"
            object.__setattr__(self, "top_k", 0)
        if self.json_schema is not None:
            self._set("json_schema", _json_text, self.json_schema)
        for name, holds, rule in _CHECKS:
            try:
                ok = holds(getattr(self, name), self)
            except TypeError:  # a word where a number belongs, and the like
                ok = False
            if not ok:
                raise UsageError(
                    f"SamplingParams: {name} = {describe_value(getattr(self, name))}.", there_is=f"values {rule}"
                )
        given = [name for name in MAX_GRAMMAR_BYTES if getattr(self, name) is not None]
        given += ["structural_tags"] if self.structural_tags else []
        if len(given) > 1:
            raise UsageError(f"SamplingParams: {' and '.join(given)} together.", remedy="pass one constraint")

    def _set(self, name: str, convert: Callable[[Any], Any], value: Any) -> None:
        """Set a field to `convert(value)`; UsageError if that cannot be converted."""
        try:
            object.__setattr__(self, name, convert(value))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise UsageError(
                f"SamplingParams: {name} = {describe_value(value)} ({error}).", remedy="see SamplingParams for its form"
            ) from error

    @property
    def penalizes(self) -> bool:
        """Whether one of the penalties is on, so that logits depend on which tokens came before."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p can remove a token."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether a token is the argmax of the model's own logits and nothing else is returned; a constraint and
        `min_tokens` may still forbid it, and are not considered here.
        """
        is_greedy = self.temperature < MAX_GREEDY_TEMPERATURE
        return is_greedy and self.logprobs is None and not self.logit_bias and not self.penalizes

    @property
    def constraint(self) -> tuple[str, str] | None:
        """The constraint as a pair, ("json_schema", "regex" or "grammar", its text), or None."""
        for name in MAX_GRAMMAR_BYTES:
            text = getattr(self, name)
            if text is not None:
                return name, text
        return None

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar has to be compiled for it, which may take seconds."""
        return self.constraint is not None or bool(self.structural_tags)

    @property
    def without_grammars(self) -> SamplingParams:
        """The same parameters without a constraint and without structural tags."""
        return replace(self, json_schema=None, regex=None, grammar=None, structural_tags=())

    def check_ids(self, vocab: int) -> None:
        """Check the token ids that the fields name against a model.

        Args:
            vocab: number of token ids of the model.

        Raises:
            UsageError: an id in stop_token_ids or logit_bias is not below it.
        """
        for name, ids in (("stop_token_ids", _several(self.stop_token_ids)), ("logit_bias", self.logit_bias)):
            bad = [i for i in ids if i >= vocab]
            if bad:
                raise UsageError(f"SamplingParams: {name} names token {bad[0]}.", there_is=f"ids 0 to {vocab - 1}")


def _read_old(old: str, new: str, params: SamplingParams) -> Any:
    warnings.warn(deprecation_message(old, new), DeprecationWarning, stacklevel=2)
    return getattr(params, new)


SamplingParams.__init__ = check_keywords(SamplingParams.__init__)  # type: ignore[method-assign]
for _old, _new in OLD_ATTRIBUTES.items():
    setattr(SamplingParams, _old, property(functools.partial(_read_old, _old, _new)))


def _several(value: Any) -> tuple[Any, ...]:
    """A tuple of None (empty), one or several values."""
    value = () if value is None else plain_integer(value)
    return (value,) if isinstance(value, (str, int)) else tuple(map(plain_integer, value))


def _dict(value: Any) -> dict[Any, Any]:
    return {plain_integer(i): _plain(bias) for i, bias in dict(value or {}).items()}


def plain_integer(value: Any) -> Any:
    """An integer of another library (NumPy's, torch's) as an int; anything else, bools included, as it is."""
    if isinstance(value, int) or "bool" in str(getattr(value, "dtype", "")):  # torch takes its bools for integers
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def _plain(value: Any) -> Any:
    """A number of another library (NumPy's, a fraction) as a float, since it is sent to the engine as one."""
    return float(value) if isinstance(value, Real) and not isinstance(value, int) else value


def _json_text(value: Any) -> str:
    """A schema as JSON text; the order of its keys is kept, for it decides the order in the output.

    Raises:
        ValueError, TypeError, RecursionError: it is not JSON, or not an object (true stands for one that allows all).
    """
    if isinstance(value, str) and len(value) > MAX_GRAMMAR_BYTES["json_schema"]:
        raise ValueError(f"more than {MAX_GRAMMAR_BYTES['json_schema']} bytes")
    parsed = json.loads(value) if isinstance(value, str) else value
    if parsed is True:
        return "{}"
    if not isinstance(parsed, Mapping):
        raise ValueError("a schema is an object, or true; nothing fits false")
    return json.dumps(modernize(parsed), ensure_ascii=False, allow_nan=False)


def _is_count(value: Any) -> bool:
    return value is None or is_integer(value, 0, MAX_LOGPROBS)


def _are_biases(biases: Mapping[Any, Any]) -> bool:
    """Whether a mapping is a valid `logit_bias`: few enough entries, token id -> -100 to 100."""
    return len(biases) <= MAX_BIASES and all(
        is_integer(i, 0, MAX_COUNT) and is_number(b) and -100 <= b <= 100 for i, b in biases.items()
    )


def _between(low: float, high: float) -> Callable[[Any, Any], bool]:
    """A check that a field is a number from `low` to `high`."""
    return lambda value, p: is_number(value) and low <= value <= high


_CONVERTED: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("stop", _several),
    ("stop_token_ids", _several),
    ("logit_bias", _dict),
    ("reasoning", ReasoningSpan.of),
    ("structural_tags", StructuralTag.several),
    ("visible_tokens", as_tuple),
)
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "timeout_s")
_INTEGERS = ("max_tokens", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs", "n")
_ABOVE_0 = math.ulp(0.0)
_STOPS = f"of at most {MAX_STOPS} strings of at most {MAX_STOP_CHARACTERS} characters"
_TAGS = (
    f"of at most {MAX_STRUCTURAL_TAGS} tags with different triggers, whose grammars have at most "
    f"{MAX_TAG_GRAMMARS_BYTES} bytes together"
)
_NAMES = f"of at most {MAX_VISIBLE_TOKENS} strings of 1 to {MAX_MARK_CHARACTERS} characters"

# Field; `(value, params) -> bool`; what there is. A value of another type makes its check raise TypeError, which counts
# as out of range.
_CHECKS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("max_tokens", lambda n, p: is_integer(n, 1, MAX_COUNT), f"from 1 to {MAX_COUNT}"),
    ("temperature", _between(0, MAX_TEMPERATURE), f"from 0 to {MAX_TEMPERATURE:g}"),
    ("top_p", _between(_ABOVE_0, 1), "above 0 and at most 1"),
    ("top_k", lambda n, p: is_integer(n, 0, MAX_COUNT), f"from 0 (all) to {MAX_COUNT}"),
    ("min_p", _between(0, 1), "from 0 to 1"),
    ("ignore_eos", lambda flag, p: isinstance(flag, bool), "True and False"),
    ("min_tokens", lambda n, p: is_integer(n, 0, p.max_tokens), "from 0 to max_tokens"),
    ("seed", lambda n, p: n is None or is_integer(n, MIN_SEED, MAX_SEED), "from -2^63 to 2^63 - 1, or None"),
    ("stop", lambda stops, p: all(isinstance(s, str) and s for s in stops), "of non-empty strings"),
    ("stop", lambda stops, p: len(stops) <= MAX_STOPS and all(len(s) <= MAX_STOP_CHARACTERS for s in stops), _STOPS),
    ("stop_token_ids", lambda ids, p: all(is_integer(i, 0, MAX_COUNT) for i in ids), "of token ids"),
    ("stop_token_ids", lambda ids, p: len(ids) <= MAX_STOP_TOKEN_IDS, f"of at most {MAX_STOP_TOKEN_IDS} token ids"),
    (
        "repetition_penalty",
        _between(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g} (1 changes nothing)",
    ),
    ("frequency_penalty", _between(-2, 2), "from -2 to 2"),
    ("presence_penalty", _between(-2, 2), "from -2 to 2"),
    ("logit_bias", lambda biases, p: _are_biases(biases), f"of at most {MAX_BIASES} entries, token id -> -100 to 100"),
    ("logprobs", lambda n, p: _is_count(n), f"from 0 to {MAX_LOGPROBS}, or None"),
    ("prompt_logprobs", lambda n, p: _is_count(n), f"from 0 to {MAX_LOGPROBS}, or None"),
    ("pooling", lambda word, p: word in (None, *POOLINGS), f"of None, {', '.join(POOLINGS)}"),
    ("n", lambda n, p: is_integer(n, 1, MAX_SEQUENCES), f"from 1 to {MAX_SEQUENCES}"),
    *(
        (name, lambda text, p, most=most: is_text(text, most), f"of 1 to {most} bytes of text")
        for name, most in MAX_GRAMMAR_BYTES.items()
    ),
    ("structural_tags", lambda tags, p: are_tags(tags), _TAGS),
    ("visible_tokens", lambda names, p: are_texts(names, MAX_VISIBLE_TOKENS), _NAMES),
    ("timeout_s", lambda s, p: s is None or (is_number(s) and s > 0), "above 0 (in seconds), or None"),
)


GREEDY = SamplingParams(temperature=0.0)
