"""Models in GGUF files: the logits are those of the folder that `convert` writes, and every verb takes one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.cli.main import main
from inferplane.engine import ModelFiles
from inferplane.errors import UsageError
from inferplane.models.convert import convert
from tests.e2e.gguf_files import convert_falcon_h1, convert_nemotron_h
from tests.e2e.tiny_models import logits_of as logits_of_transformers
from tests.e2e.tiny_models import prompts
from tests.families.cases import make
from tests.unit.gguf.files import SHAPES, llama, random_blocks, write

PROMPT = [1, 5, 9, 30]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A Llama of one layer with matrices in Q8_0."""
    return write(tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf", llama("Q8_0"))


def logits_of(model, dtype="float32"):
    with LLM(model, device="cpu", dtype=dtype, max_num_seqs=1, max_model_len=64) as llm:
        ids = llm.generate([PROMPT], SamplingParams(max_tokens=4, temperature=0))[0].token_ids
        return torch.as_tensor(llm.logits([PROMPT])[0]), list(ids)


def test_a_file_and_the_folder_made_from_it(file, tmp_path):
    convert(file, tmp_path / "folder")
    (got, ids), (want, wanted) = logits_of(file), logits_of(tmp_path / "folder")
    assert want.isfinite().all() and want.std() > 0
    assert (got - want).abs().max() <= 1e-5 * want.abs().max() and ids == wanted
    with pytest.raises(UsageError, match="exists"):
        convert(file, tmp_path / "folder")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "TQ2_0"])
def test_packed_weights_compute_as_their_values_do(kind, tmp_path):
    file = write(tmp_path / "tiny.gguf", llama(kind))
    convert(file, tmp_path / "folder")
    got, want = logits_of(file, "bfloat16")[0], logits_of(tmp_path / "folder")[0]
    rounded = logits_of(tmp_path / "folder", "bfloat16")[0]
    bound = max(2 * float((rounded - want).abs().max()), 0.01 * float(want.abs().max()))
    assert (got - want).abs().max() <= bound


def test_packed_and_plain_parts_of_a_fused_weight(tmp_path):
    tensors = llama("Q8_0")
    name, shape = "blk.0.attn_v.weight", SHAPES["blk.0.attn_v.weight"]
    file = write(tmp_path / "mixed.gguf", {**tensors, name: ("F16", random_blocks("F16", shape))})
    convert(file, tmp_path / "folder")
    got, want = logits_of(file)[0], logits_of(tmp_path / "folder")[0]
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_a_tied_head_is_the_packed_embedding(file):
    with LLM(file, device="cpu", max_num_seqs=1, max_model_len=64) as llm:
        model = llm.runner.model
        assert model.head.weight == model.embed.weight and model.head.weight.format == "int8_group32"


@pytest.mark.parametrize("kind", ["none", "no_vocab"])
def test_a_file_without_a_vocabulary_runs_on_token_ids(kind, tmp_path):
    file = write(tmp_path / "tiny.gguf", llama("Q8_0"), others={"tokenizer.ggml.model": kind})
    assert not ModelFiles(file).has_tokenizer
    assert len(logits_of(file)[1]) == 4


def test_packed_files_are_computed_in_bfloat16_and_converted_to_float32(file, tmp_path):
    assert ModelFiles(file).config["torch_dtype"] == "bfloat16"
    convert(file, tmp_path / "folder")
    assert ModelFiles(tmp_path / "folder").config["torch_dtype"] == "float32"
    plain = write(tmp_path / "plain.gguf", llama("F16"))
    assert ModelFiles(plain).config["torch_dtype"] == "float16"


def test_a_folder_with_one_file(file, tmp_path):
    (tmp_path / "model.gguf").symlink_to(file)
    (tmp_path / "mmproj-model.gguf").write_bytes(b"x")
    files = ModelFiles(tmp_path)
    assert files.has_weights and not files.has_tokenizer
    assert files.config["quantization_config"]["types"]["model.layers.0.mlp.up_proj.weight"] == "Q8_0"
    (tmp_path / "other.gguf").symlink_to(file)
    with pytest.raises(UsageError, match=r"holds 2 GGUF models: model\.gguf, other\.gguf"):
        ModelFiles(tmp_path)


RECURRENT = [
    ("nemotron_h", "mixed", convert_nemotron_h, {}),
    ("nemotron_h", "odd", convert_nemotron_h, {}),
    ("nemotron_h", "experts", convert_nemotron_h, {}),
    ("falcon_h1", "factors", convert_falcon_h1, {"mamba_norm_before_gate": False}),
    ("falcon_h1", "norms", convert_falcon_h1, {"mamba_d_ssm": 128, "tie_word_embeddings": False, "mlp_bias": False}),
]
"""Family, case, how its file is written, and entries without which llama.cpp would compute something else."""


@pytest.mark.parametrize(("family", "case", "write_file", "changes"), RECURRENT)
def test_models_with_mamba_2(family, case, write_file, changes, tmp_path):
    """A file as llama.cpp's converter writes it gives transformers' logits, and so does the folder made of it."""
    model = make(family, case, tmp_path / "model", **changes)
    file = write_file(tmp_path / "model", model.config, tmp_path / "model.gguf")
    ids = prompts(model.config.vocab_size, (70,))
    want = logits_of_transformers(model, ids[0])
    with LLM(file, device="cpu", dtype="float32", max_num_seqs=1) as llm:
        assert not llm.runner.loaded.unused
        got = llm.logits(ids)[0]
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    convert(file, tmp_path / "folder")
    again = type(model).from_pretrained(tmp_path / "folder").eval()
    assert (logits_of_transformers(again, ids[0]) - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("verb", ["explain", "estimate"])
def test_verbs(file, verb, capsys):
    assert main([verb, str(file), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_show(file, capsys):
    assert main(["show", str(file), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["architecture"] == "LlamaForCausalLM" and data["types"] == {"Q8_0": 8, "F32": 3}
    assert data["files"] == {file.name: file.stat().st_size}
    assert main(["show", str(file)]) == 0
    assert "8 in Q8_0, 3 in F32" in capsys.readouterr().out


def test_explain_says_what_is_expanded(tmp_path, capsys):
    file = write(tmp_path / "tiny-TQ2_0.gguf", llama("TQ2_0"))
    assert main(["explain", str(file), "--device", "cpu"]) == 0
    assert "packed matrices that are expanded while they are read: 8 in TQ2_0" in capsys.readouterr().out


def test_two_processes_derive_one_folder(file, tmp_path):
    code = (
        "from pathlib import Path; from inferplane.gguf.opened import GGUFModel; "
        f"print(GGUFModel.open(Path({str(file)!r})).derive_folder())"
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": ""}
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    folders = {process.communicate()[0] for process in running}
    assert len(folders) == 1 and all(process.returncode == 0 for process in running)
    assert [path.name for path in (tmp_path / "inferplane" / "gguf").iterdir()] == [
        folders.pop().strip().rpartition("/")[2]
    ]
