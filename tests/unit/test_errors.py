"""Words that errors share: where a plugin's code failed, and how an extra is installed."""

import json

import pytest

from inferplane import errors
from inferplane.errors import in_words, install_hint, place_of


def raised(call):
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


def test_the_place_is_the_innermost_line_of_the_plugin(tmp_path):
    path = tmp_path / "acme.py"
    path.write_text(
        "import json, torch\n"
        "def own(): raise ValueError('no  card\\n here')\n"
        "def through_torch(): return torch.zeros(2) @ torch.zeros(3)\n"
        "def through_python(): return json.loads('{')\n"
        "def through_core():\n    from inferplane.plugin import Placement\n    Placement(2, 1)\n"
        "class Mute(Exception):\n    def __str__(self): raise RuntimeError\n"
        "def mute(): raise Mute\n"
    )
    names: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    lines = {"own": 2, "through_torch": 3, "through_python": 4, "through_core": 7, "mute": 10}
    for name, line in lines.items():
        assert place_of(raised(names[name])) == f" at {path}:{line}", name
    assert in_words(raised(names["own"])) == f"ValueError: no card here at {path}:2"
    assert in_words(raised(names["mute"])) == f"Mute at {path}:10"


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("a", "a."),
        ("a.", "a."),
        ("a.. ", "a."),
        ("a...", "a..."),
        ("why?", "why?"),
        ("unknown tag 'do'.", "unknown tag 'do'."),
    ],
)
def test_a_sentence_has_one_full_stop(text, ended):
    assert errors.sentence(text) == ended
    assert str(errors.UsageError("x.", there_is=text, remedy=text)) == f"x. There is: {ended} To do: {ended}"


def test_without_a_place():
    assert in_words(ValueError("x")) == "ValueError: x"
    assert in_words(KeyError()) == "KeyError"
    error = raised(lambda: compile("a b", "acme.py", "exec"))
    assert in_words(error).startswith("SyntaxError: ") and in_words(error).endswith("(acme.py, line 1)")


def test_errors_of_python_alone_have_no_place():
    error = raised(lambda: json.loads("{"))
    while error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next
    assert place_of(error) == ""


@pytest.mark.parametrize(
    ("core", "project", "words"),
    [
        ("clone/core/inferplane", "clone/pyproject.toml", "pip install -e '.[serving]' in {}/clone"),
        ("clone/core/inferplane", None, "pip install 'inferplane[serving]'"),
        ("lib/python3.12/site-packages/inferplane", None, "pip install 'inferplane[serving]'"),
        ("work/site-packages/inferplane", "work/pyproject.toml", "pip install 'inferplane[serving]'"),
    ],
)
def test_extras_are_installed_from_where_inferplane_is(core, project, words, tmp_path, monkeypatch):
    (tmp_path / core).mkdir(parents=True)
    if project:
        (tmp_path / project).write_text("")
    monkeypatch.setattr(errors, "_CORE", tmp_path / core)
    assert install_hint("serving") == words.format(tmp_path)
