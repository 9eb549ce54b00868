"""What all request formats share: strict JSON, fields with exact ranges, errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import PydanticKnownError, core_schema

from inferplane.dialogue.messages import MessageError, normalize_messages
from inferplane.engine.request.fields import MAX_COUNT
from inferplane.engine.request.params import (
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_SEQUENCES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MIN_REPETITION_PENALTY,
    MIN_SEED,
)
from inferplane.serving.bodies import parse_json
from inferplane.serving.errors import invalid
from inferplane.serving.request_fields import REFUSED, Refused, check_unknown, list_ignored

ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"
MAX_MESSAGES = 2048
MAX_PROMPTS = 1024
"""Most prompts that any server takes; `max_prompts` says how many this one does."""
MAX_TOKEN_ID = MAX_TOKENS = MAX_COUNT
FORMS = "One of these: "
"""Begins the description of a field that may have several forms; an error then lists them all."""
MIN_TOP_P = 1e-6
"""The meaning of top_p 0: the most likely token only."""


@dataclass(frozen=True)
class AtMost:
    """Bounds a list or an object of a request. Its length is checked before its items, and the first wrong item ends
    the check: a body holds a million of them, and an error costs far more than an item.

    Args:
        number: most items.
    """

    number: int = MAX_TOKENS

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        schema: Any = handler(source)
        schema["max_length"] = self.number
        if schema["type"] == "list":
            schema["fail_fast"] = True
        return core_schema.no_info_before_validator_function(self._check, schema)

    def _check(self, value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > self.number:
            kind = "List" if isinstance(value, list) else "Dictionary"
            found = {"field_type": kind, "max_length": self.number, "actual_length": len(value)}
            raise PydanticKnownError("too_long", found)
        return value


def _name_type(value: Any) -> Any:
    is_untyped = isinstance(value, dict) and value.get("type") is None
    return {**value, "type": ""} if is_untyped else value  # the error about a wrong type lists those that there are


UNTYPED = BeforeValidator(_name_type)
"""Of a union of objects that `type` tells apart: an object without it is answered with the types that there are."""
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[list[Stop], AtMost(MAX_STOPS)]
TokenIds = Annotated[list[TokenId], Field(min_length=1), AtMost()]
"""Of a prompt. `check_prompt_lengths` refuses more than the model can use."""
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1), AtMost(MAX_PROMPTS)]
ManyTokenIds = Annotated[list[TokenIds], Field(min_length=1), AtMost(MAX_PROMPTS)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Timeout = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Seconds for a whole request; never more than the server's limit."""
Seed = Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)]
RepetitionPenalty = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=100)]
BiasKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]  # one spelling per token
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


SAME_NAMES = (
    *("temperature", "seed", "frequency_penalty", "presence_penalty", "top_k", "min_p", "repetition_penalty"),
    *("min_tokens", "ignore_eos", "stop_token_ids", "stop"),
)
"""Fields that have the same names in the engine."""


def any_given(*names: str) -> dict[str, Any]:
    """Return the JSON schema of an object that has a value, not null, for at least one of these fields."""
    return {"anyOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names]}


class RequestBody(BaseModel):
    """The body of a request. Unknown fields are refused if they change the answer, else named in a header of it."""

    refused: ClassVar[Mapping[str, Refused]] = {}
    """Further fields that are refused in this format."""
    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=False, protected_namespaces=())


class JsonObject(BaseModel):
    """An object inside a request's body, or inside an answer."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True, protected_namespaces=())


class RequestObject(JsonObject):
    """An object inside a request's body. Unknown fields are refused if they change the answer, else ignored."""

    refused: ClassVar[Mapping[str, Refused]] = {}
    """Fields that are refused in this object."""
    model_config = ConfigDict(extra="allow", populate_by_name=False)


@dataclass(frozen=True)
class DescribedBy:
    """Gives a value that other code checks the JSON schema of a model.

    Args:
        model: describes it.
    """

    model: type[BaseModel]

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(self.model.__pydantic_core_schema__)


def read_messages(messages: Any, default_role: str = "") -> list[dict[str, Any]]:
    """Return messages as chat templates expect them; raise ApiError 400 that names what is wrong."""
    try:
        return normalize_messages(messages, default_role)
    except MessageError as error:
        code = "missing_required_parameter" if error.is_missing else "invalid_value"
        raise invalid(str(error), error.param, code) from error


class StreamOptions(RequestObject):
    """What a stream contains beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="With include_usage: usage so far in each chunk.")


class SamplingFields(RequestBody):
    """How tokens are sampled: the fields that all OpenAI formats have, and those that other servers add."""

    model: str | None = Field(None, max_length=4096)
    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], AtMost(MAX_BIASES)] | None = None
    user: str | None = Field(None, max_length=4096)
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], AtMost(MAX_STOP_TOKEN_IDS)] | None = None
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

    @property
    def includes_usage_so_far(self) -> bool:
        """True if each chunk of a stream says how many tokens its choice has."""
        options = self.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)


class Usage(JsonObject):
    """Tokens in and out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None
    completion_tokens_details: dict[str, int] | None = None


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
        ApiError: it is not one, or has too many arrays and objects: see `parse_json`.
    """
    try:
        data = parse_json(body)
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {str(error)[:200]}.", None, "invalid_json") from error
    if not isinstance(data, dict):
        raise invalid("The body is not a JSON object.", None, "invalid_json")
    return data


def validate(model: type[Model], data: Mapping[str, Any]) -> Model:
    """Return a body as an instance of its format; raise ApiError 400 that names the first wrong field."""
    if issubclass(model, RequestBody):
        check_unknown(data, model.model_fields, {**REFUSED, **model.refused})
    try:
        made = model.model_validate(data)
    except ValidationError as errors:
        first, param = _best_error(errors, data)
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
        reason = "it is required" if first["type"] == "missing" else first["msg"].removeprefix("Value error, ")
        if first["type"] == "union_tag_invalid":
            tag, tags = first["ctx"]["tag"], first["ctx"]["expected_tags"]
            code, reason = "invalid_value", f"it is none of these: {tags}"
            if not tag:
                code, reason = "missing_required_parameter", f"it is required: one of {tags}"
        field = model.model_fields.get(str(first["loc"][0])) if first["loc"] else None
        if field is not None and "not supported" in (field.description or "").lower():  # more telling than the type
            reason = str(field.description).rstrip(".")
        elif field is not None and param in model.model_fields and (field.description or "").startswith(FORMS):
            forms = str(field.description).removeprefix(FORMS).rstrip(".")
            reason = f"{reason}: {forms}" if code == "missing_required_parameter" else f"it is none of these: {forms}"
        raise invalid(f"{param or 'The body'}: {reason}.", param, code) from errors
    for name in model.model_fields:
        _check_objects(getattr(made, name), name)
    return made


def _check_objects(value: Any, path: str) -> None:
    """Raise ApiError 400 if an object in a request has a field that would change the answer if it were known."""
    if isinstance(value, list):
        if value and isinstance(value[0], RequestObject):  # never among a million token ids
            for i, item in enumerate(value):
                _check_objects(item, f"{path}[{i}]")
    elif isinstance(value, RequestObject):
        fields = {field.alias or name: name for name, field in type(value).model_fields.items()}
        check_unknown(value.model_extra or {}, fields, value.refused, f"{path}.")
        for key, name in fields.items():
            _check_objects(getattr(value, name), f"{path}.{key}")


def _best_error(errors: ValidationError, data: Any) -> tuple[Any, str | None]:
    """Of the errors about the first wrong field, return the one that is deepest inside it, and its path."""
    found = errors.errors(include_url=False, include_input=False)
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
    return same[best], f"{paths[best]}.type" if same[best]["type"] == "union_tag_invalid" else paths[best]


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
    """Return the top-level fields that the format does not know, and that have no effect."""
    return list_ignored(body.model_extra or {}, body.refused)
