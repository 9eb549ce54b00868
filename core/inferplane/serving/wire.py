"""What all request formats share: strict JSON, fields with exact ranges, errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from inferplane.engine.request.params import (
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_SEQUENCES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from inferplane.serving.errors import invalid

ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"
MAX_TOKEN_ID = 2**31 - 1
MAX_TOKENS = 2**31 - 1
FORMS = "One of these: "
"""Begins the description of a field that may have several forms; an error then lists them all."""
MIN_TOP_P = 1e-6
"""The meaning of top_p 0: the most likely token only."""

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Timeout = Annotated[float, Field(gt=0)]
"""Seconds for a whole request; never more than the server's limit."""
BiasKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]  # one spelling per token
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


CONSTRAINTS = (
    *("response_format", "regex", "grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("structured_outputs", "json_schema", "ebnf"),
)
"""Fields that constrain the text, under the names of this and other servers: they are never ignored."""
SAME_NAMES = (
    *("temperature", "seed", "frequency_penalty", "presence_penalty", "top_k", "min_p", "repetition_penalty"),
    *("min_tokens", "ignore_eos", "stop_token_ids", "stop"),
)
"""Fields that have the same names in the engine."""


class RequestBody(BaseModel):
    """The body of a request. Unknown fields are accepted and named in a header of the answer."""

    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=False, protected_namespaces=())


class JsonObject(BaseModel):
    """An object inside a request's body, or inside an answer."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True, protected_namespaces=())


class StreamOptions(JsonObject):
    """What a stream contains beside text."""

    include_usage: bool | None = None


class SamplingFields(RequestBody):
    """How tokens are sampled: the fields that all OpenAI formats have, and those that other servers add."""

    model: str | None = Field(None, max_length=4096)
    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Stops | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASES)] | None = None
    user: str | None = Field(None, max_length=4096)
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    timeout: Timeout | None = Field(None, description="Seconds for the whole request.")
    return_token_ids: bool | None = Field(None, description="Also return the ids of the generated tokens.")

    def sampling_fields(self) -> dict[str, Any]:
        """Return the given fields of `SamplingParams`, including those that are 0 or false."""
        out = {name: value for name in SAME_NAMES if (value := getattr(self, name)) is not None}
        if self.top_p is not None:
            out["top_p"] = max(self.top_p, MIN_TOP_P)
        if self.logit_bias:
            out["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return out

    def check_consistency(self) -> None:
        """Raise ApiError 400 if fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is for streams; pass stream = true.", "stream_options")

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Usage(JsonObject):
    """Tokens in and out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class GeneratedResponse(JsonObject):
    """What all of OpenAI's answers with generated text contain."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ErrorObject(JsonObject):
    """An error: a message, a code for programs, and the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(JsonObject):
    """OpenAI's error."""

    error: ErrorObject


Model = TypeVar("Model", bound=BaseModel)


def parse(body: bytes) -> dict[str, Any]:
    """Return a body as a JSON object.

    Raises:
        ApiError: it is not one. NaN, infinities, invalid UTF-8, lone surrogates and too deep nesting are not JSON.
    """
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {str(error)[:200]}.", None, "invalid_json") from error
    if not isinstance(data, dict):
        raise invalid("The body is not a JSON object.", None, "invalid_json")
    return data


def validate(model: type[Model], data: Mapping[str, Any]) -> Model:
    """Return a body as an instance of its format; raise ApiError 400 that names the first wrong field."""
    try:
        return model.model_validate(data)
    except ValidationError as errors:
        first, param = _best_error(errors, data)
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
        reason = "it is required" if first["type"] == "missing" else first["msg"].removeprefix("Value error, ")
        field = model.model_fields.get(str(first["loc"][0])) if first["loc"] else None
        if field is not None and "not supported" in (field.description or "").lower():  # more telling than the type
            reason = str(field.description).rstrip(".")
        elif field is not None and param in model.model_fields and (field.description or "").startswith(FORMS):
            forms = str(field.description).removeprefix(FORMS).rstrip(".")
            reason = f"{reason}: {forms}" if code == "missing_required_parameter" else f"it is none of these: {forms}"
        raise invalid(f"{param or 'The body'}: {reason}.", param, code) from errors


def _best_error(errors: ValidationError, data: Any) -> tuple[Any, str | None]:
    """Of the errors about the first wrong field, return the one that is deepest inside it, and its path."""
    found = errors.errors(include_url=False, include_context=False, include_input=False)
    same = [e for e in found if e["loc"][:1] == found[0]["loc"][:1]]
    paths = [field_path(e["loc"], data, missing=e["type"] == "missing") for e in same]
    deepest = max(range(len(same)), key=lambda i: (len(re.findall(r"[.[]", paths[i] or "")), -i))
    firsts: dict[tuple[str, ...], int] = {}  # the first error of each alternative
    for i, e in enumerate(same):
        if _without_indices(paths[i]) == _without_indices(paths[deepest]):
            firsts.setdefault(tuple(s for s in e["loc"] if isinstance(s, str)), i)

    def rank(i: int) -> tuple[list[int], bool, int]:
        right_type = not same[i]["type"].endswith("_type")  # otherwise another alternative was meant
        return [int(s) for s in re.findall(r"\[(\d+)\]", paths[i] or "")], right_type, -i

    best = max(firsts.values(), key=rank)
    return same[best], paths[best]


def _without_indices(path: str | None) -> str:
    """Return a path without its numbers."""
    return re.sub(r"\[\d+\]", "[]", path or "")


def field_path(loc: tuple[int | str, ...], data: Any, *, missing: bool = False) -> str | None:
    """Return a path as a client writes it (`messages[0].content`), without the validator's names of alternatives."""
    out, here = "", data
    for i, step in enumerate(loc):
        last = i == len(loc) - 1
        if isinstance(step, int):
            if isinstance(here, list) and step < len(here):
                out, here = f"{out}[{step}]", here[step]
        elif isinstance(here, Mapping) and (step in here or (missing and last)):
            out, here = f"{out}.{step}" if out else step, here.get(step)
    return out or None


def unknown_fields(body: RequestBody) -> list[str]:
    """Return the top-level fields that the format does not know."""
    return sorted(body.model_extra or ())
