"""The verbs about downloads, and the others with a model by its name, against a local hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferplane.cli.main import DONE, FAILED, WRONG_USAGE
from inferplane.engine.runner.model_files import DEMO_FOLDER
from inferplane.errors import DownloadError
from tests.unit.hub.conftest import online, server  # noqa: F401 - fixtures
from tests.unit.hub.hub_server import Fault, Model

COMMIT = "a" * 40


@pytest.fixture
def hub(server, monkeypatch):  # noqa: F811
    files = {path.name: path.read_bytes() for path in DEMO_FOLDER.iterdir() if path.is_file()}
    server.add("org/demo", Model(files))
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_never_shown")
    return server


def test_pull_list_show_rm(cli, hub, tmp_path):
    cache = tmp_path / "hf" / "hub"
    code, out, err = cli("show", "org/demo", "--json")
    data = json.loads(out)
    assert (code, data["commit"], data["folder"], data["license"]) == (DONE, COMMIT, None, "apache-2.0")
    assert "config.json" in data["files"] and not cache.exists()
    code, out, err = cli("list")
    assert (code, out) == (DONE, "") and "holds no model" in err

    code, out, err = cli("pull", "hf:org/demo")
    folder = Path(out.strip())
    assert code == DONE and folder == cache / "models--org--demo" / "snapshots" / COMMIT and folder.is_dir()
    assert err.startswith("note: fetching hf:org/demo at aaaaaaaaaaaa: ") and str(cache) in err
    code, out, err = cli("pull", "hf:org/demo", "--json")
    assert json.loads(out)["folder"] == str(folder) and json.loads(out)["commit"] == COMMIT and err == ""

    code, out, _ = cli("list", "--json")
    (model,) = json.loads(out)["models"]
    assert model["model"] == "org/demo" and model["snapshots"][0] | {"folder": ""} == {
        "commit": COMMIT,
        "revisions": ["main"],
        "whole": True,
        "folder": "",
    }
    assert "org/demo" in cli("list")[1] and "qwen3:0.6b" in cli("list", "--names")[1]
    code, out, _ = cli("show", "hf:org/demo@main", "--offline")
    assert code == DONE and COMMIT in out and "models--org--demo" in "".join(out.split())

    code, out, err = cli("rm", "org/demo")
    assert code == DONE and "are free again" in err and not folder.exists()
    code, _, err = cli("rm", "org/demo")
    assert code == WRONG_USAGE and "is not in the cache" in err


def test_a_model_is_pulled_on_demand(cli, hub):
    words = ("generate", "hf:org/demo", "-p", "def ", "--device", "cpu", "--max-tokens", "4", "--temperature", "0")
    words += ("--json",)
    code, out, err = cli(*words, "--offline")
    assert code == WRONG_USAGE and "downloads are off" in json.loads(err)["error"]["what"]
    assert not hub.requests
    code, out, err = cli(*words)
    assert code == DONE, err
    assert json.loads(out)["model"] == "hf:org/demo"
    assert "fetching hf:org/demo" in json.loads(err.splitlines()[0])["note"]
    assert "hf_never_shown" not in out + err
    before = len(hub.requests)
    code, offline, err = cli(*words, "--offline")
    assert code == DONE and json.loads(offline)["token_ids"] == json.loads(out)["token_ids"]
    assert len(hub.requests) == before


def test_plans_fetch_no_weights(cli, hub):
    code, out, err = cli("estimate", "org/demo", "--device", "cpu", "--memory", "1GiB", "--json")
    assert code == DONE, err
    assert json.loads(out)["model"] == "org/demo"
    assert all(words is not None and words.startswith("bytes=0-") for words in hub.ranges())  # headers
    hub.requests.clear()
    assert cli("explain", "org/demo", "--device", "cpu", "--json")[0] == DONE and hub.requests == []
    assert cli("list", "--json")[1].count('"whole": false') == 1


def test_an_unknown_architecture_is_known_before_weights_come(cli, hub):
    model = hub.models["org/demo", "main"]
    config = json.loads(model.files["config.json"]) | {"architectures": ["StrangeForCausalLM"], "model_type": "strange"}
    hub.add("org/strange", Model({**model.files, "config.json": json.dumps(config).encode()}))
    code, _, err = cli("generate", "org/strange", "-p", "x")
    assert code == FAILED and "Architecture 'StrangeForCausalLM' is not known" in err and hub.paths() == []
    code, out, err = cli("pull", "org/strange")
    assert code == DONE and len(hub.paths()) == 1 and Path(out.strip()).is_dir()
    assert err.startswith("warning: Architecture 'StrangeForCausalLM' is not known")


def test_errors_reach_the_user(cli, hub, monkeypatch):
    code, _, err = cli("chat", "org/none")
    assert code == WRONG_USAGE and "'org/none' is no folder, and http://127.0.0.1" in err
    code, _, err = cli("pull", "qwen3:06b")
    assert code == WRONG_USAGE and "perhaps qwen3:0.6b was meant" in err
    hub.faults["/revision/main"].append(Fault(status=429, headers={"Retry-After": "9999"}))
    code, _, err = cli("pull", "org/demo", "--json")
    error = json.loads(err.splitlines()[-1])["error"]
    assert code == FAILED and error["kind"] == DownloadError.__name__ and "hf_never_shown" not in err


def test_the_served_name_is_the_users(hub, monkeypatch):
    pytest.importorskip("pydantic")
    from inferplane.serving.lifecycle.start import locate_models
    from inferplane.serving.settings import ServerSettings

    found = locate_models(ServerSettings(model="org/demo"), {})
    assert Path(found.model).name == COMMIT and found.served_model_name == ("org/demo",)
    assert locate_models(ServerSettings(model="org/demo", served_model_name=("x",)), {}).served_model_name == ("x",)
    assert locate_models(ServerSettings(), {}) == ServerSettings()
    monkeypatch.setenv("INFERPLANE_OFFLINE", "")
    assert locate_models(ServerSettings(model="hf:org/demo", offline=True), {}).model == found.model


def test_show_of_a_folder(cli, tmp_path):
    """A name of a folder means the folder, as for every verb; files of an export's ranks are among its files."""
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "rank_0" / "layout.json").write_text("{}")
    code, out, err = cli("show", str(tmp_path), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["files"] == {"config.json": 39, "rank_0/layout.json": 2} and found["whole"] is True
    assert (found["folder"], found["architecture"]) == (str(tmp_path), "LlamaForCausalLM")
    code, out, _ = cli("show", str(tmp_path))
    assert code == 0 and "LlamaForCausalLM" in out and "rank_0/layout.json  2 B" in out
    code, out, err = cli("show", str(tmp_path / "rank_0"))
    assert code == 2 and not out and "rank_0 is no folder of a model" in " ".join(err.split())
