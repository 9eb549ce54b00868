"""Exports: the answers of the model they were made from, nothing packed at the start, and refusals by name."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inferplane import LLM
from inferplane.cli import main
from inferplane.engine.runner.exports.export import export_model
from inferplane.engine.runner.loading import weight_loading
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.options import RunnerOptions
from inferplane.errors import InferplaneError, KernelError
from inferplane.models.exported import Manifest
from inferplane.models.exported.writer import RankWriter
from inferplane.plugins import host
from inferplane.types import PackedStorage
from inferplane_cpu.kernels.panel_storage import VERSION
from tests.e2e.checkpoints import PROMPT, edit_config
from tests.e2e.sharing import share
from tests.e2e.tiny_models import make

SECONDS = 240
CASES = {
    "llama-gqa": {"quantization": "weight_only_int4"},
    "llama-attention_bias": {},
    "qwen3_moe-plain": {"quantization": "weight_only_int8"},
    "deepseek-q_lora": {"quantization": "a8w8_fp8_wint4"},
}
BFLOAT16 = {"device": "cpu", "dtype": "bfloat16"}


def export(model, folder, **options):
    return export_model(ModelFiles(model), host(), "cpu", RunnerOptions(**{"dtype": "bfloat16", **options}), folder)


def logits(model, **options):
    with LLM(model, device="cpu", **options) as llm:
        return llm.logits(PROMPT)[0]


@pytest.fixture
def cli(capsys, monkeypatch):
    """Runs the command in this process; returns exit code, standard output and standard error."""
    monkeypatch.setattr(main, "prepare", lambda environment: None)

    def run(*words: str) -> tuple[int, str, str]:
        code = main.main(words)
        return (code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint, and its export in int4."""
    folder = tmp_path_factory.mktemp("small")
    make("llama", "gqa", folder / "model", torch.bfloat16)
    export(folder / "model", folder / "made", quantization="weight_only_int4")
    return folder


@pytest.fixture
def made(small, tmp_path):
    """An export of one's own to spoil."""
    shutil.copytree(small / "made", tmp_path / "made")
    return tmp_path / "made"


@pytest.mark.parametrize("case", CASES)
def test_the_same_answers_and_nothing_is_packed(case, tmp_path, monkeypatch):
    make(*case.split("-"), tmp_path / "model", torch.bfloat16)
    want = logits(tmp_path / "model", dtype="bfloat16", **CASES[case])
    manifest = export(tmp_path / "model", tmp_path / "made", **CASES[case])
    read = weight_loading.load_packed

    def refuse(value):
        raise AssertionError("it is packed at the start")

    def read_alone(plan, *args):
        for i, packings in plan.packings.items():
            if plan.weights[i].make is None:
                args[-1][i] = {label: replace(packing, fn=refuse) for label, packing in packings.items()}
        return read(plan, *args)

    monkeypatch.setattr(weight_loading, "load_packed", read_alone)
    assert torch.equal(logits(tmp_path / "made"), want)
    assert manifest.rank_bytes == [sum(tensor_bytes(tmp_path / "made" / "rank_0"))]


def tensor_bytes(rank: Path):
    """Bytes of the tensors of a rank's files but for those that align the others."""
    from inferplane.models.reading.safetensors_header import read_header

    for path in rank.glob("*.safetensors"):
        yield from (entry.nbytes for name, entry in read_header(path).items() if not name.startswith("pad."))


def test_ranks_read_their_share(tmp_path, cli):
    make("qwen3_moe", "plain", tmp_path / "model")
    words = ("--device", "cpu", "--tensor-parallel-size", "2", "--out", tmp_path / "made", "--json")
    code, out, err = cli("export", *map(str, (tmp_path / "model", *words)))
    assert code == 0, err
    facts = json.loads(out)
    share(tmp_path / "model", tmp_path / "want", seconds=SECONDS)
    share(tmp_path / "made", tmp_path / "got", seconds=SECONDS)
    want, got = (torch.load(tmp_path / name) for name in ("want", "got"))
    assert got["tokens"] == want["tokens"] and all(map(torch.equal, got["logits"], want["logits"]))
    with LLM(tmp_path / "model", device="cpu") as llm:
        plan = llm.runner.plan
        made = [(plan.weights[i], names) for i, names in plan.packings.items() if plan.weights[i].make is not None]
        constants = sum(plan.nbytes(weight, name) for weight, names in made for name in names)
        whole = llm.runner.loaded.nbytes - constants
    assert facts["rank_bytes"] == [nbytes - constants for nbytes in got["bytes"]], "what a rank reads of the checkpoint"
    assert all(whole / 2 < nbytes < whole for nbytes in facts["rank_bytes"])
    with pytest.raises(InferplaneError, match=r"export for 2 device\(s\) that share the model; these are 1"):
        LLM(tmp_path / "made", device="cpu")
    code, out, _ = cli("estimate", str(tmp_path / "made"), "--device", "cpu", "--json")
    assert code == 0 and json.loads(out)["devices"] == 2


def test_every_verb_takes_the_folder(small, cli):
    words = (str(small / "made"), "--device", "cpu", "--json")
    code, out, err = cli("explain", *words)
    assert code == 0 and json.loads(out)["weight_bytes"] > 0, err
    code, out, err = cli("estimate", *words)
    assert code == 0 and json.loads(out)["devices"] == 1, err
    code, _, err = cli("export", *words, "--out", str(small / "again"))
    assert code == 2 and "is an export" in err
    code, _, err = cli("export", str(small / "model"), "--device", "cpu", "--out", str(small / "made"))
    assert code == 2 and "exists" in err


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "float32"}, r"dtype = 'float32', but .* was exported with 'bfloat16'"),
        ({"quantization": "weight_only_int8"}, r"quantization = 'weight_only_int8', but .* with 'weight_only_int4'"),
        ({"ops": {"linear": "reference"}}, r"does not have|no weights in packing 'plain'"),
    ],
)
def test_other_options_are_refused(options, match, small):
    with pytest.raises(InferplaneError, match=match):
        LLM(small / "made", device="cpu", **options)


def test_options_may_be_repeated(small):
    again = {"dtype": "bf16", "quantization": "weight_only_int4"}
    assert torch.equal(logits(small / "made", **again), logits(small / "made"))


def test_another_device_and_other_hardware_are_refused(small, made, monkeypatch, cli):
    code, _, err = cli("explain", str(made), "--device", "npu")
    assert code == 2 and "is an export for device 'cpu'; this is 'npu'" in err
    edit(made, arch="riscv", features={**manifest(made)["features"], "sparse": True, "tiles": None})
    with pytest.raises(InferplaneError) as refused:
        LLM(made, device="cpu")
    for words in ("exported on another kind of cpu", "architecture 'riscv' there", "'sparse' present there, unknown"):
        assert words in str(refused.value)


def manifest(folder):
    return json.loads((folder / "export.json").read_text())


def edit(folder, **changes):
    (folder / "export.json").write_text(json.dumps(manifest(folder) | changes))


def version(folder, label, version):
    """The export as a release would have written it whose packing had another version."""
    packings = manifest(folder)["packings"]
    packings[label]["version"] = version
    lines = "".join(f"{k}\0{v['version']}\n" for k, v in sorted(packings.items()))
    edit(folder, packings=packings, packing_hash=hashlib.sha256(lines.encode()).hexdigest(), inferplane="0.1.9")


def test_older_exports_are_refused_by_name(made):
    label = next(label for label in manifest(made)["packings"] if label != "canonical")
    version(made, label, "0")
    with pytest.raises(
        InferplaneError, match=rf"by inferplane 0.1.9, has packing '{label}' in version '0'.*'{VERSION}'"
    ):
        LLM(made, device="cpu")
    edit(made, schema=0)
    with pytest.raises(InferplaneError, match=r"export of schema 0, made by inferplane 0.1.9"):
        LLM(made, device="cpu")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"packing_hash": "0"}, "contradicts itself"),
        ({"ranks": 2}, "contradicts itself"),
        ({"rank_bytes": ["1"]}, "contradicts itself"),
        ({"packings": {"native.panels": 1}}, "contradicts itself"),
        ({"layouts": ["0"]}, "SHA-256 is another"),
        ({"features": []}, "'features' is missing or of another kind"),
        ({"device": None}, "'device' is missing or of another kind"),
    ],
)
def test_damaged_manifests(changes, match, made):
    edit(made, **changes)
    with pytest.raises(InferplaneError, match=match):
        LLM(made, device="cpu")


def test_damaged_files(made):
    file = made / "rank_0" / "weights-00001.safetensors"
    whole = file.read_bytes()
    spoiled = bytearray(whole)
    spoiled[-1000] ^= 1
    for content, match in (
        (bytes(spoiled), r"weights-00001.safetensors is damaged: the checksum of .* is another"),
        (whole[:-1], "truncated"),
        (b"", "no safetensors file"),
    ):
        file.write_bytes(content)
        with pytest.raises(InferplaneError, match=match):
            LLM(made, device="cpu")
    file.unlink()
    with pytest.raises(InferplaneError, match="cannot be opened"):
        LLM(made, device="cpu")
    (made / "export.json").write_text("{")
    with pytest.raises(InferplaneError, match="not valid JSON"):
        LLM(made, device="cpu")


def relay(folder, change):
    """Change the layout, as somebody would who wants the kernels to read what is not there."""
    path = folder / "rank_0" / "layout.json"
    layout = json.loads(path.read_text())
    layout = change(layout) or layout
    path.write_text(json.dumps(layout))
    edit(folder, layouts=[hashlib.sha256(path.read_bytes()).hexdigest()])


def swap(layout):
    """Give the embedding's tensor to the first norm."""
    number = str(layout["sites"]["embed.weight"])
    norm = next(str(n) for site, n in layout["sites"].items() if site.endswith("norm.weight"))
    layout["weights"][norm]["canonical"] = layout["weights"][number]["canonical"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (swap, "its shape is"),
        (lambda x: x["files"].append("../../x.safetensors"), "names other files"),
        (lambda x: x["files"].append("absent.safetensors"), "cannot be opened"),
        (lambda x: x["sites"].clear(), "does not have embed.weight"),
        (lambda x: x["weights"].clear(), "a weight is not there"),
        (lambda x: x["weights"]["0"].clear(), "does not have embed.weight"),
        (lambda x: [1], "is no layout"),
        (lambda x: {**x, "sites": 3}, "is no layout"),
        (lambda x: {**x, "weights": {"0": {"canonical": {"tensors": {"data": [1, 2]}}}}}, "is no layout|not there"),
        (lambda x: x["weights"]["0"]["canonical"]["tensors"].update(data=["lost", 1]), "lacks the tensor lost"),
        (lambda x: x["weights"]["0"]["canonical"].update(facts={"bits": 4}), "cannot be read in packing"),
    ],
)
def test_hostile_layouts(change, match, made):
    relay(made, change)
    with pytest.raises(InferplaneError, match=match):
        LLM(made, device="cpu")


def test_a_config_that_does_not_belong_to_it(made):
    edit_config(made, intermediate_size=160)
    with pytest.raises(InferplaneError, match=r"cannot be read in packing|its shape is"):
        LLM(made, device="cpu")


def test_an_eagle_head_is_refused(made):
    from tests.e2e.drafters import eagle_head

    config = json.loads((made / "config.json").read_text())
    eagle_head(made.parent / "head", config["hidden_size"], config["vocab_size"])
    drafting = {"method": "eagle", "num_speculative_tokens": 1, "model": str(made.parent / "head")}
    with pytest.raises(InferplaneError, match=r"EAGLE head with .* is not implemented"):
        LLM(made, device="cpu", speculative_config=drafting)


# ------------------------------------------------------------------ writing


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_failure(error, small, tmp_path, monkeypatch):
    written = []
    write = RankWriter.write

    def fail(self, *args):
        assert not (tmp_path / "out").exists(), "nothing is under its name before all is written"
        written.append(args)
        if len(written) > 3:
            raise error
        write(self, *args)

    monkeypatch.setattr(RankWriter, "write", fail)
    with pytest.raises((InferplaneError, KeyboardInterrupt)) as raised:
        export(small / "model", tmp_path / "out")
    assert len(written) == 4 and not any(tmp_path.iterdir())
    if isinstance(error, OSError):
        assert "cannot be written: No space left on device" in str(raised.value)


def test_what_cannot_be_written_is_refused_by_name(small, tmp_path, monkeypatch):
    from inferplane_cpu.kernels import panel_storage

    for packing in (panel_storage.PACKING, panel_storage.MXFP4_PACKING):
        monkeypatch.setitem(packing.__dict__, "storage", PackedStorage.refuse("it lives on the device alone"))
    with pytest.raises(KernelError, match=r"'native.panels' of .* cannot be written.*lives on the device alone"):
        export(small / "model", tmp_path / "out", quantization="weight_only_int4")
    monkeypatch.setitem(panel_storage.PACKING.__dict__, "storage", None)
    with pytest.raises(KernelError, match=r"'native.panels' of .*type Panels cannot be written"):
        export(small / "model", tmp_path / "out", quantization="weight_only_int4")
    assert not any(tmp_path.iterdir())


def test_files_beside_the_weights(small):
    found = {path.name for path in (small / "made").iterdir()}
    assert {"config.json", "export.json", "lock.json", "rank_0"} <= found and "model.safetensors" not in found
    read = Manifest.read(small / "made")
    assert read is not None and read.ranks == 1 and read.quantization == "weight_only_int4"
    panels = read.packings["native.panels"]
    assert panels["version"] == VERSION and any(name.startswith("native:") for name in panels["kernels"])
    assert Manifest.read(small / "model") is None


OWN = ({"draft_quantization": "weight_only_int8"}, {"mtp_files": "model"}, {"eagle": "model"})
WORDS = r"An export holds the model|draft_quantization = 'weight_only_int8': .* has no prediction layers"


@pytest.mark.parametrize("own", OWN)
def test_what_an_export_cannot_hold_is_refused_and_nothing_is_written(small, tmp_path, own):
    options = {name: ModelFiles(small / value) if value == "model" else value for name, value in own.items()}
    with pytest.raises(InferplaneError, match=WORDS):
        export(small / "model", tmp_path / "made", quantization="weight_only_int4", **options)
    assert not list(tmp_path.iterdir())
