"""Errors of the command line: options as they were typed, by their flags, and one rule for devices in every verb."""

from __future__ import annotations

import json
import re

import pytest

from inferplane.cli.error_wording import ErrorWording
from inferplane.cli.main import VERBS, WRONG_USAGE, verb_parser
from inferplane.errors import CapacityError, UsageError

CPU = ("--device", "cpu")
GENERATE = ("generate", "-p", "x", *CPU)
PYTHONS = re.compile(r"SamplingParams|\b[a-z]+_[a-z_]+ ?=|\b[a-z]+ = ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*GENERATE, "--max-model-len", "0"), "--max-model-len 0."),
        ((*GENERATE, "--max-model-len", "999999"), "--max-model-len 999999."),
        ((*GENERATE, "--max-model-len=-3"), "--max-model-len -3."),
        ((*GENERATE, "--dtype", "odd"), "--dtype odd."),
        ((*GENERATE, "--kv-dtype", "odd"), "--kv-dtype odd on device 'cpu'."),
        ((*GENERATE, "--quantization", "odd"), "--quantization odd."),
        ((*GENERATE, "--load-format", "odd"), "--load-format odd."),
        ((*GENERATE, "--max-tokens", "0"), "--max-tokens 0."),
        ((*GENERATE, "--temperature", "-1"), "--temperature -1."),
        ((*GENERATE, "--temperature", "nan"), "--temperature nan."),
        ((*GENERATE, "--top-p", "2"), "--top-p 2."),
        ((*GENERATE, "--top-k", "-2"), "--top-k -2."),
        ((*GENERATE, "--min-p", "3"), "--min-p 3."),
        ((*GENERATE, "--stop", "end", "--stop="), "--stop end --stop ''."),
        ((*GENERATE, "--index", "-1"), "Device index -1 is not a number from 0."),
        ((*GENERATE, "--speculate", "luck"), "--speculate luck."),
        ((*GENERATE, "--speculate-method", "luck"), "--speculate-method luck."),
        ((*GENERATE, "--speculate", "ngram", "--drafts", "9"), "--drafts 9."),
        (
            (*GENERATE, "--speculate", "ngram", "--speculate-max-draft-token-num", "9"),
            "--speculate-max-draft-token-num 9.",
        ),
        ((*GENERATE, "--speculate", "eagle"), "--speculate eagle with no --speculative-model."),
        (("chat", *CPU, "--temperature", "-1"), "--temperature -1."),
        (("explain", *CPU, "--max-model-len", "0"), "--max-model-len 0."),
        (("explain", *CPU, "--quantization", "odd"), "--quantization odd."),
        (("estimate", *CPU, "--max-batch", "0"), "--max-batch 0."),
        (("estimate", *CPU, "--max-step-tokens", "0"), "--max-step-tokens 0."),
        (("estimate", *CPU, "--memory", "much"), "--memory 'much' is no amount of memory."),
        (("tune", *CPU, "--out", "x.lock", "--dtype", "odd"), "--dtype odd."),
        (("bench", "latency", *CPU, "--speculate", "ngram", "--drafts", "0"), "--drafts 0."),
        (("bench", "latency", *CPU, "--quantization", "odd"), "--quantization odd."),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_an_option_is_named_as_it_was_typed(cli, words, said):
    code, out, err = cli(*words)
    assert (code, out) == (WRONG_USAGE, "")
    assert err.startswith(f"error: {said}\n")
    assert not PYTHONS.search(err)
    assert "None" not in err


def test_what_to_do_names_flags_too(cli):
    code, _, err = cli(*GENERATE, "--max-tokens", "100000")
    assert code == 1
    assert "A prompt of 1 tokens and --max-tokens 100000 exceed" in err
    assert "lower --max-tokens, or raise --max-model-len" in err


def test_errors_as_json_say_the_same(cli):
    _, _, err = cli(*GENERATE, "--top-p", "2", "--json")
    assert json.loads(err)["error"]["what"] == "--top-p 2."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*GENERATE, "--seed", "1", "--seed", "2"), "--seed is given twice, with two values."),
        ((*GENERATE, "--seed=1", "--seed", "2"), "--seed is given twice, with two values."),
        ((*GENERATE, "-p", "y"), "-p is given twice, with two values."),
        ((*GENERATE, "--prompt", "y"), "-p and --prompt are one option, with two values."),
        ((*GENERATE, "--device", "npu"), "--device is given twice, with two values."),
        (
            (*GENERATE, "--drafts", "2", "--num-speculative-tokens", "3"),
            "--drafts and --num-speculative-tokens are one option, with two values.",
        ),
        (
            ("explain", *CPU, "--kv-cache-dtype", "int8", "--kv-dtype=fp8"),
            "--kv-cache-dtype and --kv-dtype are one option, with two values.",
        ),
        (
            ("config", "show", "--max-batch", "2", "--max-num-seqs", "3"),
            "--max-batch and --max-num-seqs are one option, with two values.",
        ),
        (
            ("config", "show", "--enable-prefix-caching", "--no-enable-prefix-caching"),
            "--enable-prefix-caching and --no-enable-prefix-caching are one option, with two values.",
        ),
        (
            ("config", "show", "--prefix-cache", "--no-enable-prefix-caching"),
            "--prefix-cache and --no-enable-prefix-caching are one option, with two values.",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_an_option_with_two_values_is_refused(cli, words, said):
    """argparse would take the last; the error has the flags as they were typed, old names too."""
    assert cli(*words) == (WRONG_USAGE, "", f"error: {said}\nto do: keep one of them\n")


def test_what_is_said_twice_alike_is_taken_and_lists_are_repeated(cli):
    code, _, err = cli("config", "show", "--max-batch", "2", "--max-num-seqs", "2", "--strict", "--strict")
    assert (code, err) == (0, "")
    code, out, err = cli("explain", *CPU, "--op", "linear=torch", "--op", "lm_head=torch", "--dtype", "float32")
    assert (code, err) == (0, "") and "linear" in out


def reworded(verb, typed, error):
    ErrorWording(verb_parser(verb)[0], typed, settings=verb == "config").reword(error)
    return error.what, error.remedy


def test_only_names_of_options_are_touched():
    what, remedy = "layers.0.max_tokens = 3 of 'dtype' has kv_blocks = 4.", "set my_max_tokens to dtype"
    assert reworded("generate", [], CapacityError(what, remedy=remedy)) == (what, remedy)


def test_pins_in_a_remedy_are_words_of_the_command():
    error = UsageError("It is wrong.", remedy="pin another, as in ops={'moe_route': 'reference'}")
    assert reworded("generate", [], error)[1] == "pin another, as in --op moe_route=reference"


def test_settings_from_elsewhere_keep_their_names():
    def error():
        return UsageError("max_num_seqs = '0' (variable INFERPLANE_MAX_BATCH).")

    assert reworded("config", [], error())[0] == "max_num_seqs = '0' (variable INFERPLANE_MAX_BATCH)."
    told = UsageError("max_num_seqs = '0' (flag --max-num-seqs).")
    assert reworded("config", ["show", "--max-batch", "0"], told)[0] == "--max-batch 0."


# ---------------------------------------------------------------- devices

NEEDED = {
    "export": ("--out", "exported"),
    "eval": ("--data", __file__),
    "audit": ("--data", __file__),
    "bench": ("latency",),
    "config": ("show",),
    "tune": ("--out", "x.lock"),
}
WITH_DEVICE = [verb for verb in VERBS if "--device" in verb_parser(verb)[0]._option_string_actions]


def test_all_verbs_that_run_a_model_take_a_device():
    assert set(VERBS) - set(WITH_DEVICE) == {"devices", "doctor", "pull", "list", "quantize", "convert", "show", "rm"}


@pytest.mark.parametrize("verb", WITH_DEVICE)
@pytest.mark.parametrize("number", ["0", "1"])
def test_a_number_behind_the_colon_is_refused_by_every_verb(cli, verb, number):
    parser, _ = verb_parser(verb)
    code, out, err = cli(verb, *NEEDED.get(verb, ()), "--device", f"cpu:{number}")
    assert (code, out) == (WRONG_USAGE, "")
    index = f" --index {number}" if "--index" in parser._option_string_actions else ""
    assert err == (
        f"error: --device cpu:{number}: what follows the colon is a variant, not a number.\n"
        f"to do: pass --device cpu{index}\n"
    )


def test_so_it_is_where_a_variable_names_it(cli, monkeypatch):
    monkeypatch.setenv("INFERPLANE_DEVICE", "cpu:1")
    code, out, err = cli("config", "show")
    assert (code, out) == (WRONG_USAGE, "")
    assert "device (variable INFERPLANE_DEVICE) cpu:1: what follows" in err


@pytest.mark.parametrize("words", [GENERATE, ("chat", *CPU), ("tune", *CPU, "--out", "x.lock")], ids=lambda w: w[0])
def test_an_index_without_a_device(cli, words):
    code, out, err = cli(*words, "--index", "1")
    assert (code, out) == (1, "")
    assert err.startswith("error: No device 'cpu' has index 1.\nthere is: 1, counted from 0\n")
