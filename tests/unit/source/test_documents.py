"""Each command line, variable and table row of the source system's documents runs, or ends with its one stated reason.

The facts are extracted by `tools/source_documents.py`. Lines of docker run in tests/serving/test_start_server.py.
"""

from __future__ import annotations

import re

import pytest

from inferplane.engine.clients.options import ALIASES
from inferplane.errors import UsageError
from inferplane.serving.configure import resolve
from inferplane.serving.settings import FIELDS, ServerSettings
from inferplane.serving.source_models import EXPORTED, find_source_model
from inferplane.source import download_model, flags
from tests.house.rules import REPOSITORY
from tests.unit.support.documents import COMMANDS, FACTS, VARIABLES, commands_of, parameters, table

PAGES = ("docs/coming-from-paddlenlp.md", "docs/zh/coming-from-paddlenlp.md")
TWO = {"MP_NNODE": "2", "POD_IPS": "10.0.0.1,10.0.0.2", "POD_0_IP": "10.0.0.1"}
MTP = {"SPECULATE_METHOD": "mtp"}
OTHERS = {
    "BATCH_SIZE": ("7", {}),
    "BLOCK_RATIO": ("0.25", {}),
    "DISABLE_STREAMING": ("1", {}),
    "GRPC_PORT": ("8811", {}),
    "HTTP_PORT": ("8110", {}),
    "INFER_QUEUE_PORT": ("8813", TWO),
    "INTER_PROC_PORT": ("8813", TWO),
    "INTER_QUEUE_PORT": ("8813", TWO),
    "MAX_CACHED_TASK_NUM": ("7", {}),
    "METRICS_PORT": ("8722", {}),
    "MP_NNODE": ("2", {"POD_IPS": TWO["POD_IPS"], "POD_0_IP": TWO["POD_0_IP"]}),
    "POD_0_IP": ("10.0.0.2", TWO),
    "POD_IPS": ("10.0.0.1,10.0.0.3", TWO),
    "PUSH_MODE_HTTP_PORT": ("9965", {}),
    "PUSH_MODE_HTTP_WORKERS": ("2", {}),
    "SPECULATE_MAX_DRAFT_TOKEN_NUM": ("2", MTP),
    "SPECULATE_METHOD": ("mtp", {}),
    "SPECULATE_MODEL_PATH": ("/models-mtp", MTP),
    "SPECULATE_MODEL_QUANT_TYPE": ("weight_only_int8", MTP),
    "USE_CACHE_KV_INT8": ("1", {}),
    "USE_HF_TOKENIZER": ("1", {}),
}
"""Variable -> a value that is no default, and the variables with which it has its effect."""
QUANTIZATIONS = FIELDS["quantization"].metadata["choices"]
OF_SCRIPTS = (
    *("DRAFT_MODEL_QUANT_MODE", "DRAFT_MODEL_TAG", "MODEL_TAG", "OUTPUT_PATH", "QUANT_MODE", "TOTAL_MAX_LENGTH"),
)
"""Variables of scripts, which the shell puts into the command lines below them: no program reads them."""
OF_RUNTIMES = ("CUDA_VISIBLE_DEVICES",)
"""Variables that a vendor's runtime reads: other devices are not there, neither for the count of MP_NUM."""
NOT_COMMANDS_OF_HERE = {
    "ping ": "it asks the network whether the other machine is there",
    "cat ": "it shows a script of the user's own",
    "bash ": "it runs a script of the user's own, whose lines are others of this list",
    "cd ": "it enters a folder of the user's own",
    "ls ": "it lists a folder",
    "nvidia-smi": "it asks the driver which devices there are; `inferplane devices` lists those of every vendor",
    "git clone": "it fetches the source system; this repository has a Dockerfile for its own images",
    "docker build": "it builds the source system's image; deploy/Dockerfile is built by another line",
    "docker exec": "it opens a shell in a container: the images here have bash",
    "mpirun ": "it starts the same command on each machine; MPI itself is not part of the images",
}
"""Begin of a command -> why it runs nothing of Inferplane's."""


def settle(variables: dict[str, str]) -> tuple[object, ...]:
    """What variables decide; UsageError counts as a decision too."""
    try:
        found = resolve({}, variables)
    except UsageError as refused:
        return (str(refused),)
    return found.settings, found.launch, found.notes


@pytest.mark.parametrize("name", [n for n in VARIABLES if n not in OF_SCRIPTS and n not in OF_RUNTIMES])
def test_no_variable_is_silent(name):
    """Each changes something, is named in a note, or is refused."""
    value, others = OTHERS.get(name, (VARIABLES[name][0] if VARIABLES[name] else "1", {}))
    before, after = settle(others), settle({**others, name: value})
    assert after != before, f"{name}={value} has no effect, and nothing says so"
    assert settle({**others, name: "~"}) != before  # neither is a wrong value


def test_variables_of_scripts_are_in_command_lines():
    used = {name for command in COMMANDS for name in command.variables}
    assert set(OF_SCRIPTS) <= used
    assert {name for name in VARIABLES if name not in OF_SCRIPTS} >= {row[0] for row in parameters("MP_NNODE")}


@pytest.mark.parametrize("value", ["-1", "9965", "0"])
def test_the_http_port_may_be_off(value):
    """-1 is gRPC alone; without gRPC nothing would answer."""
    found = resolve({}, {"SERVICE_HTTP_PORT": value, "SERVICE_GRPC_PORT": "8811"}).settings
    assert (found.port, found.grpc_port) == (int(value), 8811)
    if value == "-1":
        with pytest.raises(UsageError, match="no other service"):
            resolve({}, {"SERVICE_HTTP_PORT": value})
        with pytest.raises(UsageError, match="http_workers = 2 without HTTP"):
            resolve({}, {"SERVICE_HTTP_PORT": value, "GRPC_PORT": "1", "PUSH_MODE_HTTP_WORKERS": "2"})


def test_block_bs_counts_tokens():
    settings = resolve({}, {"BLOCK_BS": "40", "MAX_SEQ_LEN": "8192"}).settings
    assert settings.kv_cache_tokens == 320 * 1024  # "8K x 40 = 320K tokens"
    assert resolve({}, {"BLOCK_BS": "5"}).settings.kv_cache_tokens == 5 * 8192
    with pytest.raises(UsageError, match="two sizes of one cache"):
        resolve({"kv_cache_bytes": "1GiB"}, {"BLOCK_BS": "5"})


def test_machines_have_to_agree():
    launch = resolve({}, {"MP_NUM": "16", "INTER_PROC_PORT": "8813", **TWO, "POD_0_IP": "10.0.0.2"}).launch
    assert launch == (16, 2, ("10.0.0.2", "10.0.0.1"), 8813)
    for wrong, said in (
        ({**TWO, "POD_IPS": "10.0.0.1"}, "POD_IPS='10.0.0.1'"),
        ({**TWO, "POD_0_IP": "10.0.0.3"}, "is none of POD_IPS"),
        ({**TWO, "MP_NUM": "3"}, "MP_NUM=3 with MP_NNODE=2"),
        ({"MP_NUM": "none"}, "MP_NUM=none"),
        ({"MP_NUM": "0"}, "MP_NUM=0"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            resolve({}, wrong)


def test_ranges_of_drafts_are_checked_with_the_settings():
    for setting, wrong in (
        ({"num_speculative_tokens": "8"}, "from 1 to 7"),
        ({"prompt_lookup_max": "17"}, "from 1 to 16"),
        ({"max_candidates": "65"}, "from 1 to 64"),
        ({"verify_window": "8"}, "from 0 to 7"),
        ({"verify_strategy": "always"}, "rejection, target_match, greedy, topp"),
        ({"speculative_method": "guess"}, "ngram, suffix, draft_model, mtp, eagle"),
    ):
        with pytest.raises(UsageError, match=wrong):
            resolve(setting, {})
    with pytest.raises(UsageError, match="from 1 to 5"):
        resolve({}, {"SPECULATE_METHOD": "mtp", "SPECULATE_MAX_DRAFT_TOKEN_NUM": "6"})
    assert resolve({}, {"SPECULATE_METHOD": "None"}).settings == ServerSettings()
    (note,) = resolve({"prompt_lookup_max": "2"}, {}).notes
    assert note == "prompt_lookup_max has no effect without speculative_method (flag --prompt-lookup-max)"


# ------------------------------------------------------------------ command lines


def test_every_command_line_has_its_test():
    run = ("docker run", "python predictor.py", "python -m paddle", "python download_model.py", "start_server", "curl ")
    assert {command.text for command in COMMANDS} == {
        command.text for command in commands_of(*run, *NOT_COMMANDS_OF_HERE)
    }
    counts = {begin: len(commands_of(begin)) for begin in (*run, *NOT_COMMANDS_OF_HERE)}
    assert all(counts.values()) and sum(counts.values()) == len(COMMANDS), counts


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_every_command_flag_and_variable(page):
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    code = set(re.findall(r"`([^`]+)`", text))
    named = {word for span in code for word in (*re.findall(r"\w+", span), *re.findall(r"[a-z][\w-]+", span))}
    for begin in NOT_COMMANDS_OF_HERE:
        assert any(span.startswith(begin.strip()) for span in code), begin
    assert [name for name in (*VARIABLES, *FACTS["flags"]) if name not in named] == []
    docker = {flag.lstrip("-") for flag in FACTS["docker_flags"]}
    assert [flag for flag in docker if flag not in named] == []
    assert [name for name in EXPORTED if name not in code] == []


# ------------------------------------------------------------------ tables


def test_the_table_of_mixed_precisions():
    rows = table("基础模型", "部署机器")
    assert len(rows) == 6
    for base, machines, quantization, draft in rows:
        nodes = "-2nodes" if machines.startswith("TP16") else ""
        model = find_source_model(f"deepseek-ai/{base}-MTP{nodes}/{quantization}")
        assert (model.repository, model.draft_quantization) == (f"deepseek-ai/{base}", draft)
        assert model.nodes == (2 if nodes else 1)


def test_the_table_of_memory():
    rows = table("GPU 显存")
    assert len(rows) == 8
    for _, _, name, nodes, quantization, length, drafts, draft_quantization, block_bs in rows:
        model = find_source_model(name)
        assert (str(model.nodes), model.quantization, model.drafts) == (nodes, quantization, drafts == "是")
        assert model.draft_quantization == (None if draft_quantization == "-" else draft_quantization)
        tokens = resolve({}, {"BLOCK_BS": block_bs}).settings.kv_cache_tokens
        assert tokens == int(block_bs) * int(length.removesuffix("K")) * 1024


@pytest.mark.parametrize("name", EXPORTED)
def test_names_of_models_are_settings(name):
    model = EXPORTED[name]
    if model.quantization not in (None, *QUANTIZATIONS):
        with pytest.raises(UsageError, match=f"quantization = '{model.quantization}'"):
            resolve({}, {"model_name": name})
        return
    found = resolve({}, {"model_name": name})
    settings = found.settings
    assert (settings.model, settings.quantization) == (model.repository, model.quantization)
    assert settings.speculative_method == ("mtp" if model.drafts else None)
    assert settings.speculative_quantization == model.draft_quantization
    assert settings.dtype == (model.dtype or "auto")
    assert any(name in note and model.repository in note for note in found.notes)
    assert ("MP_NNODE" in " ".join(found.notes)) == (model.nodes > 1)
    assert resolve({"quantization": "a8w8"}, {"model_name": name}).settings.quantization == "a8w8"  # a flag decides


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek-ai/DeepSeek-R1/weight_only_int2", "deepseek-ai/DeepSeek-R1-3nodes/a8w8_fp8", "a/b/c"),
        *("deepseek-ai/DeepSeek-R1-2nodes", "deepseek-ai/DeepSeek-R1-MTP-4nodes", "deepseek-ai/DeepSeek-V3-FP8-x"),
    ],
)
def test_another_suffix_is_refused_with_the_list(name):
    with pytest.raises(UsageError) as refused:
        resolve({}, {"model_name": name})
    assert all(known in refused.value.there_is for known in EXPORTED)


@pytest.mark.parametrize("name", ["demo", "qwen3:0.6b", "hf:a/b", "Qwen/Qwen3-8B-FP8", "deepseek-ai/DeepSeek-R1-0528"])
def test_other_names_are_those_of_a_hub(name):
    assert find_source_model(name) is None and resolve({}, {"model_name": name}).settings.model == name


def test_a_downloaded_folder_is_quantized_as_its_name_says(tmp_path):
    name = "deepseek-ai/DeepSeek-R1-MTP/weight_only_int4"
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for variables in ({"MODEL_DIR": str(folder)}, {"MODEL_DIR": str(tmp_path), "model_name": name}):
        settings = resolve({}, variables).settings
        assert (settings.model, settings.quantization) == (str(folder), "weight_only_int4")
        assert settings.speculative_method == "mtp"


def test_the_tables_of_parameters():
    for name, _, _, default in parameters("model_name"):
        flag = next(flag for flag in download_model.FLAGS if flag.name == name)
        assert str(flag.default) == default or (name == "mode" and flag.choices == ("master", "slave"))
    known = {flag.name for flag in (*flags.PREDICTOR_FLAGS, *flags.EXPORT_FLAGS, *download_model.FLAGS)}
    assert set(FACTS["flags"]) - {"ips", "gpus"} <= known
    speculative = {name for name in FACTS["flags"] if name.startswith(("speculate_m", "draft_"))}
    assert speculative - {"speculate_model_path"} <= set(ALIASES), "also flags and settings of `serve`"
