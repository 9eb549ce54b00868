"""Names of models: their forms, short names, and the user's list."""

from __future__ import annotations

import pytest

from inferplane.errors import UsageError
from inferplane.hub import near_short_names, parse_name
from inferplane.hub.settings import HubSettings, default_cache, is_offline
from inferplane.hub.short_names import read_short_names, short_names_file


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("hf:Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B"),
        ("hf://Qwen/Qwen3-0.6B@v1.0", "hf:Qwen/Qwen3-0.6B@v1.0"),
        ("huggingface://a/b", "hf:a/b"),
        ("meta-llama/Llama-3.1-8B", "hf:meta-llama/Llama-3.1-8B"),
        ("a/b@refs/pr/3", "hf:a/b@refs/pr/3"),
        ("hf:a/b:Q4_K_M", "hf:a/b:Q4_K_M"),
        ("hf:a/b@main:x-Q8_0.gguf", "hf:a/b@main:x-Q8_0.gguf"),
        ("ms:Qwen/Qwen3-0.6B", "ms:Qwen/Qwen3-0.6B"),
        ("modelscope://a/b@master", "ms:a/b@master"),
        ("smollm2", "hf:HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("Qwen3:0.6B", "hf:Qwen/Qwen3-0.6B"),
        ("llama3.2:1b", "hf:meta-llama/Llama-3.2-1B-Instruct"),
    ],
)
def test_forms(text, full):
    found = parse_name(text)
    assert found is not None and found.full == full and found.text == text


@pytest.mark.parametrize(
    "text",
    ["demo", "/no/such/folder", "./a/b", "a/b/c", "~/a", "a\\b", "", "org/model.gguf", "a/b/", "smollm9", "a/b c"],
)
def test_what_is_no_name(text):
    assert parse_name(text) is None


@pytest.mark.parametrize(
    "text", ["hf:", "hf:a", "ms:a/b/c", "hf:../b", "hf:a/../b", "hf:a/b@../../x", "hf:a--b/c", "hf:é/b"]
)
def test_what_begins_as_a_name_and_is_none(text):
    with pytest.raises(UsageError, match=r"is no name|no valid revision"):
        parse_name(text)


def test_every_short_name_is_a_name():
    known = read_short_names()
    assert {"smollm2", "qwen3:0.6b", "llama3.2:1b"} <= set(known)
    for entry in known.values():
        found = parse_name(entry.name)
        assert found is not None and found.short == entry and entry.license and entry.size
    assert near_short_names("qwen3:06b")[0] == "qwen3:0.6b"


def test_the_users_list_extends_the_names(monkeypatch, tmp_path):
    path = short_names_file()
    assert path == tmp_path / "settings" / "inferplane" / "models.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("mine: me/model@v2\nsmollm2:\n  model: ms:a/b\n  license: mit\n  size: 1 GB\n")
    mine, replaced = parse_name("mine"), parse_name("smollm2")
    assert mine is not None and mine.full == "hf:me/model@v2"
    assert replaced is not None and replaced.full == "ms:a/b" and replaced.short is not None
    assert replaced.short.license == "mit"
    monkeypatch.setenv("INFERPLANE_MODELS", str(tmp_path / "none.yaml"))
    with pytest.raises(UsageError, match="which is no file"):
        parse_name("mine")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "no list of short names"),
        ("a: [", "cannot be read"),
        ("a: b", "'a' names no model"),
        ("a: {licence: mit, model: a/b}", "no field 'licence'"),
        ("a b: x/y", "is no short name"),
        ("demo: x/y", "ships with Inferplane"),
        ("a: x--y/z", "names no model"),
    ],
)
def test_lists_that_are_none(text, says, monkeypatch, tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text(text)
    monkeypatch.setenv("INFERPLANE_MODELS", str(path))
    with pytest.raises(UsageError, match=says):
        parse_name("a")


def test_variables(monkeypatch, tmp_path):
    assert default_cache() == tmp_path / "hf" / "hub" and not is_offline()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    found = HubSettings.from_environment()
    assert (found.endpoint, found.cache, found.offline) == ("https://mirror.example", tmp_path / "other", False)
    for name in ("INFERPLANE_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
        assert HubSettings.from_environment().offline
        monkeypatch.setenv(name, "0")
    assert not is_offline()
    monkeypatch.setenv("HF_ENDPOINT", "mirror")
    with pytest.raises(UsageError, match="is no address"):
        HubSettings.from_environment()
