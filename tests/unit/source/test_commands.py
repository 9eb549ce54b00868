"""The documents' lines of predictor.py, export_model.py and download_model.py, run on a small model of a stand-in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from inferplane.errors import CapacityError, UsageError
from inferplane.models.exported import Manifest
from inferplane.serving.settings import FIELDS
from inferplane.source import download_model
from inferplane.source.__main__ import main
from inferplane.source.flags import MODEL_FLAGS
from tests.e2e.small_r1 import write
from tests.unit.hub.conftest import VARIABLES
from tests.unit.hub.hub_server import HubServer, Model, serving
from tests.unit.support.documents import DocumentedCommand, commands_of

REPOSITORIES = (
    *("deepseek-ai/DeepSeek-R1", "meta-llama/Llama-2-7b-chat-hf", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
)
QUANTIZATIONS = FIELDS["quantization"].metadata["choices"]
PREDICTORS = [c for c in commands_of("python ") if "predictor.py" in c.text]
EXPORTS = [c for c in commands_of("python ") if "export_model.py" in c.text]
DOWNLOADS = commands_of("python download_model.py")
SHORT = {"--max_length": "4", "--total_max_length": "64"}
"""Sizes of the small model in place of those of 8K and 2K tokens."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with serving() as server:
        files = write(tmp_path_factory.mktemp("small") / "model")
        for repository in REPOSITORIES:
            server.add(repository, Model(files))
        yield server


@pytest.fixture
def online(monkeypatch, tmp_path, hub: HubServer):
    """Downloads are allowed, and lead to the stand-in; the working folder is an empty one."""
    from huggingface_hub import constants

    for name in (*VARIABLES, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "INFERPLANE_OFFLINE", "INFERPLANE_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("INFERPLANE_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)


def words_of(command: DocumentedCommand, **changes: str) -> list[str]:
    """A line as words for `main`, as the scripts in deploy/source pass them on; `changes` are values of flags."""
    values = {name: value.replace("$PWD", ".") for name, value in command.variables.items()}
    words = DocumentedCommand(command.text, values).words
    at = next(n for n, word in enumerate(words) if word.endswith((".py", ".launch")))
    words = [words[at].rpartition(".py")[0] or "launch", *words[at + 1 :]]
    for flag, value in {**SHORT, **{f"--{name}": value for name, value in changes.items()}}.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    return words


def on_one_machine(words: list[str]) -> list[str]:
    """A line for two machines, without their addresses."""
    if "--ips" in words:
        at = words.index("--ips")
        words = words[:at] + words[at + 2 :]
    return words


def value_of(words: list[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


@pytest.mark.parametrize("command", PREDICTORS, ids=lambda c: f"{c.variables.get('QUANT_MODE')} {c.text[:60]}")
def test_a_line_of_predictor_runs(command, online, tmp_path, capsys):
    """`--mode static` reads the exported model, here the one that was exported from."""
    model = REPOSITORIES[0] if "OUTPUT_PATH" in command.variables else None
    words = words_of(command, **({"model_name_or_path": model} if model else {}))
    if "--ips" in words:  # 16 devices on two machines: as it stands it ends with that
        assert main(words) == 2
        assert "16 processes (MP_NUM) on 2 machines need 8 devices on each" in capsys.readouterr().err
    quantization = value_of(words, "--quant_type")
    code = main(on_one_machine(words))
    said = " ".join(capsys.readouterr().err.split())
    if quantization is not None and quantization not in QUANTIZATIONS:
        assert code == 2 and quantization in said
        return
    assert code == 0, said
    (line,) = (tmp_path / "output.json").read_text(encoding="utf-8").splitlines()
    assert set(json.loads(line)) == {"src", "tgt", "output"} and json.loads(line)["output"]
    needless = [f"--{flag.name}" for flag in MODEL_FLAGS if flag.needless and f"--{flag.name}" in words]
    assert needless and all(flag in said for flag in needless) and said.count("no switch is needed for") == 1
    if "launch" in words[0]:
        assert "8 devices are requested (MP_NUM), and there is one: the model is whole on it" in said


@pytest.mark.parametrize("command", DOWNLOADS, ids=lambda c: c.text[24:])
def test_a_line_of_download_model_runs(command, online, hub, tmp_path, capsys):
    words = words_of(command)
    code = main(words)
    shown = capsys.readouterr()
    name = command.variables["model_name"]
    assert code == 0 and shown.out.strip() == name, shown.err
    folder = tmp_path / name
    assert (folder / "config.json").read_bytes() == hub.models[REPOSITORIES[0], "main"].files["config.json"]
    assert ("each of the 2 machines downloads all of them" in shown.err) == ("--nnodes 2" in command.text)
    assert ("nothing is written to" in shown.err) == ("--speculate_model_path" in command.text)
    asked = len(hub.paths())
    assert main(words) == 0 and len(hub.paths()) == asked  # what is there is used


def test_prompts_of_a_file_are_continued(online, tmp_path, capsys):
    lines = [{"src": "Hello", "tgt": "World"}, {"src": ["Hello", "And?"], "tgt": ["World", ""]}]
    (tmp_path / "data.json").write_text("\n".join(map(json.dumps, lines)))
    words = ["predictor", "--model_name_or_path", REPOSITORIES[0], "--max_length", "3", "--decode_strategy"]
    words += ["greedy_search", "--data_file", "data.json", "--output_file", "out.json", "--batch_size", "2"]
    assert main(words) == 0
    found = [json.loads(line) for line in (tmp_path / "out.json").read_text(encoding="utf-8").splitlines()]
    assert [(line["src"], line["tgt"]) for line in found] == [(line["src"], line["tgt"]) for line in lines]
    assert "***********Output**********" in capsys.readouterr().out
    assert main([*words, "--src_length", "2"]) == 1 and "--src_length 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage: python -m inferplane.source COMMAND"),
        (["train"], "There is no command 'train'"),
        (["predictor"], "There is no model"),
        (["predictor", "--model", "demo"], "has no option '--model'"),
        (["predictor", "--model_name_or_path", "demo", "--speculate_max_draft_token_num", "6"], "from 1 to 5"),
        (["predictor", "--model_name_or_path", "demo", "--speculate_method", "guess"], "inference_with_reference"),
        (["predictor", "--model_name_or_path", "demo", "--inference_model", "maybe"], "1, true, yes, on"),
        (["predictor", "--model_name_or_path", "demo", "--decode_strategy", "beam_search"], "sampling, greedy_search"),
        (["predictor", "--model_name_or_path", "demo", "--data_file", "absent"], "absent cannot be read"),
        (["predictor", "--model_name_or_path", "deepseek-ai/DeepSeek-R1-3nodes"], "DeepSeek-R1-2nodes/a8w8_fp8"),
        (["export_model", "--model_name_or_path", "demo"], "pass --output_path"),
        (["download_model", "--mode", "slave"], "--mode slave without further machines"),
        (["download_model", "--mode", "other"], "master, slave"),
        (["download_model", "--model_name", "demo"], "is no name of a model on a hub"),
        (["launch", "--gpus", "0", "train.py"], "'train' is no script that is launched"),
        (["launch", "--gpus", "2,3", "predictor.py"], "processes take the visible devices, from 0"),
        (["stop_server", "now"], "seconds to wait"),
    ],
)
def test_a_slip_is_one_clear_error(words, said, capsys):
    assert main(words) == 2
    shown = capsys.readouterr()
    assert said in shown.out + shown.err and "Traceback" not in shown.err


@pytest.mark.parametrize("command", EXPORTS, ids=lambda c: f"{c.variables['QUANT_MODE']} {'--block_attn' in c.text}")
def test_a_line_of_export_model_parses(command):
    """Its flags; what it writes is tested where models are exported."""
    from inferplane.source.flags import EXPORT_FLAGS, engine_options, explain_needless, model_of, parse, speculation

    words = words_of(command)
    flags = words[words.index("export_model.py") + 1 :]
    args = parse("export_model", EXPORT_FLAGS, flags, "")
    model = model_of(args)
    assert model.repository == REPOSITORIES[0]
    assert engine_options(args, model)["quantization"] == command.variables["QUANT_MODE"]
    assert speculation(args, model) == {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 1}
    assert "--append_attn" in explain_needless(EXPORT_FLAGS, args.given)


@pytest.mark.parametrize("command", EXPORTS, ids=lambda c: f"{c.variables['QUANT_MODE']} {'--block_attn' in c.text}")
def test_a_line_of_export_model_runs(command, online, tmp_path, capsys):
    """For the 16 devices of its two machines one process writes all parts; the small model is divided by two."""
    words = words_of(command, output_path="made", gpus="0")
    code = main(words)
    shown = capsys.readouterr()
    assert code == 0 and shown.out == "made\n", shown.err
    assert "this process writes the parts of all 2 devices" in " ".join(shown.err.split())
    manifest = Manifest.read(tmp_path / "made")
    assert manifest is not None and manifest.ranks == 2 and manifest.quantization == command.variables["QUANT_MODE"]


def test_prediction_layers_are_exported_in_their_own_format(online, tmp_path, capsys):
    """The documents' name of a model in int4 whose prediction layers are in int8; the folder drafts as it says."""
    name = "deepseek-ai/DeepSeek-R1-MTP/weight_only_int4"
    words = ["--model_name_or_path", name, "--dtype", "bfloat16"]
    assert main(["export_model", *words, "--output_path", "made"]) == 0, capsys.readouterr().err
    manifest = Manifest.read(tmp_path / "made")
    assert (manifest.quantization, manifest.draft_quantization) == ("weight_only_int4", "weight_only_int8")
    (tmp_path / "data.json").write_text(json.dumps({"src": "Hello", "tgt": ""}))
    run = ["predictor", "--data_file", "data.json", "--max_length", "4", "--decode_strategy", "greedy_search"]
    found = []
    for model, more in ((name, ()), ("made", ("--speculate_method", "mtp")), ("made", ())):
        changed = [*run, *words[2:], "--model_name_or_path", model, "--output_file", "out.json", *more]
        assert main(changed) == 0, capsys.readouterr().err
        found.append((tmp_path / "out.json").read_text())
    assert found[0] == found[1] == found[2]


def test_scripts_pass_their_words_on(tmp_path):
    folder = Path(__file__).parents[3] / "deploy" / "source"
    for name in ("predictor", "export_model", "download_model"):
        assert f'main(["{name}", *sys.argv[1:]])' in (folder / f"{name}.py").read_text()
    assert 'main(["launch", *sys.argv[1:]])' in (folder / "paddle" / "distributed" / "launch.py").read_text()
    assert all(os.access(folder / name, os.X_OK) for name in ("start_server", "stop_server"))


def test_a_folder_that_exists_is_no_name_of_the_source_system(tmp_path, monkeypatch):
    from inferplane.source.flags import PREDICTOR_FLAGS, model_of, parse, speculation

    monkeypatch.chdir(tmp_path)
    for name in ("downloads/org/name", "deepseek-ai/DeepSeek-R1-FP8/"):
        words = ["--model_name_or_path", name, "--draft_model_name_or_path", name, "--speculate_method", "mtp"]
        (tmp_path / name).mkdir(parents=True)
        args = parse("predictor", PREDICTOR_FLAGS, words, "")
        assert model_of(args).repository == name
        args.model_name_or_path = "other"
        assert speculation(args, model_of(args))["model"] == name


def test_a_refused_prompt_leaves_the_old_results(online, tmp_path, capsys):
    lines = [{"src": "Hello"}, {"src": "Hello, this prompt has more tokens than the others"}]
    (tmp_path / "data.json").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "output.json").write_text("old")
    words = ["predictor", "--model_name_or_path", REPOSITORIES[0], "--data_file", "data.json", "--src_length", "12"]
    assert main([*words, "--max_length", "2"]) == 1
    shown = capsys.readouterr()
    assert "--src_length 12" in shown.err and "Output" not in shown.out
    assert (tmp_path / "output.json").read_text() == "old"


def test_a_folder_for_results_must_exist_before_a_model_is_loaded(tmp_path, capsys):
    words = ["predictor", "--model_name_or_path", str(tmp_path), "--output_file", str(tmp_path / "absent" / "out.json")]
    assert main(words) == 2 and "cannot be written: No such file" in capsys.readouterr().err


def test_counts_are_whole_numbers(capsys):
    for text in ("--5", "5-", "²", "1_0"):
        assert main(["predictor", "--model_name_or_path", "demo", f"--max_length={text}"]) == 2
        assert "whole numbers of 1 and more" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--device=cpu"], ["--device", "cpu"]])
def test_a_launcher_reads_the_device_in_each_form(flags, monkeypatch):
    from inferplane.cli.screen import Screen
    from inferplane.source import launch

    devices = []
    monkeypatch.setattr(launch, "launch_ranks", lambda request, device, *others: devices.append(device))
    monkeypatch.setattr(launch.predictor, "run", lambda words, screen: 0)
    assert launch.run(["predictor.py", *flags], Screen()) == 0 and devices == ["cpu"]


def test_a_server_starts_with_the_settings_of_its_options(tmp_path, monkeypatch):
    from inferplane.cli.screen import Screen
    from inferplane.source import start_server
    from inferplane.source.running import HEALTH, SERVER_DIR

    said: list[str] = []
    monkeypatch.setattr(start_server, "_start", lambda *words, **others: None)
    monkeypatch.setattr(Screen, "note", lambda self, text: said.append(text))
    monkeypatch.setenv(SERVER_DIR, str(tmp_path))
    assert start_server.run([str(tmp_path), "--port", "18801", "--device", "cpu"], Screen()) == 0
    assert (tmp_path / HEALTH).read_text() == "18801" and "ready (port 18801)" in said[-1]
    monkeypatch.setenv("SERVICE_HTTP_PORT", "-1")
    assert start_server.run([str(tmp_path), "--grpc-port", "18802", "--device", "cpu"], Screen()) == 0
    assert not (tmp_path / HEALTH).exists() and "gRPC at 18802" in said[-1]


def test_a_model_is_judged_before_its_weights_are_downloaded(online, hub, tmp_path, monkeypatch):
    """By the settings of the server, for as many processes as will share it."""
    from inferplane.cli.screen import Screen
    from inferplane.engine.clients.process import download_check
    from inferplane.source import start_server

    judged = []

    def refuse(path, **given):
        judged.append(((path / "config.json").is_file(), given))
        raise CapacityError("It is too large.")

    monkeypatch.setattr(download_check, "check_in_process", refuse)
    monkeypatch.setenv("MODEL_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("INFERPLANE_SERVER_DIR", str(tmp_path / "server"))
    name, asked = "deepseek-ai/DeepSeek-R1/weight_only_int4", len(hub.requests)
    with pytest.raises(CapacityError, match="too large"):
        start_server.run([name], Screen())
    ((has_config, given),) = judged
    assert has_config and given["model"] == name and given["ranks"] == 1
    assert given["options"]["quantization"] == "weight_only_int4" and given["options"]["device"] == "cpu"
    new = [path for _, path, _ in hub.requests[asked:]]
    assert any("config.json" in path for path in new) and not any(".safetensors" in path for path in new), new
    assert not (tmp_path / "models" / name).exists()


def test_a_folder_of_models_that_cannot_be_written_is_one_error(online, hub, tmp_path, monkeypatch):
    from inferplane.cli.screen import Screen
    from inferplane.source import start_server

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MODEL_DIR", str(tmp_path / "file" / "models"))
    monkeypatch.setenv("INFERPLANE_SERVER_DIR", str(tmp_path / "server"))
    asked = len(hub.paths())
    with pytest.raises(UsageError, match=r"models \(MODEL_DIR\) cannot be written by user \d+") as refused:
        start_server.run(["deepseek-ai/DeepSeek-R1/weight_only_int4"], Screen())
    assert refused.value.there_is == f"a file, {tmp_path / 'file'}" and "set MODEL_DIR" in refused.value.remedy
    assert len(hub.paths()) == asked and not (tmp_path / "server").exists()
    assert "mode 7" in download_model.describe_access(tmp_path)


def test_a_long_folder_of_temporary_files_does_not_matter(tmp_path, monkeypatch):
    from inferplane.serving.lifecycle import notify
    from inferplane.source import start_server

    place = tmp_path / ("x" * 120)
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    with start_server._notifications() as (listener, address):
        monkeypatch.setenv(notify.NOTIFY_SOCKET, address)
        notify.notify(notify.READY)
        assert start_server._is_ready(listener, follows=False)
