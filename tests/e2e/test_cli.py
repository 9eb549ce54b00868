"""The command line with the demo model: in this process where that will do, in one of its own for signals and pipes."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from inferplane.cli import main
from tests.e2e.processes import heeding_ctrl_c, kill, wait_for_output
from tests.house.rules import SOURCE_PATHS

PROMPT = "def fibonacci(n):"
GREEDY = ("--temperature", "0")  # the demo asks to be sampled
DEVICE = ("--device", "cpu")
LONG = ("--temperature", "1.5", "--seed", "1", "--max-tokens", "1500")  # longer than any test waits
STATS = re.compile(
    r"^\d+ prompt tokens, \d+ generated \(\w+\), first token [\d.]+ s, [\d.]+ tokens/s, cpu", re.MULTILINE
)
TIMEOUT_S = 120


@pytest.fixture
def cli(capsys, monkeypatch):
    """Runs a verb on the cpu backend in this process; returns exit code, standard output and standard error."""
    monkeypatch.setattr(main, "prepare", lambda environment: None)

    def run(verb: str, *words: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main.main([verb, *DEVICE, *words])
        return (code, *capsys.readouterr())

    return run


def start(*words: str, **options) -> subprocess.Popen:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(SOURCE_PATHS))
    if "env" in options:
        environment.update(options.pop("env"))
    with heeding_ctrl_c():
        return subprocess.Popen([sys.executable, "-m", "inferplane", *words], env=environment, **options)


# ---------------------------------------------------------------- generate


@pytest.mark.parametrize(
    "words",
    [
        ("--speculate", "ngram"),
        ("--speculate-method", "mtp", "--speculate-max-draft-token-num", "2"),
        ("--speculate", "draft_model", "--draft-model", "demo-draft"),
        ("--speculate", "eagle", "--draft-model", "demo-eagle", "--drafts", "4"),
    ],
)
def test_drafting_changes_nothing_but_the_speed(cli, words):
    asked = ("generate", *GREEDY, "-p", PROMPT, "--max-tokens", "24", "--dtype", "float32")
    assert cli(*asked, *words)[:2] == cli(*asked)[:2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--drafts", "2"), "--drafts without --speculative-method"),
        (("--draft-model", "demo-draft"), "--draft-model without --speculative-method"),
        (("--speculate", "eagle"), "with no --speculative-model"),
        (("--speculate", "luck"), "error: --speculate luck."),
        (("--speculate", "mtp", "--drafts", "9"), "error: --drafts 9."),
    ],
)
def test_drafting_that_cannot_be_meant(cli, words, said):
    code, out, err = cli("generate", "-p", PROMPT, *words)
    assert code == 2 and not out and said in err


@pytest.mark.parametrize("verb", ["explain", "estimate"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--index-key-dtype", "int4"), "error: --index-key-dtype int4.\nthere is: auto, none, fp8, int8"),
        (("--head-format", "q6"), "error: --head-format q6."),
    ],
)
def test_a_plan_takes_the_words_that_an_engine_takes(cli, verb, words, said):
    code, out, err = cli(verb, "config:glm-5", *words)
    assert code == 2 and not out and said in err


def test_text_on_stdout_and_the_rest_on_stderr(cli):
    code, out, err = cli("generate", *GREEDY, "-p", PROMPT, "--max-tokens", "12")
    assert code == 0
    assert PROMPT not in out and out.endswith("\n") and out.strip()
    assert STATS.search(err)
    assert "\x1b" not in out + err
    assert cli("generate", *GREEDY, "--max-tokens", "12", stdin=f"{PROMPT}\n")[:2] == (0, out), (
        "one line end belongs to the shell"
    )
    code, json_out, err = cli("generate", *GREEDY, "-p", PROMPT, "--max-tokens", "12", "--json")
    assert (code, err) == (0, "")
    data = json.loads(json_out)
    assert set(data) == {
        *("schema", "model", "device", "prompt", "text", "token_ids", "finish_reason", "timings", "sampling"),
    }
    assert (data["schema"], data["model"], data["device"], data["prompt"]) == (1, "demo", "cpu", PROMPT)
    assert data["text"].removesuffix("\n") == out.removesuffix("\n")
    assert len(data["token_ids"]) == data["timings"]["generated_tokens"] == 12
    assert data["finish_reason"] == "length"
    assert set(data["timings"]) >= {
        *("queue_s", "first_token_s", "total_s", "prompt_tokens", "generated_tokens", "tokens_per_s"),
    }
    assert set(data["sampling"]) == {"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"}


def test_a_drawn_seed_gives_the_text_again(cli):
    _, out, err = cli("generate", "-p", PROMPT, "--max-tokens", "8", "--temperature", "1.5")
    (seed,) = re.findall(r"seed (\d+)", err)
    _, again, err = cli("generate", "-p", PROMPT, "--max-tokens", "8", "--temperature", "1.5", "--seed", seed)
    assert again == out
    assert "seed" not in err, "who chose it knows it"


def test_what_cannot_fit(cli):
    code, out, err = cli("generate", "-p", PROMPT, "--max-model-len", "4")
    assert (code, out) == (1, "")
    assert "--max-model-len" in err and "Traceback" not in err


def test_an_absent_device_is_never_replaced(cli, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", ())
    code, out, err = cli("generate", "-p", PROMPT, "--device", "npu")
    assert (code, out) == (1, "")
    assert err.startswith("error: Device 'npu'") and "\nto do: " in err


# ---------------------------------------------------------------- chat


def test_each_line_is_a_turn(cli):
    code, out, err = cli("chat", *GREEDY, "--max-tokens", "6", stdin="def f(x):\n\n/reset\nclass A:")
    assert code == 0
    assert "demo is a completion model, not a chat model" in err
    assert len(STATS.findall(err)) == 2
    assert "> " not in out and "/reset" not in out
    first, second = (cli("generate", *GREEDY, "--max-tokens", "6", "-p", p)[1] for p in ("def f(x):", "class A:"))
    assert out.replace("\n", "") == (first + second).replace("\n", ""), "the second turn knew nothing of the first"


def test_commands_of_other_programs(cli):
    code, out, err = cli("chat", "--device", "cpu", stdin="/clear\n/?\n/bye\nnot read")
    assert (code, out) == (0, "")
    assert "the conversation begins anew" in err and "/reset   forget the conversation" in err


def test_a_chat_with_another_template(cli, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    options = (*GREEDY, "--max-tokens", "6")
    code, out, _ = cli("chat", *options, "--chat-template", str(path), stdin="def f(x):\n")
    assert code == 0 and out.rstrip("\n") == cli("generate", *options, "-p", "def f(x):")[1].rstrip("\n")
    for given, says in ((str(tmp_path / "none.jinja"), "cannot be read"), ("{% for %}", "does not compile")):
        code, out, err = cli("chat", *options, "--chat-template", given, stdin="x\n")
        assert (code, out) == (2, "") and says in err


def test_a_wrong_command_ends_a_script(cli):
    code, _, err = cli("chat", stdin="/rest\n")
    assert code == 2
    assert "perhaps /reset was meant" in err


def test_roles_are_looked_for_in_the_template():
    from inferplane.cli.verbs.chat import is_completion_template
    from inferplane.errors import UsageError

    class Template:
        def __init__(self, **ids):
            self.ids = ids

        def chat(self, messages):
            found = self.ids[messages[0]["role"]]
            if found is None:
                raise UsageError("The chat template refuses these messages.")
            return found

    assert is_completion_template(Template(user=[7], assistant=[7]))
    assert not is_completion_template(Template(user=[1, 7], assistant=[2, 7]))
    assert not is_completion_template(Template(user=[1, 7], assistant=None))
    with pytest.raises(UsageError):
        is_completion_template(Template(user=None, assistant=None))


# ---------------------------------------------------------------- processes of their own


def test_help_imports_no_torch():
    code = """
import sys
from inferplane.cli.main import VERBS, main, verb_parser
assert main(["--help"]) == main(["--version"]) == 0
assert main(["generat"]) == main(["generate", "--max-tokens", "x"]) == 2
for verb in VERBS:
    verb_parser(verb)
heavy = {"torch", "transformers", "numpy", "pluggy", "msgspec", "inferplane.plugins"}
heavy |= {name for name in sys.modules if name.startswith("inferplane.engine.")} - {
    "inferplane.engine.clients", "inferplane.engine.clients.options",  # the record that flags are made from
    "inferplane.engine.request.other_engines",  # a table for unknown flags
    "inferplane.engine.request", "inferplane.engine.request.arguments", "inferplane.engine.request.params",
    "inferplane.engine.request.fields",
}
heavy &= set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(SOURCE_PATHS))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_generate_quietly():
    child = start("generate", *DEVICE, "-p", PROMPT, *LONG, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_output(child, TIMEOUT_S)
    assert child.stdout.read(1), child.stderr.read()  # it generates
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=TIMEOUT_S)
    assert (child.returncode, err) == (130, b"")


def test_a_reader_that_goes_away_is_no_error():
    child = start("generate", *DEVICE, "-p", PROMPT, *LONG, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_output(child, TIMEOUT_S)
    assert child.stdout.read(1)
    child.stdout.close()
    assert (child.wait(TIMEOUT_S), child.stderr.read()) == (141, b"")
    child.stderr.close()


class AtTerminal:
    """A command at a terminal of its own."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.master, slave = pty.openpty()
        environment = {"TERM": "xterm-256color", "COLUMNS": "80", **environment}
        self.child = start(*words, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True)
        os.close(slave)
        self.seen = ""

    def until(self, pattern: str) -> str:
        """Reads until the pattern has come; returns what came since the last call, up to its end."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := re.search(pattern, self.seen)):
            self._check(deadline, pattern)
            self._wait(1)
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def interrupt(self, pattern: str) -> str:
        """Sends Ctrl-C until the pattern comes: readline misses one that comes just behind its prompt."""
        deadline = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self.seen):
            self._check(deadline, pattern)
            for _ in range(3):  # whoever presses it thrice means it once
                self.child.send_signal(signal.SIGINT)
            self._wait(1)
        return self.until(pattern)

    def say(self, line: str, pattern: str) -> str:
        """Types a line until the pattern comes: an earlier Ctrl-C may still be on its way, and take the line away."""
        deadline = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self.seen):
            self._check(deadline, pattern)
            self.type(line)
            patience = time.monotonic() + 5
            while time.monotonic() < patience and not re.search(pattern, self.seen):
                self._wait(0.5)
        return self.until(pattern)

    def _check(self, deadline: float, pattern: str) -> None:
        """Kill the command once the deadline has passed."""
        if time.monotonic() >= deadline:
            kill(self.child)
            raise AssertionError(f"{pattern!r} never came:\n{self.seen}")

    def _wait(self, seconds: float) -> None:
        if select.select([self.master], [], [], seconds)[0]:
            chunk = self._read()
            assert chunk, f"the command ended early:\n{self.seen}"
            self.seen += chunk

    def end(self) -> tuple[int, str]:
        """Waits for the command; returns its exit code and what was not yet seen."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            self._check(deadline, "the end")
            if select.select([self.master], [], [], 1)[0]:
                if not (chunk := self._read()):
                    break
                self.seen += chunk
        os.close(self.master)
        return self.child.wait(TIMEOUT_S), self.seen

    def _read(self) -> str:
        """What there is; empty when the command has ended, for which Linux has an error."""
        try:
            return os.read(self.master, 4096).decode(errors="replace")
        except OSError:
            return ""


def test_chat_at_a_terminal():
    chat = AtTerminal("chat", *DEVICE, *LONG, NO_COLOR="1")
    chat.until("Ctrl-D leaves")
    chat.until("> ")
    chat.type("def parse(text):\n")
    chat.until(r"parse\(text\):\s[\s\S]{20}")  # the echo, and some of a reply
    chat.child.send_signal(signal.SIGINT)
    assert "tokens/s" not in chat.until("stopped")
    chat.until("> ")
    chat.interrupt("/exit or Ctrl-D leaves")
    chat.say("/rest\n", "perhaps /reset was meant")
    chat.type("/reset\n")
    chat.until("begins anew")
    chat.until("> ")
    chat.type("\x04")
    code, rest = chat.end()
    assert code == 0
    assert "Traceback" not in rest


def test_generate_at_a_terminal():
    command = AtTerminal("generate", *DEVICE, "-p", PROMPT, "--max-tokens", "4", NO_COLOR="")
    command.until(r"\x1b\[2m" + re.escape(PROMPT) + r"\x1b\[0m")  # dimmed
    command.until(r"\x1b\[2m\d+ prompt tokens, ")
    assert command.end()[0] == 0
