"""Options of other engines are answered with what to use here, by the command line, by `LLM` and by settings files."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from inferplane import LLM, SamplingParams
from inferplane.cli.main import VERBS, WRONG_USAGE, verb_parser
from inferplane.engine.clients.chat_options import ChatOptions
from inferplane.engine.clients.options import ALL_OPTIONS
from inferplane.engine.request.other_engines import OTHER_OPTIONS, OTHER_VERBS, advice, as_flag, table
from inferplane.errors import UsageError
from inferplane.serving.configure import resolve
from inferplane.serving.settings import FIELDS


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            ("generate", "--lora", "x"),
            "llama.cpp's --lora has no counterpart here: merge the adapter into the checkpoint",
        ),
        (
            ("generate", "--tensor-parallel-size", "2"),
            "vLLM's --tensor-parallel-size is torchrun --nproc-per-node N -m inferplane here (torchrun starts the "
            "processes)",
        ),
        (
            ("serve", "--gpu-memory-utilization=0.9"),
            "vLLM's --gpu-memory-utilization is --kv-cache-bytes here (bytes for the cache instead of a share of the "
            "memory)",
        ),
        (("serve", "--context-length", "4096"), "SGLang's --context-length is --max-model-len here"),
        (("serve", "--tp", "2"), "vLLM's and SGLang's --tp is torchrun"),
        (("chat", "-ngl", "99"), "llama.cpp's -ngl is --device here (all layers are on it)"),
        (("generate", "-n", "3"), "llama.cpp's --n-predict is --max-tokens here"),
        (("chat", "--think", "off"), "has no counterpart here: `/think off` in a chat"),
        (("generate", "--temp", "0.5"), "llama.cpp's --temp is --temperature here"),
        (("serve", "--model-id", "x"), "TGI's --model-id is the word behind the verb here"),
        (
            ("serve", "--max-total-tokens", "9"),
            "SGLang's --max-total-tokens is --kv-cache-tokens here; TGI's --max-total-tokens is --max-model-len here",
        ),
        (("serve", "--quantize", "awq", "--ssl-keyfile", "x"), "; vLLM's --ssl-keyfile is --tls-key here"),
        (("generate", "--max-modle-len", "3"), "perhaps --max-model-len was meant"),
        (("serve", "--max-len", "9"), "perhaps --max-model-len was meant"),
        (("serve", "--prot", "9"), "perhaps --port was meant"),
        (("serve", "--task", "embed"), "vLLM's --task has no counterpart here: the checkpoint decides"),
        (("serve", "--rope-scaling", "{}"), "vLLM's --rope-scaling has no counterpart here: change the checkpoint's"),
        (("serve", "--hf-overrides", "{}"), "vLLM's --hf-overrides has no counterpart here: change the checkpoint's"),
        (("serve", "--root-path", "/x"), "vLLM's --root-path has no counterpart here: the proxy in front"),
        (("serve", "--mmproj", "x"), "llama.cpp's --mmproj has no counterpart here: images are not supported"),
        (("serve", "--num-ctx", "4096"), "Ollama's --num-ctx is --max-model-len here (tokens of one sequence)"),
        (("serve", "--mm-processor-kwargs", "{}"), "has no counterpart here: images are not supported"),
        (
            ("generate", "--repeat-penalty", "1.1"),
            "llama.cpp's and Ollama's --repeat-penalty is the field repetition_penalty of requests here",
        ),
        (("serve", "--seed", "1"), "vLLM's --seed is the field seed of requests here (a parameter of each request)"),
        (("serve", "--tasks", "x"), "see `inferplane serve --help`"),
        (("serve", "--zebra-crossing", "x"), "see `inferplane serve --help`"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_the_command_line_says_what_to_use_here(cli, words, remedy):
    code, out, err = cli(*words)
    assert (code, out) == (WRONG_USAGE, "")
    assert f"error: inferplane {words[0]} has no option" in err and words[1].partition("=")[0] in err
    assert remedy in " ".join(err.split()), err
    assert "--lock" not in err


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("gpu_memory_utilization", "vLLM's gpu_memory_utilization is kv_cache_bytes here"),
        ("enforce_eager", "vLLM's enforce_eager is capture here (False runs every step eagerly)"),
        ("mem_fraction_static", "SGLang's mem_fraction_static is kv_cache_bytes here"),
        ("trust_remote_code", "has no counterpart here: code of a checkpoint is never run"),
        ("temperature", "pass params of generate, stream or chat: params=SamplingParams(temperature=1)"),
        ("max_num_seq", "perhaps max_num_seqs was meant"),
    ],
)
def test_llm_says_what_to_use_here(name, remedy):
    with pytest.raises(UsageError, match=f"LLM takes no {name}") as caught:
        LLM("demo", **{name: 1})
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("guided_decoding", "vLLM's guided_decoding is json_schema here (or regex, grammar)"),
        ("num_predict", "Ollama's num_predict is max_tokens here"),
        ("repeat_penalty", "llama.cpp's and Ollama's repeat_penalty is repetition_penalty here"),
        ("skip_special_tokens", "vLLM's skip_special_tokens has no counterpart here: results have text and token_ids"),
        ("top_q", "perhaps top_p was meant"),
    ],
)
def test_parameters_of_sampling_say_what_to_use_here(name, remedy):
    with pytest.raises(UsageError, match=f"SamplingParams takes no {name}") as caught:
        SamplingParams(**{name: 1})
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("verb", OTHER_VERBS)
def test_verbs_of_other_commands_are_answered(cli, verb):
    code, out, err = cli(verb, "qwen3:0.6b")
    assert (code, out) == (WRONG_USAGE, "") and verb not in VERBS
    shown = " ".join(err.split())
    assert f"There is no verb {verb!r}" in shown and OTHER_VERBS[verb] in shown
    for named in re.findall(r"`inferplane (\w+)", OTHER_VERBS[verb]):
        assert named in VERBS
    for flag in re.findall(r"--[a-z-]+", OTHER_VERBS[verb]):
        assert flag in FLAGS


def test_settings_say_what_to_use_here(tmp_path):
    path = tmp_path / "serving.yaml"
    path.write_text("gpu-memory-utilization: 0.9\n")
    with pytest.raises(UsageError, match="which is no setting") as caught:
        resolve({}, {}, str(path))
    assert "vLLM's gpu_memory_utilization is kv_cache_bytes here" in caught.value.remedy
    (note,) = resolve({}, {"INFERPLANE_MEM_FRACTION_STATIC": "0.9"}).notes
    assert "SGLang's mem_fraction_static is kv_cache_bytes here" in note


NAMES = {"params", *ALL_OPTIONS, *FIELDS, *(f.name for kind in (SamplingParams, ChatOptions) for f in fields(kind))}
FLAGS = {flag for verb in VERBS for flag in verb_parser(verb)[0]._option_string_actions}


@pytest.mark.parametrize("option", OTHER_OPTIONS, ids=lambda option: f"{option.engine}/{option.names[0]}")
def test_a_row_names_what_there_is(option):
    assert option.here in NAMES if option.here else option.note
    flag = as_flag(option).partition(" ")[0]
    assert not option.here or not flag.startswith("--") or flag in FLAGS
    own = {option.here} if option.shell else set()  # some verbs have a flag of the same name
    assert all(advice(name) and f"--{name.replace('_', '-')}" not in FLAGS for name in {*option.names} - own)
    assert any(f"`{option.names[0]}`" in line for line in table())


def test_no_row_is_written_twice():
    named = [(option.engine, name) for option in OTHER_OPTIONS for name in option.names]
    assert len(named) == len(set(named))


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("awq", "leave quantization out: a checkpoint in awq is read as it is"),
        ("gptq", "leave quantization out: a checkpoint in gptq is read as it is"),
        ("fp8", "leave quantization out: a checkpoint in fp8 is read as it is"),
        ("compressed-tensors", "leave quantization out: a checkpoint in compressed-tensors is read as it is"),
        ("awq_marlin", "leave quantization out: a checkpoint in awq_marlin is read as it is"),
        ("int8", "perhaps weight_only_int8 was meant"),
        ("int4", "perhaps weight_only_int4 was meant"),
        ("w8a8", "perhaps a8w8 was meant"),
        ("weight_only_int", "perhaps weight_only_int8 was meant"),
        ("zebra", ""),
    ],
)
def test_quantizations_of_other_engines_have_a_remedy(cli, word, remedy):
    with pytest.raises(UsageError, match="quantization = ") as caught:
        LLM("demo", quantization=word)
    assert caught.value.remedy == remedy and "weight_only_int8" in caught.value.there_is
    with pytest.raises(UsageError, match="quantization = ") as caught:
        resolve({"quantization": word}, {})
    assert caught.value.remedy == remedy
    code, _, err = cli("explain", "--quantization", word)
    assert code == WRONG_USAGE and remedy.replace("leave quantization", "").strip() in " ".join(err.split())
