"""Constraints on the generated text: OpenAI's `response_format`, and `regex` and `grammar`.

Source: https://platform.openai.com/docs/api-reference/chat, "response_format".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from inferplane.serving.errors import invalid
from inferplane.serving.wire import FunctionName, JsonObject, SamplingFields

ANY_OBJECT: dict[str, Any] = {"type": "object"}
WORDS = {"json_schema": "response_format", "timeout_s": "timeout"}
_INSTEAD = "Not supported: use response_format."


class SchemaOfAnswer(JsonObject):
    """A named JSON schema."""

    name: FunctionName
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class AsText(JsonObject):
    """Any text."""

    type: Literal["text"]


class AsObject(JsonObject):
    """Any JSON object."""

    type: Literal["json_object"]


class AsSchema(JsonObject):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: SchemaOfAnswer


ResponseFormat = Annotated[AsText | AsObject | AsSchema, Field(discriminator="type")]


class Constrained(SamplingFields):
    """Sampling under a constraint.

    The names that other servers have for constraints are refused: ignoring one would return text that looks like a
    valid answer and is not.
    """

    response_format: ResponseFormat | None = None
    regex: str | None = Field(None, description="The whole text matches this regular expression (Rust's syntax).")
    grammar: str | None = Field(None, description="The text belongs to this grammar (llguidance's dialect of Lark).")
    guided_json: None = Field(None, description=_INSTEAD)
    guided_regex: None = Field(None, description="Not supported: use regex.")
    guided_choice: None = Field(None, description="Not supported: use regex.")
    guided_grammar: None = Field(None, description="Not supported: use grammar.")
    structured_outputs: None = Field(None, description="Not supported: use response_format, regex or grammar.")
    json_schema: None = Field(None, description=_INSTEAD)
    ebnf: None = Field(None, description="Not supported: use grammar.")

    def constraint(self) -> dict[str, Any]:
        """Return the requested constraint as a field of `SamplingParams`; raise ApiError 400 if there are several."""
        given = {"response_format": self._schema(), "regex": self.regex, "grammar": self.grammar}
        found = [name for name, value in given.items() if value is not None]
        if len(found) > 1:
            raise invalid(f"{' and '.join(found)} exclude each other; pass one.", found[1])
        return {"json_schema" if name == "response_format" else name: given[name] for name in found}

    def _schema(self) -> dict[str, Any] | None:
        form = self.response_format
        if isinstance(form, AsSchema):
            return ANY_OBJECT if form.json_schema.json_schema is None else form.json_schema.json_schema
        return ANY_OBJECT if isinstance(form, AsObject) else None
