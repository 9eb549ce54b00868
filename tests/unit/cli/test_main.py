"""The command line without a model: words, errors, exit codes, and what each verb prints."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inferplane import __version__
from inferplane.cli import arguments, main, screen
from inferplane.cli.main import DONE, FAILED, INTERRUPTED, SUBVERBS, VERBS, WRONG_USAGE, verb_parser
from inferplane.cli.model_loading import summary_line
from inferplane.cli.signals import Interrupt
from inferplane.engine.request.results import Timings
from inferplane.errors import DeviceError, UsageError
from inferplane.plugins import discovery
from inferplane.plugins import selection as choice
from tests.e2e.processes import heeding_ctrl_c
from tests.house.rules import REPOSITORY

ESCAPE = "\x1b"


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


# ---------------------------------------------------------------- words


def test_help_and_version(cli):
    code, out, err = cli("--help")
    assert (code, err) == (DONE, "")
    assert all(f"  {verb} " in out for verb in VERBS)
    assert cli("-h")[1] == cli("help")[1] == out
    assert cli("--version") == (DONE, f"inferplane {__version__}\n", "")
    assert cli() == (WRONG_USAGE, "", out)
    assert cli("help", "ops")[1] == cli("ops", "--help")[1]


EVERY_VERB = (*VERBS, *map(" ".join, SUBVERBS))


@pytest.mark.parametrize("verb", EVERY_VERB)
def test_each_verb_explains_itself(cli, verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = cli(*verb.split(), "--help")
    assert code == DONE
    assert out.startswith(f"usage: inferplane {verb} ")
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("verb", EVERY_VERB)
def test_every_option_is_on_the_page(verb):
    page = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")
    section = (
        page.split(f"\n## {verb}" if verb in VERBS else f"\n### {verb}", 1)[1].split("\n## ")[0]
        + page.split("\n## Options", 1)[1].split("\n## ")[0]
    )
    parser, _ = verb_parser(verb)
    options = {word for action in parser._actions for word in action.option_strings if word.startswith("--")}
    assert [word for word in sorted(options - {"--help"}) if f"`{word}" not in section] == []


def test_names_known_without_importing_torch():
    assert arguments.PLUGIN_GROUP == discovery.GROUP
    assert arguments.PLUGIN_VARIABLE == choice.VARIABLE


def test_help_names_listed_devices(monkeypatch):
    monkeypatch.setenv("INFERPLANE_PLUGINS", "only, inferplane_homely.plugin,acme.plugin:it,-odd,homely@acme")
    assert {"homely", "acme"} <= set(arguments.device_words())
    assert not {"only", "odd", "-odd"} & set(arguments.device_words())


@pytest.mark.parametrize(
    ("words", "what", "remedy"),
    [
        (["generat"], "There is no verb 'generat'", "`inferplane generate`"),
        (["train"], "There is no verb 'train'", "`inferplane --help`"),
        (["demo"], "There is no verb 'demo'", "inferplane generate demo"),
        (["--device", "x"], "There is no verb '--device'", "inferplane VERB --device"),
        (["generate", "--max-token", "3"], "no option", "--max-tokens"),
        (["generate", "--tempratur=1", "--to-p", "2"], "no options '--tempratur' and '--to-p'.", "--top-p were meant"),
        (["generate", "--max-tokens", "three"], "--max-tokens: invalid int value: 'three'", "generate --help"),
        (["ops", "one", "two"], "no argument", "ops --help"),
        (["doctor", "a model.gguf"], "no argument", "`inferplane estimate 'a model.gguf'` its memory"),
        (["list", "x.gguf"], "no argument", "`inferplane show x.gguf` lists a model's files"),
        (["generate", "-p", ""], "The prompt is empty", "character"),
        (["generate", "-p", "\udcff"], "no text", "UTF-8"),
        (["generate", "-p", "x", "--op", "linear"], "'linear' is not WHAT=PROVIDER", "linear=reference"),
        (["generate", "-p", "x", "--op", "a=b", "--op", "a=c"], "'b' and to 'c'", "one of them"),
        (["generate", "-p", "x", "--temperature", "-1"], "--temperature -1.", ""),
        (["generate", "/no/such/folder", "-p", "x"], "is no folder or file.", "folder"),
        (["chat", "--json"], "no option '--json'", ""),
        (["conform"], "--device", "conform --help"),
        (["ops", "lineer"], "There is no op 'lineer'", "'linear'"),
        (["explain", "/no/such/folder"], "is no folder", "folder"),
    ],
)
def test_wrong_usage(cli, words, what, remedy):
    code, out, err = cli(*words)
    assert (code, out) == (WRONG_USAGE, "")
    if "--json" in words:
        assert what in json.loads(err)["error"]["what"]
    else:
        assert what in err.splitlines()[0]
        assert err.startswith("error: ")
        assert remedy in err
    assert "Traceback" not in err


def test_no_prompt_at_a_terminal(cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    code, _, err = cli("generate", "def main():")
    assert code == WRONG_USAGE
    assert "-p 'def main():'" in err


# ---------------------------------------------------------------- errors


def raising(error):
    def run(words, screen):
        raise error

    return run


ERROR = DeviceError("Device 'x' is absent.", there_is="y", remedy="install x")


def test_an_error_in_three_lines(cli, monkeypatch):
    monkeypatch.setattr(main, "_run", raising(ERROR))
    assert cli("generate") == (FAILED, "", "error: Device 'x' is absent.\nthere is: y\nto do: install x\n")
    assert "Traceback" in cli("generate", "--debug")[2]


def test_an_error_as_json_is_on_stderr(cli, monkeypatch):
    monkeypatch.setattr(main, "_run", raising(ERROR))
    code, out, err = cli("generate", "--json")
    assert (code, out) == (FAILED, "")
    assert json.loads(err) == {
        "error": {"kind": "DeviceError", "what": "Device 'x' is absent.", "there_is": "y", "remedy": "install x"}
    }


def test_a_bug_keeps_its_traceback(cli, monkeypatch):
    monkeypatch.setattr(main, "_run", raising(ZeroDivisionError("by nothing")))
    code, _, err = cli("generate")
    assert code == FAILED
    assert "Traceback" in err and "ZeroDivisionError: by nothing (a bug" in err
    assert "Traceback" in json.loads(cli("generate", "--json")[2])["error"]["traceback"]


def test_a_full_disk_behind_standard_output_is_no_bug():
    command = [sys.executable, "-m", "inferplane", "ops", "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    told = json.loads(done.stderr)["error"]
    assert done.returncode == FAILED and told["remedy"]
    assert told["what"] == "Standard output cannot be written: No space left on device."


def test_another_oserror_stays_a_bug(cli, monkeypatch):
    monkeypatch.setattr(main, "_run", raising(OSError("elsewhere")))
    code, _, err = cli("generate")
    assert code == FAILED and "Traceback" in err and "OSError: elsewhere (a bug" in err


@pytest.mark.parametrize(
    ("tokens", "first_s", "says"),
    [
        (1, 0.0042, "1 prompt token, 2 generated (stop), first token 0.0042 s"),
        (3, 0.031, "3 prompt tokens, 2 generated"),
    ],
)
def test_the_line_of_figures_counts_and_rounds_for_readers(tokens, first_s, says):
    line = summary_line(Timings(0.0, first_s, 1.0, tokens, 2, 0, 0), "toy", "stop", None)
    assert line.startswith(says) and ("0.03 s" in line) == (tokens == 3)


def test_a_model_without_tokenizer_is_told_before_it_is_loaded(cli):
    code, out, err = cli("generate", "demo-draft", "-p", "x", "--device", "cpu")
    assert (code, out) == (FAILED, "")
    first, *others = err.splitlines()
    assert first.startswith("error: demo-draft has no tokenizer") and others == [x for x in others if x[:6] == "to do:"]


def test_interrupts_are_silent(cli, monkeypatch):
    monkeypatch.setattr(main, "_run", raising(KeyboardInterrupt()))
    assert cli("generate") == (INTERRUPTED, "", "")


def test_settings_of_the_entry_point():
    environment = {}
    main.prepare(environment)
    assert environment == {"OMP_WAIT_POLICY": "passive"}
    environment = {"OMP_WAIT_POLICY": "active"}
    main.prepare(environment)
    assert environment == {"OMP_WAIT_POLICY": "active"}


# ---------------------------------------------------------------- the screen


@pytest.mark.parametrize(("variable", "coloured"), [(None, True), ("1", False)])
def test_colour_is_for_terminals_without_no_color(monkeypatch, variable, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    if variable:
        monkeypatch.setenv("NO_COLOR", variable)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    screen.Screen().error(ERROR)
    screen.Screen().note("so it is")
    assert "install x" in terminal.getvalue()
    assert (ESCAPE in terminal.getvalue()) == coloured


def test_no_colour_in_a_pipe(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    screen.Screen().warning("x" * 300)
    assert pipe.getvalue() == f"warning: {'x' * 300}\n", "a log's line is one line"
    with screen.Screen().loading("a model") as loading:
        loading.phase("weights")
        loading.bar(1, 2)
    assert pipe.getvalue().count("\n") == 1


def test_generated_text_does_not_steer_a_terminal(monkeypatch):
    text = "a\x1b[2Jb\rc\n\td\x9be"
    assert screen.escape_controls(text) == "a␛[2Jb␍c\n\td␦e"
    for stream, shown in ((Terminal(), screen.escape_controls(text)), (io.StringIO(), text)):
        monkeypatch.setattr(sys, "stdout", stream)
        screen.Screen().stream(text)
        assert stream.getvalue() == shown


def test_pins():
    assert arguments.pins(["linear=torch", "layers.*.mlp = reference"]) == {
        "linear": "torch",
        "layers.*.mlp": "reference",
    }
    with pytest.raises(UsageError, match="WHAT=PROVIDER"):
        arguments.pins(["=torch"])


# ---------------------------------------------------------------- sampling


def arguments_of(*words: str):
    parser, _ = verb_parser("generate")
    return parser.parse_all(words)


def test_sampling_is_greedy_where_nothing_is_said(tmp_path):
    from inferplane.cli.sampling_defaults import sampling_params

    params = sampling_params(arguments_of(), tmp_path)
    assert (params.temperature, params.seed, params.max_tokens) == (0.0, None, 128)
    assert sampling_params(arguments_of("--temperature", "0.5"), None).seed is not None, "a drawn seed can be told"
    assert sampling_params(
        arguments_of("--temperature", "0.5", "--seed", "7", "--stop", "a", "--stop", "b"), None
    ).stop == (
        "a",
        "b",
    )


def test_sampling_follows_the_checkpoint(tmp_path):
    from inferplane.cli.sampling_defaults import sampling_params
    from inferplane.errors import InferplaneWarning

    config = tmp_path / "generation_config.json"
    config.write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": null}')
    params = sampling_params(arguments_of(), tmp_path)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 0)
    assert sampling_params(arguments_of("--temperature", "0"), tmp_path).temperature == 0
    config.write_text('{"do_sample": false, "temperature": 0.6}')
    assert sampling_params(arguments_of(), tmp_path).temperature == 0
    config.write_text('{"do_sample": true}')
    assert sampling_params(arguments_of(), tmp_path).temperature == 1
    for name, value in (("top_p", "most"), ("temperature", -1), ("top_k", True), ("min_p", 7)):
        config.write_text(json.dumps({"do_sample": True, "temperature": 0.5, name: value}))
        with pytest.warns(InferplaneWarning, match=f"generation_config.*{name}"):
            params = sampling_params(arguments_of(), tmp_path)
        assert (params.temperature, params.top_p, params.min_p) == (1.0 if name == "temperature" else 0.5, 1.0, 0.0)
    for text in ("{", "[]", ""):
        config.write_text(text)
        with pytest.warns(InferplaneWarning, match=r"generation_config\.json"):
            assert sampling_params(arguments_of(), tmp_path).temperature == 0


def test_only_a_default_is_cut_to_what_has_room():
    from inferplane.cli.sampling_defaults import limit_max_tokens
    from inferplane.engine import SamplingParams
    from inferplane.errors import CapacityError

    params = SamplingParams(max_tokens=128)
    assert limit_max_tokens(params, None, 10, 100).max_tokens == 90
    assert limit_max_tokens(params, None, 10, 1000).max_tokens == 128
    assert limit_max_tokens(params, 128, 10, 100).max_tokens == 128, "the engine refuses it in its own words"
    with pytest.raises(CapacityError, match="100 tokens"):
        limit_max_tokens(params, None, 100, 100)


# ---------------------------------------------------------------- Ctrl-C


@heeding_ctrl_c()
def test_ctrl_c_waits_for_a_safe_place():
    def press(times=1):
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    usual = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        press(2)  # nothing waits and nothing works: no exception
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt), interrupt.at_once():
                press()
            press()
        with interrupt.at_second():
            assert not interrupt.seen
            press()
            assert interrupt.seen
        press()
        with pytest.raises(KeyboardInterrupt), interrupt.at_second():
            press(2)
        press()
    assert signal.getsignal(signal.SIGINT) is usual
    with pytest.raises(KeyboardInterrupt), Interrupt(patient=False):
        press()


@heeding_ctrl_c()
def test_a_handler_that_is_not_pythons_is_left_alone(monkeypatch):
    """Only its own code could put it back."""
    usual = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with Interrupt() as interrupt, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is usual and not interrupt.seen


# ---------------------------------------------------------------- environment


def test_nothing_is_left_in_the_environment(cli):
    before = dict(os.environ)
    cli("--help")
    cli("ops")
    assert dict(os.environ) == before
    assert Path(main.__file__).name == "main.py"
