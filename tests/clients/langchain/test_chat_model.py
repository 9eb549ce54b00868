"""LangChain's published suite for chat models, with its client of OpenAI's interface as it is."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatModel(ChatModelIntegrationTests):
    """The suite, with all that a text model has."""

    @pytest.fixture(autouse=True)
    def _know_the_server(self, server: Any) -> None:
        type(self).url = server.url

    url = ""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "model": "default",
            "temperature": 0,
            "stream_usage": True,
            "max_retries": 0,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "scripted"
