"""What is wrong with a model is one error on one screen, before its weights are downloaded or read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from inferplane.cli.main import DONE, FAILED, WRONG_USAGE
from inferplane.gguf import read_header
from inferplane.hub.settings import default_cache
from inferplane.models import Build, Config, llama
from inferplane.types import Memory
from tests.unit.gguf.files import LLAMA as GGUF_ENTRIES
from tests.unit.gguf.files import llama as gguf_tensors
from tests.unit.gguf.files import write as write_gguf
from tests.unit.hub.conftest import online, server  # noqa: F401 - fixtures
from tests.unit.hub.hub_server import Fault, Model
from tests.unit.support.small import LLAMA, tensors_for

CONFIG = {**LLAMA, "model_type": "llama", "torch_dtype": "bfloat16"}
WEIGHTS = "model.safetensors"
ROWS, COLUMNS = 24, 80


def files_of(config: dict = CONFIG) -> dict[str, bytes]:
    """A small model without a tokenizer."""
    weights = save(tensors_for(llama(Build(Config(CONFIG))), dtype=torch.bfloat16))
    return {"config.json": json.dumps(config).encode(), WEIGHTS: weights}


def run(model: str) -> tuple[str, ...]:
    """A command that runs a model, without a tokenizer too."""
    return "bench", "latency", model, "--device", "cpu", "--output-len", "1", "--repeats", "1"


def write(folder: Path, files: dict[str, bytes]) -> str:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return str(folder)


def one_screen(text: str) -> str:
    """The text, if it fits on a screen of a terminal."""
    rows = sum(max(1, math.ceil(len(line) / COLUMNS)) for line in text.splitlines())
    assert rows < ROWS / 2, text  # the other half is for the command and what came before
    return text


@pytest.fixture
def hub(server, monkeypatch):  # noqa: F811
    server.add("org/small", Model(files_of()))
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setattr("inferplane.hub.connection.FIRST_PAUSE_S", 0.01)
    return server


@pytest.fixture(params=["a name", "a folder"])
def small(request, hub, tmp_path):
    """The model by its name on a hub, and as a folder."""
    return "org/small" if request.param == "a name" else write(tmp_path / "small", files_of())


@pytest.fixture
def memory(monkeypatch):
    """Sets the free bytes of the cpu."""
    return lambda free: monkeypatch.setattr(
        "inferplane.types.backend.Backend.memory", lambda self: Memory(total_bytes=2**40, free_bytes=free)
    )


def test_too_large_with_the_quantization_that_fits(cli, hub, small, memory):
    code, out, _ = cli("estimate", small, "--device", "cpu", "--memory", "1GiB", "--json")
    whole = json.loads(out)["weight_bytes"]
    code, out, _ = cli("estimate", small, "--device", "cpu", "--quantization", "weight_only_int8", "--json")
    quantized = json.loads(out)["weight_bytes"]
    assert quantized < whole
    hub.requests.clear()
    memory((quantized + whole) // 2)
    code, out, err = cli(*run(small))
    assert (code, out) == (FAILED, "") and hub.paths() == []
    assert f"error: {small} is too large: its weights take " in one_screen(err)
    assert "weight_only_int8 takes " in err and "weight_only_int4 takes " in err
    assert "to do: pass --quantization weight_only_int8, which fits" in err
    assert f"`inferplane estimate {small} --device cpu --quantization weight_only_int8`" in err


def test_too_large_whatever_the_quantization(cli, hub, small, memory):
    memory(1000)
    code, _, err = cli(*run(small))
    assert code == FAILED and hub.paths() == []
    assert "to do: choose a smaller model, or several devices" in one_screen(err)


def test_too_large_in_32_bits(hub, small, memory):
    from inferplane import LLM
    from inferplane.errors import CapacityError

    memory(300_000)
    with pytest.raises(CapacityError, match="is too large") as caught:
        LLM(small, device="cpu", dtype="float32")
    assert caught.value.there_is.startswith("bfloat16 takes ")
    assert "bfloat16 with weight_only_int4 takes " in caught.value.there_is
    assert caught.value.remedy.startswith("pass dtype='bfloat16', which fits (`inferplane estimate ")
    assert hub.paths() == []


def test_too_large_in_python(hub, small, memory):
    from inferplane import LLM
    from inferplane.errors import CapacityError

    memory(1000)
    with pytest.raises(CapacityError, match="is too large: its weights take"):
        LLM(small, device="cpu")
    assert hub.paths() == []


def test_what_fits_runs(hub, small, memory):
    from inferplane import LLM, SamplingParams

    memory(2**30)
    llm = LLM(small, device="cpu")
    try:
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0))[0].token_ids) == 2
    finally:
        llm.close()


@pytest.mark.parametrize("where", ["a name", "a folder"])
def test_an_unknown_architecture_has_its_nearest_and_the_page(cli, hub, tmp_path, where):
    files = files_of({**CONFIG, "architectures": ["Llama9ForCausalLM"], "model_type": "llama9"})
    hub.add("org/new", Model(files))
    model = "org/new" if where == "a name" else write(tmp_path / "new", files)
    code, _, err = cli(*run(model))
    assert code == FAILED and hub.paths() == []
    assert "Architecture 'Llama9ForCausalLM' is not known" in one_screen(err) and "LlamaForCausalLM" in err
    assert "docs/models.md lists them" in err and "docs/adding-a-model.md" in err


@pytest.mark.parametrize("token", ["", "hf_of_somebody"])
def test_a_gated_repository_has_its_page_and_the_way_to_a_token(cli, hub, monkeypatch, token):
    hub.add("org/small", Model(files_of(), gated=True))
    monkeypatch.setenv("HF_TOKEN", token)
    for words in (run("org/small"), ("pull", "org/small"), ("estimate", "org/small")):
        code, _, err = cli(*words)
        assert code == FAILED and "hf:org/small is gated: its publisher grants access" in one_screen(err)
        assert f"accept the terms at {hub.endpoint}/org/small" in err and ("HF_TOKEN" in err) == (not token)
        assert not token or token not in err


def test_without_a_network_the_error_has_what_is_in_the_cache(cli, hub, monkeypatch, tmp_path):
    hub.add("org/whole", Model({**files_of(), "tokenizer.json": b"{}"}))
    assert cli("pull", "org/whole")[0] == DONE
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for verb in ("pull", "estimate"):
        code, _, err = cli(verb, "org/small")
        assert code == FAILED and "'org/small' is no folder, and is looked up on a hub: 127.0.0.1:9 cannot be" in err
        assert f"there is: in {tmp_path}/hf/hub: org/whole" in one_screen(err)
        assert "to do: check the network, HTTPS_PROXY and HF_ENDPOINT (a mirror)" in err
    code, _, err = cli("generate", "org/small", "-p", "x", "--offline")
    assert code == WRONG_USAGE and f"there is: in {tmp_path}/hf/hub: org/whole" in one_screen(err)
    code, out, _ = cli("estimate", "org/whole", "--device", "cpu", "--json")
    assert code == DONE and json.loads(out)["model"] == "org/whole"


def test_half_a_download_has_how_far_it_is(cli, hub, monkeypatch):
    model = hub.models["org/small", "main"]
    size = len(model.files[WEIGHTS])
    hub.faults[model.sha256(WEIGHTS)] += [Fault(send=size // 2), *[Fault(send=0)] * 9]
    code, _, err = cli("pull", "org/small")
    assert code == FAILED
    line = next(line for line in one_screen(err).splitlines() if line.startswith("there is: "))
    total = size + len(model.files["config.json"])
    assert f"({(total - size + size // 2) * 100 // total} %) in " in line
    assert "the same command goes on from there" in err
    code, _, err = cli("generate", "org/small", "-p", "x", "--offline")
    assert code == WRONG_USAGE and " of it; in " in one_screen(err) and "`, which goes on from there" in err
    hub.faults.clear()
    assert cli("pull", "org/small")[0] == DONE
    assert hub.ranges()[-1] == f"bytes={size // 2}-"


def test_half_a_download_in_a_folder(cli, tmp_path):
    files = files_of()
    path = write(tmp_path / "half", {**files, WEIGHTS: files[WEIGHTS][: len(files[WEIGHTS]) // 2]})
    code, _, err = cli(*run(path))
    assert code == FAILED and WEIGHTS in one_screen(err) and "to do: " in err


# ------------------------------------------------------------------ estimates before a download


def test_an_estimate_of_a_name_is_that_of_its_folder(cli, hub, tmp_path):
    """Also where the tensors say more than the config: a model that was saved without its head."""
    tensors = tensors_for(llama(Build(Config(CONFIG))), dtype=torch.bfloat16)
    weights = save({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    files = {"config.json": json.dumps({**CONFIG, "architectures": ["LlamaModel"]}).encode(), WEIGHTS: weights}
    hub.add("org/headless", Model(files))
    words = ("--device", "cpu", "--memory", "1GiB", "--json")
    folder = json.loads(cli("estimate", write(tmp_path / "headless", files), *words)[1])
    code, out, err = cli("estimate", "org/headless", *words)
    assert code == DONE, err
    assert {**json.loads(out), "model": ""} == {**folder, "model": ""}
    assert folder["weight_bytes"] < json.loads(cli("estimate", "org/small", *words)[1])["weight_bytes"]


def test_an_estimate_reads_headers_alone(cli, hub, monkeypatch):
    monkeypatch.setattr("inferplane.hub.headers.FIRST_HEADER_BYTES", 512)  # shorter than the header
    content = hub.models["org/small", "main"].files[WEIGHTS]
    length = 8 + int.from_bytes(content[:8], "little")
    assert cli("estimate", "org/small", "--device", "cpu", "--json")[0] == DONE
    assert hub.ranges() == ["bytes=0-511", f"bytes=0-{length - 1}"]
    assert list(default_cache().rglob(f"*/{WEIGHTS}")) == []


def test_an_estimate_of_shards_reads_each_header(cli, hub):
    files = files_of()
    tensors = tensors_for(llama(Build(Config(CONFIG))), dtype=torch.bfloat16)
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    shards = {file: save({name: tensors[name] for name in inside}) for file, inside in parts.items()}
    index_name = "model.safetensors.index.json"
    hub.add(
        "org/shards", Model({"config.json": files["config.json"], **shards, index_name: json.dumps(index).encode()})
    )
    words = ("--device", "cpu", "--memory", "1GiB", "--json")
    found = json.loads(cli("estimate", "org/shards", *words)[1])
    assert found["weight_bytes"] == json.loads(cli("estimate", "org/small", *words)[1])["weight_bytes"]
    assert len(hub.ranges()) == 3


@pytest.mark.parametrize("fault", [Fault(whole=True), Fault(send=100), Fault(status=503)])
def test_headers_over_a_bad_connection(cli, hub, fault):
    model = hub.models["org/small", "main"]
    hub.faults[model.sha256(WEIGHTS)].append(fault)
    code, out, err = cli("estimate", "org/small", "--device", "cpu", "--memory", "1GiB", "--json")
    assert code == DONE, err
    assert json.loads(out)["weight_bytes"] > 0


def test_a_damaged_header_is_refused(cli, hub):
    files = files_of()
    for name, content in (
        ("long", b"\xff" * 7 + b"\0" + b"x" * 100),
        ("empty", b""),
        ("text", b"version https://x" * 9),
    ):
        hub.add(f"org/{name}", Model({**files, WEIGHTS: content}))
        code, _, err = cli("estimate", f"org/{name}", "--device", "cpu")
        assert code == FAILED and WEIGHTS in one_screen(err), err


# ------------------------------------------------------------------ GGUF files


@pytest.fixture
def packed(hub, tmp_path, monkeypatch):
    """A GGUF file whose config is in its metadata and in a tensor, also by its name; returns its path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokens = [f"token {number}" for number in range(4000)]
    factors = {"rope_freqs.weight": ("F32", np.full(32, 2, np.float32))}
    tensors = {**gguf_tensors("Q4_K"), **factors}
    path = write_gguf(tmp_path / "tiny-Q4_K.gguf", tensors, GGUF_ENTRIES, others={"tokenizer.ggml.tokens": tokens})
    other = write_gguf(tmp_path / "tiny-Q8_0.gguf", gguf_tensors("Q8_0"))
    hub.add("org/packed", Model({file.name: file.read_bytes() for file in (path, other)}))
    return path


def test_an_estimate_of_a_gguf_name_reads_its_header_alone(cli, hub, packed, monkeypatch):
    monkeypatch.setattr("inferplane.hub.headers.FIRST_GGUF_BYTES", 1024)
    words = ("--device", "cpu", "--memory", "1GiB", "--json")
    file = json.loads(cli("estimate", str(packed), *words)[1])
    code, out, err = cli("estimate", "org/packed:Q4_K", *words)
    assert code == DONE, err
    assert {**json.loads(out), "model": ""} == {**file, "model": ""}
    ends = [int(line.partition("-")[2]) for line in hub.ranges()]
    factors = read_header(packed).tensors["rope_freqs.weight"]
    *pieces, before, last, of_factors = ends  # each piece goes on where the one before it ends
    assert (
        pieces[:2] == [1023, 4095] and before < min(e.start for e in read_header(packed).tensors.values()) <= last + 1
    )
    assert of_factors == factors.start + factors.nbytes - 1
    assert [line.partition("=")[2].partition("-")[0] for line in hub.ranges()[:3]] == ["0", "1024", "4096"]
    assert not list(default_cache().rglob("*.gguf")) and not (packed.parent / "cache").exists()


def test_ranges_of_a_server_that_sends_whole_files(cli, hub, packed):
    model = hub.models["org/packed", "main"]
    hub.faults[model.sha256(packed.name)] += [Fault(whole=True)] * 9
    code, out, err = cli("estimate", "org/packed:Q4_K", "--device", "cpu", "--memory", "1GiB", "--json")
    assert code == DONE, err
    assert json.loads(out)["weight_bytes"] > 0


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\3\0\0\0" + b"\1" * 100, b"version https://x" * 9])
def test_a_damaged_gguf_header_is_refused(cli, hub, content):
    hub.add("org/damaged", Model({"model.gguf": content}))
    code, _, err = cli("estimate", "org/damaged", "--device", "cpu")
    assert code == FAILED and "model.gguf" in one_screen(err), err


def test_a_gguf_name_that_is_too_large(cli, hub, packed, memory):
    memory(1000)
    code, _, err = cli(*run("org/packed:Q4_K"))
    assert code == FAILED and "error: org/packed:Q4_K is too large: its weights take " in one_screen(err)
    assert not list(default_cache().rglob("*.gguf"))
    memory(2**30)
    assert cli(*run("org/packed:Q4_K"))[0] == DONE


# ------------------------------------------------------------------ a server


def test_a_server_refuses_before_it_downloads(hub):
    """Its process imports no torch: another one judges."""
    pytest.importorskip("pydantic")
    from inferplane.errors import CapacityError
    from inferplane.serving.lifecycle.start import locate_models
    from inferplane.serving.settings import ServerSettings

    files = files_of({**CONFIG, "hidden_size": 2**16, "intermediate_size": 2**20, "num_hidden_layers": 99})
    hub.add("org/huge", Model(files))
    with pytest.raises(CapacityError, match="org/huge is too large: its weights take") as caught:
        locate_models(ServerSettings(model="org/huge", device="cpu"), {})
    assert hub.paths() == [] and caught.value.remedy.startswith("choose a smaller model, or several devices")
