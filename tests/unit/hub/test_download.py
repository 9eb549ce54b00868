"""Downloads against a local hub, whole and interrupted: each ends right, or with one clear error."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest

from inferplane.errors import CapacityError, CheckpointError, DownloadError, InferplaneError, UsageError
from inferplane.hub import HubSettings, ModelName, fetch, find, locate, parse_name
from inferplane.hub import connection as connection_module
from inferplane.hub.cache import RepositoryCache
from inferplane.hub.memory import explain_memory
from inferplane.hub.progress import SILENT, DownloadProgress
from tests.unit.hub.hub_server import TOKEN, Fault, HubServer, Model

WEIGHTS = bytes(range(256)) * 4096
SMALL = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "generation_config.json": b"{}",
    "README.md": b"words",
    "model.py": b"raise SystemExit",
}
PLAIN = {**SMALL, "model.safetensors": WEIGHTS, "pytorch_model.bin": b"pickle" * 100}
READ = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(connection_module, "FIRST_PAUSE_S", 0.01)


def name_of(text: str = "hf:org/plain") -> ModelName:
    found = parse_name(text)
    assert found is not None
    return found


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def nothing_half(settings: HubSettings, repository: str = "org/plain") -> None:
    """No file that is not whole has its final name, and no snapshot has weights."""
    cache = RepositoryCache(settings.cache, repository)
    for blob in cache.blobs.iterdir() if cache.blobs.is_dir() else []:
        assert blob.name.endswith(".incomplete") or blob.name != Model(PLAIN).sha256("model.safetensors")
    assert not any(snapshot.has_weights for snapshot in cache.list_snapshots())
    assert find(name_of(f"hf:{repository}"), settings) is None


def pull(settings: HubSettings, said: list[str] | None = None, text: str = "hf:org/plain") -> Path:
    progress = SILENT if said is None else DownloadProgress(said.append, lambda done, total: None)
    return fetch(name_of(text), settings=settings, progress=progress).folder


# ------------------------------------------------------------------ whole ones


def test_only_what_is_read_is_fetched_and_found_again(server: HubServer, settings):
    server.add("org/plain", Model(PLAIN))
    said: list[str] = []
    counts: list[tuple[int, int]] = []
    found = fetch(name_of(), settings=settings, progress=DownloadProgress(said.append, lambda *c: counts.append(c)))
    assert names_in(found.folder) == READ and found.commit == "a" * 40
    assert (found.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert said[0].startswith("fetching hf:org/plain at aaaaaaaaaaaa: 1.0 MB from http://127.0.0.1")
    assert str(settings.cache) in said[0]
    assert counts[-1][0] == counts[-1][1] and [done for done, _ in counts] == sorted(done for done, _ in counts)
    before = len(server.requests)
    assert locate(name_of(), settings=replace(settings, offline=True)) == found
    assert locate(name_of(), settings=settings) == found
    assert len(server.requests) == before  # what is whole needs no hub
    assert pull(settings, said) == found.folder
    assert len(server.paths()) == 1 and len(said) == 1


def test_huggingface_hub_finds_what_was_fetched(server, settings):
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    server.add("org/plain", Model(PLAIN))
    folder = pull(settings)
    path = try_to_load_from_cache("org/plain", "model.safetensors", cache_dir=settings.cache)
    assert Path(str(path)) == folder / "model.safetensors"
    info = scan_cache_dir(settings.cache)
    assert not info.warnings and [repo.repo_id for repo in info.repos] == ["org/plain"]


def test_shards_are_those_of_the_index(server, settings):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    shards = {f"model-{i}.safetensors": bytes([i]) * 1000 for i in (1, 2, 3)}
    files = {**SMALL, **shards, "model.safetensors.index.json": json.dumps(index).encode()}
    server.add("org/shards", Model(files))
    folder = pull(settings, text="org/shards")
    weights = {"model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"}
    assert names_in(folder) == READ - {"model.safetensors"} | weights
    (folder / "model-2.safetensors").unlink()
    assert find(name_of("org/shards"), settings) is None
    index["weight_map"]["c"] = "../model-4.safetensors"
    server.add("org/lost", Model({**files, "model.safetensors.index.json": json.dumps(index).encode()}))
    with pytest.raises(CheckpointError, match=r"1 file\(s\) that are not there"):
        pull(settings, text="org/lost")


def test_a_plan_fetches_configs_alone(server, settings):
    server.add("org/plain", Model(PLAIN))
    found = locate(name_of(), configs=True, settings=settings, progress=SILENT)
    assert names_in(found.folder) == {"config.json", "generation_config.json"} and server.paths() == []
    assert locate(name_of(), configs=True, settings=replace(settings, offline=True)) == found
    assert names_in(locate(name_of(), settings=settings, progress=SILENT).folder) == READ


def test_a_revision_is_pinned(server, settings):
    server.add("org/plain", Model(PLAIN))
    first = pull(settings)
    newer = server.add("org/plain", Model({**PLAIN, "model.safetensors": WEIGHTS[::-1]}, commit="b" * 40))
    assert locate(name_of(), settings=settings, progress=SILENT).folder == first  # until it is pulled
    second = pull(settings)
    assert second.name == newer.commit and (second / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert locate(name_of(), settings=settings).folder == second
    assert locate(name_of(f"hf:org/plain@{'a' * 40}"), settings=settings).folder == first
    with pytest.raises(UsageError, match="has no revision 'v9'"):
        pull(settings, text="hf:org/plain@v9")


def test_rm_leaves_what_another_revision_has(server, settings):
    server.add("org/plain", Model(PLAIN))
    first = pull(settings)
    server.add("org/plain", Model({**PLAIN, "config.json": b"{}"}, commit="b" * 40))
    second = pull(settings)
    cache = RepositoryCache(settings.cache, "org/plain")
    assert cache.remove_snapshot(first.name) == len(SMALL["config.json"])
    assert not first.exists() and (second / "model.safetensors").read_bytes() == WEIGHTS
    assert cache.remove() > len(WEIGHTS) and not cache.folder.exists()


# ------------------------------------------------------------------ interrupted ones


def run_pull(server: HubServer, settings: HubSettings, **environment: str) -> subprocess.Popen[str]:
    """A process that downloads the model."""
    code = "from inferplane.hub import fetch, parse_name; print(fetch(parse_name('hf:org/plain')).folder)"
    variables = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    variables |= {"HF_ENDPOINT": server.endpoint, "HF_HUB_CACHE": str(settings.cache), **environment}
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=variables, stdout=pipe, stderr=pipe, text=True)


def test_a_killed_download_goes_on_where_it_was(server, settings):
    model = server.add("org/plain", Model(PLAIN))
    part = len(WEIGHTS) * 3 // 10
    server.faults[model.sha256("model.safetensors")].append(Fault(send=part, stall=True))
    process = run_pull(server, settings)
    partial = RepositoryCache(settings.cache, "org/plain").blobs / f"{model.sha256('model.safetensors')}.incomplete"
    assert server.stalled.wait(20)
    deadline = time.monotonic() + 10
    while partial.stat().st_size < part // 2 and time.monotonic() < deadline:  # it has read, and is now writing
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    nothing_half(settings)
    have = partial.stat().st_size
    assert part // 2 <= have <= part
    assert (pull(settings) / "model.safetensors").read_bytes() == WEIGHTS
    assert server.ranges() == [None, f"bytes={have}-"]


def test_two_processes_download_once(server, settings):
    server.add("org/plain", Model(PLAIN))
    processes = [run_pull(server, settings) for _ in range(2)]
    ends = [(*process.communicate(timeout=60), process.returncode) for process in processes]
    assert [code for _, _, code in ends] == [0, 0], ends
    assert ends[0][0] == ends[1][0] and names_in(Path(ends[0][0].strip())) == READ
    assert len(server.paths()) == 1


def test_a_wait_for_another_process_is_said(server, settings, monkeypatch):
    from huggingface_hub.utils import WeakFileLock

    model = server.add("org/plain", Model(PLAIN))
    cache = RepositoryCache(settings.cache, "org/plain")
    cache.locks.mkdir(parents=True)
    monkeypatch.setattr("inferplane.hub.download.PATIENCE_S", 0.05)
    said: list[str] = []
    with ThreadPoolExecutor() as pool:
        with WeakFileLock(cache.locks / f"{model.sha256('model.safetensors')}.lock"):
            pulled = pool.submit(pull, settings, said)
            deadline = time.monotonic() + 10
            while len(said) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert said[1:] == ["another process fetches model.safetensors"]
        assert names_in(pulled.result()) == READ


@pytest.mark.parametrize(
    ("faults", "ranges"),
    [
        ([Fault(send=300_000)], [None, "bytes=300000-"]),
        ([Fault(send=300_000), Fault(whole=True)], [None, "bytes=300000-"]),
        ([Fault(send=300_000), Fault(status=416)], [None, "bytes=300000-", None]),
        ([Fault(send=300_000, flip=True)], [None, "bytes=300000-", None]),
        ([Fault(status=503)], [None, None]),
    ],
    ids=["truncated", "no ranges", "refused range", "damaged before", "busy without a time"],
)
def test_interruptions_that_are_mended(server, settings, faults, ranges):
    model = server.add("org/plain", Model(PLAIN))
    if faults[0].flip:  # the beginning comes from an earlier download
        cache = RepositoryCache(settings.cache, "org/plain")
        cache.blobs.mkdir(parents=True)
        (cache.blobs / f"{model.sha256('model.safetensors')}.incomplete").write_bytes(b"?" * 300_000)
        faults, ranges = [], ranges[1:]
    server.faults[model.sha256("model.safetensors")] += faults
    assert (pull(settings) / "model.safetensors").read_bytes() == WEIGHTS
    assert server.ranges() == ranges


@pytest.mark.parametrize(
    ("fault", "repeats", "error", "says"),
    [
        (Fault(flip=True), 1, CheckpointError, "another hash than the hub states"),
        (Fault(send=0), 9, DownloadError, "cannot be reached"),
        (Fault(send=1000, whole=True), 9, DownloadError, "cannot be reached"),
        (Fault(status=404), 1, UsageError, "has no org/plain"),
        (Fault(status=403), 1, DownloadError, "Access to hf:org/plain is refused"),
        (Fault(status=503), 99, DownloadError, r"is busy \(status 503\)"),
        (Fault(status=429, headers={"Retry-After": "600"}), 1, DownloadError, r"\(status 429\), for another 600 s"),
    ],
)
def test_faults_that_stay_are_one_error(server, settings, fault, repeats, error, says):
    model = server.add("org/plain", Model(PLAIN))
    server.faults[model.sha256("model.safetensors")] += [fault] * repeats
    with pytest.raises(error, match=says) as caught:
        pull(replace(settings, max_wait_s=0.5))
    assert type(caught.value) is error and caught.value.remedy
    assert "Signature" not in str(caught.value)
    nothing_half(settings)
    server.faults.clear()
    assert names_in(pull(settings)) == READ


def test_a_small_file_with_another_hash_is_refused(server, settings):
    server.add("org/plain", Model(PLAIN))
    server.faults["config.json"].append(Fault(flip=True))
    with pytest.raises(CheckpointError, match=r"config\.json has another hash"):
        pull(settings)
    nothing_half(settings)


@pytest.mark.parametrize("header", ["1", "date"])
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_waited_for(server, settings, header, status, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(connection_module.time, "sleep", slept.append)
    server.add("org/plain", Model(PLAIN))
    value = header if header == "1" else formatdate(time.time() + 2, usegmt=True)
    server.faults["/revision/main"].append(Fault(status=status, headers={"Retry-After": value}))
    said: list[str] = []
    assert names_in(pull(settings, said)) == READ
    assert len(slept) == 1 and 0 < slept[0] <= 2
    assert header == "date" or said[0] == f"the hub is busy (status {status}): waiting 1 s"


# ------------------------------------------------------------------ disks


def test_a_disk_that_is_too_small_is_known_before(server, settings, monkeypatch):
    server.add("org/plain", Model(PLAIN))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(CapacityError, match=r"needs 1\.0 MB more, and .* has 1\.0 MB free"):
        pull(settings)
    assert not any("/resolve/" in path for path in server.paths("hub")) and server.paths() == []
    nothing_half(settings)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_disk_that_becomes_full(server, settings):
    model = server.add("org/plain", Model(PLAIN))
    cache = RepositoryCache(settings.cache, "org/plain")
    cache.blobs.mkdir(parents=True)
    partial = cache.blobs / f"{model.sha256('model.safetensors')}.incomplete"
    partial.symlink_to("/dev/full")
    with pytest.raises(CapacityError, match="is full") as caught:
        pull(settings)
    assert "free space" in caught.value.remedy and stat.S_ISCHR(partial.stat().st_mode)
    nothing_half(settings)
    partial.unlink()
    assert names_in(pull(settings)) == READ


def test_a_cache_that_cannot_be_written(server, settings, tmp_path):
    server.add("org/plain", Model(PLAIN))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DownloadError, match="cannot be written: Not a directory"):
        pull(replace(settings, cache=tmp_path / "file" / "hub"))


# ------------------------------------------------------------------ tokens


def test_only_the_hub_gets_the_token(server, settings, capfd, caplog):
    server.add("org/plain", Model(PLAIN, private=True))
    said: list[str] = []
    pull(replace(settings, token=lambda: TOKEN), said)
    sent = {(where, headers.get("authorization")) for where, _, headers in server.requests}
    assert sent == {("hub", f"Bearer {TOKEN}"), ("files", None)}
    assert TOKEN not in "".join([*said, *capfd.readouterr(), caplog.text])


def test_a_renamed_repository_gets_the_token_on_the_same_host_alone(server, settings):
    server.add("org/plain", Model(PLAIN, private=True))
    there = "/api/models/org/plain/revision/main?blobs=true"
    server.faults["org/old/revision/main"].append(Fault(status=307, headers={"Location": there}))
    for name in ("config.json", "tokenizer.json", "generation_config.json", "model.safetensors"):
        location = f"/org/plain/resolve/{'a' * 40}/{name}"
        server.faults[f"org/old/resolve/{'a' * 40}/{name}"].append(Fault(status=307, headers={"Location": location}))
    assert names_in(pull(replace(settings, token=lambda: TOKEN), text="hf:org/old")) == READ
    server.faults["/revision/main"].append(Fault(status=302, headers={"Location": "file:///etc/passwd"}))
    with pytest.raises(DownloadError, match="answers with a redirect from http to file"):
        pull(settings)
    server.faults["/revision/main"] += [Fault(status=302, headers={"Location": "/x/revision/main"})] * 9
    with pytest.raises(DownloadError, match="redirects without end"):
        pull(settings)


def test_a_private_or_unknown_name(server, settings):
    server.add("org/plain", Model(PLAIN, private=True))
    with pytest.raises(UsageError, match="has no org/plain") as caught:
        pull(settings)
    assert "a private one needs a token" in caught.value.remedy
    with pytest.raises(UsageError, match=r"short names smollm2") as caught:
        pull(replace(settings, token=lambda: TOKEN), text="hf:HuggingFace/SmolLM2")
    assert TOKEN not in str(caught.value)


def test_a_gated_repository(server, settings):
    server.add("org/plain", Model(PLAIN, gated=True))
    with pytest.raises(DownloadError, match="is gated") as caught:
        pull(settings)
    assert f"accept the terms at {server.endpoint}/org/plain" in caught.value.remedy
    assert names_in(pull(replace(settings, token=lambda: TOKEN))) == READ


def test_a_wrong_token(server, settings):
    words = {"X-Error-Message": "Invalid credentials in Authorization header"}
    server.faults["/revision/main"].append(Fault(status=401, headers=words))
    with pytest.raises(DownloadError, match="refuses the token") as caught:
        pull(replace(settings, token=lambda: "hf_wrong"))
    assert "hf_wrong" not in str(caught.value)


# ------------------------------------------------------------------ what is not read, and no hub


@pytest.mark.parametrize(
    ("files", "error", "says"),
    [
        (
            {**SMALL, "pytorch_model.bin": b"x"},
            CheckpointError,
            r"pickles alone.*pytorch_model\.bin, which may",
        ),
        (
            {**SMALL, "model.pdiparams": b"x", "model.json": b"{}"},
            CheckpointError,
            r"org/plain has no \*\.safetensors, but model\.pdiparams, model\.json: weights.*fetch config\.json",
        ),
        ({"model_state.pdparams": b"x"}, CheckpointError, r"but model_state\.pdparams: a pickle of Paddle's"),
        ({"a-Q4_K_M.gguf": b"x", "a-Q8_0.gguf": b"x"}, UsageError, "may be 2 GGUF models: a-Q4_K_M, a-Q8_0"),
        ({**SMALL}, CheckpointError, "has no weights"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, CheckpointError, "but a LoRA adapter"),
        ({"model_index.json": b"{}", "a.safetensors": b"x"}, CheckpointError, "a pipeline of several models"),
    ],
)
def test_what_is_not_read_is_refused_before_anything_is_fetched(server, settings, files, error, says):
    server.add("org/plain", Model(files))
    with pytest.raises(error, match=says):
        pull(settings)
    assert len(server.requests) == 1 and not settings.cache.exists()


def test_no_network(server, settings):
    server.add("org/plain", Model(PLAIN))
    nowhere = replace(settings, endpoint="http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1:9 cannot be reached") as caught:
        pull(nowhere)
    assert "HTTPS_PROXY" in caught.value.remedy and not settings.cache.exists()
    folder = pull(settings)
    assert locate(name_of(), settings=nowhere).folder == folder


def test_a_plain_name_may_have_been_a_folder(settings):
    with pytest.raises(DownloadError) as caught:
        pull(replace(settings, endpoint="http://127.0.0.1:9"), text="models/llama")
    assert caught.value.what.startswith("'models/llama' is no folder, and is looked up on a hub: 127.0.0.1:9 cannot")


def test_offline_says_what_is_in_the_cache(server, settings):
    server.add("org/plain", Model(PLAIN))
    offline = replace(settings, offline=True)
    with pytest.raises(UsageError, match="downloads are off") as caught:
        locate(name_of(), settings=offline)
    assert "no model" in caught.value.there_is and server.requests == []
    pull(settings)
    with pytest.raises(UsageError, match="'org/other' is no folder") as caught:
        locate(name_of("org/other"), settings=offline)
    assert caught.value.there_is == f"in {settings.cache}: org/plain"
    assert "inferplane pull org/other" in caught.value.remedy


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"sha": "x", "siblings": []}'])
def test_what_is_no_hub(settings, server, body, monkeypatch):
    model = server.add("org/plain", Model(PLAIN))
    monkeypatch.setattr(model, "info", lambda: json.loads(body) if body[:1] != b"<" else "words")
    with pytest.raises(DownloadError, match="answers with no list of files"):
        pull(settings)


def test_names_that_lead_out_of_the_cache_are_not_files(server, settings):
    files = {**PLAIN, "../../escape.safetensors": b"x", ".hidden.model": b"x", "sub/model.safetensors": b"y"}
    server.add("org/plain", Model(files))
    assert names_in(pull(settings)) == READ


# ------------------------------------------------------------------ memory


def test_what_is_too_large_for_memory_is_said_before(server, settings, monkeypatch):
    monkeypatch.setattr("inferplane.hub.lookup.memory_bytes", lambda: 800_000)
    server.add("org/plain", Model(PLAIN))
    said: list[str] = []
    pull(settings, said)
    assert said[1].startswith("its weights, 1.0 MB, are more than this machine's memory, 800 kB")
    assert "--quantization weight_only_int8 takes about half" in said[1]
    assert explain_memory(10, 100, "x") == explain_memory(10, None, "x") == ""
    assert "weight_only_int4 takes about a quarter" in explain_memory(100, 40, "x")
    assert explain_memory(100, 20, "x").endswith("too many for it when quantized")


def test_every_error_has_three_parts(server, settings):
    with pytest.raises(InferplaneError) as caught:
        pull(settings)
    assert caught.value.what and caught.value.remedy
