"""The command `llm` and its library, by the file in which it lists servers that speak OpenAI's interface."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module", autouse=True)
def folder(server, tmp_path_factory):
    """Its folder of settings, with the server as a model."""
    folder = tmp_path_factory.mktemp("llm")
    model = {
        "model_id": "ours",
        "model_name": "scripted",
        "api_base": f"{server.url}/v1",
        "supports_tools": True,
        "supports_schema": True,
    }
    (folder / "extra-openai-models.yaml").write_text(json.dumps([model]), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLM_USER_PATH", str(folder))
        patch.setenv("OPENAI_API_KEY", "none")
        yield folder


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "llm", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_command():
    assert run("-m", "ours", "Hello") == "Hello! How may I help you?"
    assert run("-m", "ours", "--no-stream", "Hello") == "Hello! How may I help you?"
    assert run("-c", "-m", "ours", "How are you?") == "I am well, thank you."
    assert json.loads(run("-m", "ours", "--schema", "setup, punchline", "Tell me a joke"))["punchline"]


@pytest.mark.parametrize("stream", [True, False])
def test_tools(stream):
    import llm  # reads the folder of settings when it is imported

    def get_weather(location: str) -> str:
        """The weather at a place."""
        return "7 degrees"

    chain = llm.get_model("ours").chain("What is the weather in Oslo?", tools=[get_weather], stream=stream)
    assert chain.text().strip().endswith("In Oslo: 7 degrees.")
