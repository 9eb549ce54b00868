"""Sources of settings, their order, and errors for wrong values."""

from __future__ import annotations

import json

import pytest

from inferplane.cli.main import verb_parser
from inferplane.errors import UsageError
from inferplane.serving import source_names
from inferplane.serving.configure import resolve
from inferplane.serving.settings import ALIASES, FIELDS, ServerSettings


def test_defaults_are_within_their_own_ranges():
    found = resolve({}, {})
    assert found.settings == ServerSettings()
    assert set(found.origins.values()) == {"default"}
    for name, f in FIELDS.items():
        if f.default not in (None, ()):  # converting a default must give it back
            assert getattr(resolve({name: f.default}, {}).settings, name) == f.default


def test_the_first_that_names_a_setting_decides(tmp_path):
    path = tmp_path / "serving.yaml"
    path.write_text("max_batch: 3\nport: 1\nmax-waiting: 4\nmodel: filed\n")
    environment = {"INFERPLANE_PORT": "2", "SERVICE_HTTP_PORT": "9965", "BATCH_SIZE": "5", "MAX_SEQ_LEN": "77"}
    found = resolve({"port": "8080"}, environment, str(path))
    assert found.settings.port == 8080 and found.origins["port"] == "flag --port"
    assert found.settings.max_num_seqs == 5 and found.origins["max_num_seqs"] == "variable BATCH_SIZE"
    assert found.settings.max_waiting == 4 and found.origins["max_waiting"] == f"file {path}"
    assert found.settings.max_prompt_tokens == 77
    assert resolve({}, environment, str(path)).settings.port == 2
    assert resolve({}, {"INFERPLANE_CONFIG": str(path)}).settings.model == "filed"


def test_every_name_of_the_source_system_means_a_setting():
    published = {
        **{"HEALTH_HTTP_PORT": "8110", "METRICS_HTTP_PORT": "8722", "SERVICE_HTTP_PORT": "9965"},
        **{"MAX_SEQ_LEN": "8192", "MAX_DEC_LEN": "1024", "BATCH_SIZE": "48", "MAX_CACHED_TASK_NUM": "128"},
        **{"INTER_PROC_PORT": "8813", "SERVICE_GRPC_PORT": "8811", "BLOCK_BS": "5", "BLOCK_RATIO": "0.75"},
        **{"PUSH_MODE_HTTP_WORKERS": "1", "MP_NUM": "1", "DISABLE_STREAMING": "1", "USE_CACHE_KV_INT8": "1"},
        **{"MODEL_DIR": "/models", "USE_HF_TOKENIZER": "1", "USE_WARMUP": "0", "OUTPUT_LOG_TO_CONSOLE": "1"},
    }
    understood = {*source_names.NAMES, *source_names.WITHOUT_EFFECT, *source_names.LAUNCH, *source_names.DERIVED}
    assert set(published) <= understood
    found = resolve({}, published).settings
    assert (found.port, found.health_port, found.metrics_port) == (9965, 8110, 8722)
    assert (found.max_prompt_tokens, found.max_output_tokens, found.max_num_seqs) == (8192, 1024, 48)
    assert (found.max_waiting, found.disable_streaming, found.kv_cache_dtype) == (128, True, "int8")
    assert (found.model, found.native_text) == ("/models", "raw")
    assert found.kv_cache_tokens == 5 * 8192
    notes = " ".join(resolve({}, published).notes)
    assert all(name in notes for name in ("BLOCK_BS", "BLOCK_RATIO", "INTER_PROC_PORT"))


def test_processes_that_share_the_model_are_requested_not_ignored():
    assert resolve({}, {}).launch is None
    assert resolve({}, {"MP_NUM": "2"}).launch == (2, 1, (), None)
    with pytest.raises(UsageError, match="MP_NNODE=2 with POD_IPS=''"):
        resolve({}, {"MP_NNODE": "2"})


@pytest.mark.parametrize("variable", ["DISABLE_STREAMING", "USE_CACHE_KV_INT8", "USE_HF_TOKENIZER"])
def test_switches_of_the_source_system_are_read_as_those_of_our_own(variable):
    for text in ("1", "true", "Yes", " on "):
        assert resolve({}, {variable: text}).settings != ServerSettings()
    for text in ("0", "false", "No", "off", ""):
        assert resolve({}, {variable: text}).settings == ServerSettings()
    with pytest.raises(UsageError, match=f"{variable}=maybe"):
        resolve({}, {variable: "maybe"})


@pytest.mark.parametrize(
    ("flags", "environment", "text", "said"),
    [
        ({"max_num_seqs": "0"}, {}, "", "max_num_seqs = '0' (flag --max-num-seqs)"),
        ({"max_num_seqs": "many"}, {}, "", "whole numbers"),
        ({}, {"INFERPLANE_PORT": "70000"}, "", "variable INFERPLANE_PORT"),
        ({}, {"MAX_SEQ_LEN": "x"}, "", "variable MAX_SEQ_LEN"),
        ({}, {}, "max_batch: 1.5", "max_num_seqs = 1.5"),
        ({}, {}, "max_num_seqs: true", "max_num_seqs = True"),
        ({}, {}, "strict: perhaps", "true, false"),
        ({}, {}, "log_format: xml", "auto, json, text"),
        ({}, {}, "drain_s: .nan", "drain_s = nan"),
        ({}, {}, "max_bach: 8", "perhaps max_batch was meant"),
        ({}, {}, "max_num_seq: 8", "perhaps max_num_seqs was meant"),
        ({}, {}, "max_batch: 8\nmax_num_seqs: 8", "max_batch and max_num_seqs are the same setting"),
        ({}, {}, "max_num_seqs: 8\nmax_batch: 8", "max_num_seqs and max_batch are the same setting"),
        ({}, {}, "speculate: mtp\nspeculate_method: mtp", "speculate and speculate_method are the same setting"),
        (
            {},
            {"INFERPLANE_KV_DTYPE": "fp8", "INFERPLANE_KV_CACHE_DTYPE": "fp8"},
            "",
            "kv_dtype and kv_cache_dtype are the same setting (variable INFERPLANE_KV_DTYPE, variable INFERPLANE_KV_C",
        ),
        ({}, {}, "- 1", "is no list of settings"),
        ({}, {}, "a: [", "cannot be read"),
        ({}, {}, "!!python/object/apply:os.getcwd []", "cannot be read"),
        ({}, {}, "tls_cert: x", "tls_cert without tls_key"),
        ({}, {}, "tls_key: x", "also pass tls_cert"),
        ({}, {}, "port: 81\nhealth_port: 81", "on one port"),
    ],
)
def test_a_slip_is_one_clear_error(tmp_path, flags, environment, text, said):
    path = tmp_path / "serving.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        resolve(flags, environment, str(path) if text else None)
    assert said in str(refused.value)


def test_an_unknown_variable_is_reported():
    (note,) = resolve({}, {"INFERPLANE_MAX_BACH": "8"}).notes
    assert "INFERPLANE_MAX_BATCH" in note
    for others in ("INFERPLANE_CPU_ISA", "INFERPLANE_NO_NATIVE", "INFERPLANE_PLUGINS"):
        assert not resolve({}, {others: "x"}).notes


@pytest.mark.parametrize(
    ("text", "count"), [("64MiB", 2**26), ("1.5 gib", 3 * 2**29), ("2G", 2**31), ("4096", 4096), ("4096B", 4096)]
)
def test_sizes_have_units(tmp_path, text, count):
    path = tmp_path / "serving.yaml"
    path.write_text(f"kv_cache_bytes: {text}\nmax_body_bytes: 1MiB\n")
    assert resolve({"kv_cache_bytes": text}, {}).settings.kv_cache_bytes == count
    found = resolve({}, {}, str(path)).settings
    assert (found.kv_cache_bytes, found.max_body_bytes) == (count, 2**20)
    for bad in ("MiB", "1.5", "-1MiB", "1XiB", "0.0001KiB", True):
        with pytest.raises(UsageError, match="kv_cache_bytes"):
            resolve({"kv_cache_bytes": bad}, {})


def test_the_origin_of_a_switch_is_the_flag_that_was_typed():
    name = "enable_prefix_caching"
    assert resolve({name: False}, {}).origins[name] == "flag --no-enable-prefix-caching"
    assert resolve({name: True}, {}).origins[name] == "flag --enable-prefix-caching"


VALUES = {
    "kv_cache_dtype": "fp8",
    "enable_prefix_caching": False,
    "speculative_method": "mtp",
    "speculative_model": "x",
    "speculative_quantization": "weight_only_int8",
}


@pytest.mark.parametrize("alias", ALIASES)
def test_a_setting_has_other_names(alias, tmp_path):
    name = ALIASES[alias]
    value = VALUES.get(name, 3)
    path = tmp_path / "serving.yaml"
    path.write_text(f"{alias}: {json.dumps(value)}\n")
    found = resolve({}, {}, str(path))
    assert getattr(found.settings, name) == value and found.origins[name] == f"file {path}"
    variable = f"INFERPLANE_{alias.upper()}"
    found = resolve({}, {variable: str(value)})
    assert getattr(found.settings, name) == value and found.origins[name] == f"variable {variable}"
    words = [f"--no-{alias.replace('_', '-')}"] if value is False else [f"--{alias.replace('_', '-')}", str(value)]
    assert str(getattr(verb_parser("serve")[0].parse_all(words), name)) == str(value)


def test_help_shows_one_name_of_an_option():
    for verb in ("serve", "bench", "generate", "estimate"):
        text = verb_parser(verb)[0].format_help()
        assert not [alias for alias in ALIASES if f"--{alias.replace('_', '-')} " in text]


def test_drafting_has_the_flags_of_other_commands():
    parser = verb_parser("config")[0]
    for flags in ("--speculate mtp --drafts 2", "--speculate-method mtp --speculate-max-draft-token-num 2"):
        args = parser.parse_all(["show", *flags.split(), "--draft-model", "demo-draft"])
        found = (args.speculative_method, args.num_speculative_tokens, args.speculative_model)
        assert found == ("mtp", "2", "demo-draft")
        assert not hasattr(args, "model")


def test_secrets_are_not_shown():
    found = resolve({}, {"INFERPLANE_API_KEY": "hunter2,other"})
    assert found.settings.api_key == ("hunter2", "other")
    assert "hunter2" not in repr(found.mask_secrets())
    assert found.mask_secrets()["api_key"] == ["***", "***"]


def test_a_folder_in_model_dir_is_taken_before_names_are_looked_up(tmp_path):
    for name in ("org/name/revision", "deepseek-ai/DeepSeek-R1/weight_only_int4"):
        folder = tmp_path / name
        environment = {"MODEL_DIR": str(tmp_path), "model_name": name}
        if name.startswith("org"):
            with pytest.raises(UsageError, match="is no model of the source system"):
                resolve({}, environment)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        found = resolve({}, environment).settings
        assert found.model == str(folder)
        assert found.quantization == (None if name.startswith("org") else "weight_only_int4")


def test_drafts_of_the_source_system_take_a_method_of_any_source(tmp_path):
    parts = {"SPECULATE_MODEL_QUANT_TYPE": "weight_only_int8", "SPECULATE_MAX_DRAFT_TOKEN_NUM": "2"}
    found = resolve({}, {**parts, "INFERPLANE_SPECULATIVE_METHOD": "mtp"})
    assert found.settings.speculative_quantization == "weight_only_int8" and found.settings.num_speculative_tokens == 2
    assert not [note for note in found.notes if "no effect" in note]
    absent = {"SPECULATE_MODEL_PATH": str(tmp_path / "absent")}
    found = resolve({"speculative_method": "mtp"}, absent)
    assert found.settings.speculative_model is None and "has no model" in " ".join(found.notes)
    found = resolve({}, {**parts, "SPECULATE_METHOD": "mtp", "INFERPLANE_SPECULATIVE_METHOD": "none"})
    assert found.settings.speculative_quantization is None
    assert [note.split()[0] for note in found.notes if "no effect" in note] == [*reversed(parts)]
