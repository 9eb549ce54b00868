"""Promises of SECURITY.md about checkpoints, importing and plugins: one test each, of the promise's name."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import inferplane
from inferplane import LLM, SamplingParams
from inferplane.confined import ConfinedProcess
from inferplane.errors import CheckpointError, InferplaneError, UsageError
from inferplane.models import SafetensorsFolder
from tests.unit.models.reading import test_hostile_index as index
from tests.unit.models.reading.test_hostile_safetensors import CASES
from tests.unit.support.hostile import entry, safetensors
from tests.unit.test_confined import REFUSED, SCRIPT

DEMO = Path(inferplane.__file__).parent / "models" / "demo"
MARK = "code of a checkpoint ran"
DEVICES = ("npu", "cuda", "dcu", "gcu", "xpu", "intel", "kunlun")


class Evil:
    """What makes a folder where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self._mark,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo checkpoint, to be made hostile."""
    return Path(shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("draft", "eagle")))


def change_config(folder: Path, name: str = "config.json", **changes: object) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_loading_runs_no_code(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"import pathlib\npathlib.Path({str(mark)!r}).write_text({MARK!r})\n"
    for name in ("evil.py", "modeling_evil.py", "tokenization_evil.py", "__init__.py", "conftest.py", "setup.py"):
        (folder / name).write_text(code)
    kinds = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
    change_config(folder, auto_map={kind: f"evil.{kind}" for kind in kinds}, trust_remote_code=True)
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_evil.Slow", "tokenization_evil.Fast"]}}
    change_config(folder, "tokenizer_config.json", **tokenizer, trust_remote_code=True)
    with LLM(folder, device="cpu") as llm:
        assert llm.generate(["def main():"], SamplingParams(max_tokens=4, temperature=0))[0].text
    for changes in ({"architectures": ["EvilForCausalLM"]}, {"model_type": "evil", "architectures": ["evil.Model"]}):
        change_config(folder, **changes)
        with pytest.raises(InferplaneError):
            LLM(folder, device="cpu")
    assert not mark.exists()


def test_no_pickle_is_loaded(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    weights = folder / "model.safetensors"
    names = (
        "pytorch_model.bin",
        "model.pt",
        "model.pth",
        "consolidated.00.pth",
        "adapter_model.bin",
        "training_args.bin",
    )
    for name in names:
        (folder / name).write_bytes(pickle.dumps(Evil(mark)))
    with LLM(folder, device="cpu") as llm:
        assert llm.generate(["x"], SamplingParams(max_tokens=1))
    weights.unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        LLM(folder, device="cpu")
    where = dict.fromkeys(("a", "b"), "pytorch_model.bin")
    for listed in ("pytorch_model.bin.index.json", index.INDEX):
        (folder / listed).write_text(json.dumps({"weight_map": where}))
        with pytest.raises(CheckpointError):
            LLM(folder, device="cpu")
    weights.write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(CheckpointError):
        LLM(folder, device="cpu")
    assert not mark.exists()


@pytest.mark.parametrize("case", index.FILES)
def test_shards_stay_in_their_folder(case: str, tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    whole = safetensors({"a": entry()}, bytes(8))
    for place in (tmp_path / index.ONE, inside / index.ONE):
        place.write_bytes(whole)
    index.write(inside, {"a": index.ONE})
    assert set(SafetensorsFolder(inside).names()) == {"a"}
    index.write(inside, {"a": index.ONE, "b": index.FILES[case]})
    with pytest.raises(CheckpointError, match="is not a shard index"):
        SafetensorsFolder(inside)


def test_malformed_weights_are_refused(tmp_path: Path) -> None:
    for name, (content, _) in CASES.items():
        (tmp_path / "model.safetensors").write_bytes(content)
        try:
            SafetensorsFolder(tmp_path)
        except CheckpointError:
            continue
        pytest.fail(f"{name} was accepted")
    assert len(CASES) > 30


HARM = {
    "code": "{{ cycler.__init__.__globals__.os.system('id') }}",
    "classes": "{{ ''.__class__.__mro__ }}",
    "a file": "{{ open('/etc/passwd') }}",
    "a file, included": "{% include '/etc/passwd' %}",
    "time": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "size": "{% for i in range(99000) %}{{ 'x' * 1000 }}{% endfor %}",
    "memory": "{{ 'x' * 4000000000 }}",
}
"""What a template tries to take; the server's renderer is the same (`tests/serving/test_templates.py`)."""


def test_templates_are_confined(folder: Path) -> None:
    for name, source in {"none": "{{ messages[0].content }}", **HARM}.items():
        change_config(folder, "tokenizer_config.json", chat_template=source)
        with LLM(folder, device="cpu", load_format="dummy") as llm:
            if name == "none":
                assert llm.tokenizer.chat([{"role": "user", "content": "x"}])
                continue
            with pytest.raises(UsageError):
                llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=1))


def test_helper_processes_have_no_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, old = tmp_path / "script.py", tmp_path / "old"
    script.write_text(SCRIPT)
    old.write_text("unchanged")
    for name in ("INFERPLANE_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "s3cret")
    helper = ConfinedProcess(script, "1", 60)
    try:
        assert "s3cret" not in helper.ask("dict(os.environ)", 30)
        tried = [code for code, measure in REFUSED.values() if measure in helper.measures]
        for code in tried:
            found = helper.ask(code.format(old=str(old), new=str(tmp_path / "new")), 30)
            assert found in {"PermissionError", "MemoryError", "OSError"}, code
        assert old.read_text() == "unchanged" and not (tmp_path / "new").exists()
        assert tried, "this system confines nothing"
    finally:
        helper.close()


QUIET = """
import os, sys
from pathlib import Path

before, modules, events = dict(os.environ), set(sys.modules), []
watched = ("socket.connect", "socket.bind", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec")
sys.addaudithook(lambda event, given: events.append(event) if event in watched else None)
import inferplane, inferplane.plugin

vendors = ("torch_npu", "triton", "vllm_", "kunlun_ops", "xspeedgate", "lightop", "flash_", "torch_gcu", "intel_ext")
found = [name for name in set(sys.modules) - modules if name.startswith(vendors)]
print([events, dict(os.environ) == before, found])
"""


def test_importing_is_quiet() -> None:
    """torch is loaded first: what it does by itself is its own."""
    code = f"import torch\n{QUIET}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[[], True, []]", done.stdout


LISTED = """
import sys
from inferplane.plugins import host

print(sorted({device.name for device in host().devices()}))
print(sorted(name for name in sys.modules if name.startswith("inferplane_")))
"""


def test_plugins_can_be_left_out() -> None:
    def loaded(value: str) -> list[str]:
        variables = {**os.environ, "INFERPLANE_PLUGINS": value}
        done = subprocess.run(
            [sys.executable, "-c", LISTED], capture_output=True, text=True, timeout=300, check=True, env=variables
        )
        return done.stdout.splitlines()

    devices, modules = loaded("only,inferplane_cpu.plugin")
    assert devices == "['cpu']"
    assert "inferplane_cpu" in modules and not any(f"inferplane_{name}" in modules for name in DEVICES)
