"""What the request formats have in common: strict JSON, fields with exact ranges, errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from inferplane.engine.params import (
    MOST_BIASES,
    MOST_LOGPROBS,
    MOST_SEQUENCES,
    MOST_STOP_CHARACTERS,
    MOST_STOP_TOKEN_IDS,
    MOST_STOPS,
)
from inferplane.serving.errors import invalid

ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"
MAX_TOKEN_ID = 2**31 - 1
MAX_TOKENS = 2**31 - 1
FORMS = "One of these: "
"""How the description of a field begins that may have several forms; an error then names them all."""
SMALLEST_TOP_P = 1e-6
"""What a top_p of 0 means: the likeliest token alone."""

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
Stops = Annotated[list[Stop], Field(max_length=MOST_STOPS)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Alternatives = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Timeout = Annotated[float, Field(gt=0)]
"""Seconds for a whole request; never more than the server's."""
BiasKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]  # one spelling each: two biases of one token
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


CONSTRAINTS = (
    *("response_format", "regex", "grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("structured_outputs", "json_schema", "ebnf"),
)
"""What a text may be constrained by, in the words of one server or another: never ignored."""
PASSED = (
    *("temperature", "seed", "frequency_penalty", "presence_penalty", "top_k", "min_p", "repetition_penalty"),
    *("min_tokens", "ignore_eos", "stop_token_ids", "stop"),
)
"""Fields that the engine knows under the same names."""


class Body(BaseModel):
    """A request's body. Fields it does not know are accepted, and named in a header of the answer."""

    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=False, protected_namespaces=())


class JsonObject(BaseModel):
    """An object inside a body, or an answer."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True, protected_namespaces=())


class StreamOptions(JsonObject):
    """What a stream brings beside text."""

    include_usage: bool | None = None


class SamplingFields(Body):
    """How tokens are chosen; the same fields in every OpenAI format, and those other servers add."""

    model: str | None = Field(None, max_length=4096)
    n: Annotated[int, Field(ge=1, le=MOST_SEQUENCES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Stops | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MOST_BIASES)] | None = None
    user: str | None = Field(None, max_length=4096)
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_TOKEN_IDS)] | None = None
    timeout: Timeout | None = Field(None, description="Seconds for the whole request.")
    return_token_ids: bool | None = Field(None, description="Also return the ids of the generated tokens.")

    def sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams` that were given, 0 and false among them."""
        out = {name: value for name in PASSED if (value := getattr(self, name)) is not None}
        if self.top_p is not None:
            out["top_p"] = max(self.top_p, SMALLEST_TOP_P)
        if self.logit_bias:
            out["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return out

    def check_consistency(self) -> None:
        """ApiError 400 for fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is for streams; pass stream = true.", "stream_options")

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Usage(JsonObject):
    """Tokens in and out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class ErrorObject(JsonObject):
    """What went wrong: for a person, for a program, and which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(JsonObject):
    """OpenAI's error."""

    error: ErrorObject


Model = TypeVar("Model", bound=BaseModel)


def parse(body: bytes) -> dict[str, Any]:
    """A body as a JSON object.

    Raises:
        ApiError: it is none. NaN, infinities, invalid UTF-8, lone surrogates and too deep nesting are no JSON.
    """
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {str(error)[:200]}.", None, "invalid_json") from error
    if not isinstance(data, dict):
        raise invalid("The body is not a JSON object.", None, "invalid_json")
    return data


def validate(model: type[Model], data: Mapping[str, Any]) -> Model:
    """A body as its format; ApiError 400 that names the first field that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as errors:
        first, param = _most_telling(errors, data)
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
        said = "it is required" if first["type"] == "missing" else first["msg"].removeprefix("Value error, ")
        field = model.model_fields.get(str(first["loc"][0])) if first["loc"] else None
        if field is not None and "not supported" in (field.description or "").lower():  # says more than its type
            said = str(field.description).rstrip(".")
        elif field is not None and param in model.model_fields and (field.description or "").startswith(FORMS):
            forms = str(field.description).removeprefix(FORMS).rstrip(".")
            said = f"{said}: {forms}" if code == "missing_required_parameter" else f"it is none of these: {forms}"
        raise invalid(f"{param or 'The body'}: {said}.", param, code) from errors


def _most_telling(errors: ValidationError, data: Any) -> tuple[Any, str | None]:
    """Of the alternatives for the first wrong field the one that comes furthest into it, and its path."""
    found = errors.errors(include_url=False, include_context=False, include_input=False)
    same = [e for e in found if e["loc"][:1] == found[0]["loc"][:1]]
    paths = [path_of(e["loc"], data, missing=e["type"] == "missing") for e in same]
    deepest = max(range(len(same)), key=lambda i: (len(re.findall(r"[.[]", paths[i] or "")), -i))
    firsts: dict[tuple[str, ...], int] = {}  # of each alternative, the first thing that is wrong
    for i, e in enumerate(same):
        if _form(paths[i]) == _form(paths[deepest]):
            firsts.setdefault(tuple(s for s in e["loc"] if isinstance(s, str)), i)

    def telling(i: int) -> tuple[list[int], bool, int]:
        of_its_kind = not same[i]["type"].endswith("_type")  # else it is compared with what it was not meant as
        return [int(s) for s in re.findall(r"\[(\d+)\]", paths[i] or "")], of_its_kind, -i

    best = max(firsts.values(), key=telling)
    return same[best], paths[best]


def _form(path: str | None) -> str:
    """A path without the numbers in it."""
    return re.sub(r"\[\d+\]", "[]", path or "")


def path_of(loc: tuple[int | str, ...], data: Any, *, missing: bool = False) -> str | None:
    """A place as a client writes it (`messages[0].content`), without what a validator adds for alternatives."""
    out, here = "", data
    for i, step in enumerate(loc):
        last = i == len(loc) - 1
        if isinstance(step, int):
            if isinstance(here, list) and step < len(here):
                out, here = f"{out}[{step}]", here[step]
        elif isinstance(here, Mapping) and (step in here or (missing and last)):
            out, here = f"{out}.{step}" if out else step, here.get(step)
    return out or None


def unknown_fields(body: Body) -> list[str]:
    """Top-level fields that the format does not know."""
    return sorted(body.model_extra or ())
