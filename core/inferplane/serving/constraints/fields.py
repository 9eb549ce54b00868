"""Constraints on the generated text: OpenAI's `response_format`, and `regex` and `grammar`.

Source: https://platform.openai.com/docs/api-reference/chat, "response_format".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from inferplane.dialogue.schema_limits import relax
from inferplane.serving.errors import invalid
from inferplane.serving.request_fields import Refused
from inferplane.serving.wire import UNTYPED, FunctionName, RequestObject, SamplingFields

ANY_OBJECT: dict[str, Any] = {"type": "object"}
WORDS = {"json_schema": "response_format", "timeout_s": "timeout"}


class SchemaOfAnswer(RequestObject):
    """A named JSON schema."""

    refused = {"json_schema": Refused("schema")}
    name: FunctionName
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class AsText(RequestObject):
    """Any text."""

    refused = dict.fromkeys(("schema", "json_schema"), Refused("the type json_schema"))
    type: Literal["text"]


class AsObject(RequestObject):
    """Any JSON object, or as other servers have it, one that fits a schema as far as possible."""

    refused = {"json_schema": Refused("the type json_schema")}
    type: Literal["json_object"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class AsSchema(RequestObject):
    """JSON that fits a schema."""

    refused = {"schema": Refused("json_schema.schema")}
    type: Literal["json_schema"]
    json_schema: SchemaOfAnswer


ResponseFormat = Annotated[AsText | AsObject | AsSchema, Field(discriminator="type"), UNTYPED]


class Constrained(SamplingFields):
    """Sampling under a constraint."""

    response_format: ResponseFormat | None = None
    regex: str | None = Field(None, description="The whole text matches this regular expression (Rust's syntax).")
    grammar: str | None = Field(None, description="The text belongs to this grammar (llguidance's dialect of Lark).")

    def constraint(self) -> tuple[dict[str, Any], list[str]]:
        """Return the requested constraint as a field of `SamplingParams`, and what of it is not enforced.

        Raises:
            ApiError: 400, there are several.
        """
        dropped: set[str] = set()
        given = {"response_format": self._schema(dropped), "regex": self.regex, "grammar": self.grammar}
        found = [name for name, value in given.items() if value is not None]
        if len(found) > 1:
            raise invalid(f"{' and '.join(found)} exclude each other; pass one.", found[1])
        ignored = [f"response_format.{keyword}" for keyword in sorted(dropped)]
        return {"json_schema" if name == "response_format" else name: given[name] for name in found}, ignored

    def _schema(self, dropped: set[str]) -> dict[str, Any] | None:
        form = self.response_format
        if isinstance(form, AsSchema):
            named = form.json_schema
            schema = ANY_OBJECT if named.json_schema is None else named.json_schema
            return schema if named.strict else dict(relax(schema, dropped))
        if isinstance(form, AsObject):
            return {**relax(_schema_of_object(form.json_schema or {}), dropped), **ANY_OBJECT}
        return None


def _schema_of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a JSON object; raise ApiError 400 for one that no object fits."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise invalid(
            f"response_format.schema is of type {kind!r:.80}; json_object is for objects: use the type json_schema.",
            "response_format.schema",
        )
    return {key: value for key, value in schema.items() if key != "nullable"}  # an answer is an object, never null
