"""What may be written where; each rule is shown to find a planted fault."""

from __future__ import annotations

import pytest

from tests.house import rules
from tests.house.rules import none, plant

CORE = rules.REPOSITORY / "core"
BACKENDS = rules.REPOSITORY / "backends"

# Path -> why this file is better in one piece.
LONG_FILES: dict[str, str] = {}


def test_core_names_no_device():
    none(rules.device_names(CORE))


@pytest.mark.parametrize(
    "line",
    [
        'x = torch.empty(1, device="cuda")',
        "torch.cuda.synchronize()",
        "if is_npu(x): pass",
        "# on a DCU this is slower",
        '"""LLM("m", device=\'xpu\')"""',
        "class CudaGraph: ...",
        'backend = "nccl"',
        "torch.version.hip",
        "cuda_graphs = {}",
        'device = "cpu"',
        "# LLM(model, device='cpu')",
        "# inferplane generate --device cpu",
        'HOST = "cpu"\nHOST = "cpu"',
    ],
)
def test_core_names_a_device(tmp_path, line):
    assert rules.device_names(plant(tmp_path, line))


@pytest.mark.parametrize(
    "line", ['HOST = "cpu"', 'HOST: Final = "cpu"  # never a backend', "chip = ship = 1", "x = x.cpu()", "# barracuda"]
)
def test_core_names_no_device_here(tmp_path, line):
    none(rules.device_names(plant(tmp_path, line)))


def test_names_say_what_is_inside():
    none(rules.bad_names(CORE, BACKENDS))


@pytest.mark.parametrize(
    "text", ["class BaseCache: ...", "class BlockManager: ...", "class RunnerImpl: ...", "class _Base: ..."]
)
def test_names_that_say_nothing(tmp_path, text):
    assert len(rules.bad_names(plant(tmp_path, text))) == 1


def test_files_named_for_nothing(tmp_path):
    assert len(rules.bad_names(plant(tmp_path, "", "utils.py"))) == 1
    none(rules.bad_names(plant(tmp_path / "other", "class Basement: ...\nclass Implicit: ...")))


def test_files_are_short():
    none(rules.long_files(CORE, BACKENDS, allowed=LONG_FILES))


def test_files_too_long(tmp_path):
    assert rules.long_files(plant(tmp_path, "x = 1\n" * 401), allowed={})
    none(rules.long_files(tmp_path, allowed={"fault.py": "one table, read as one"}))
    assert rules.long_files(tmp_path, allowed={"fault.py": " "})
    assert rules.long_files(plant(tmp_path, "x = 1\n" * 400), allowed={"fault.py": "no longer true"})


def test_grammar_is_python_3_10():
    none(rules.too_new_grammar(CORE, BACKENDS))


@pytest.mark.parametrize("text", ["type X = int", "def first[T](x: T) -> T: ...", "try: ...\nexcept* ValueError: ..."])
def test_grammar_too_new(tmp_path, text):
    assert len(rules.too_new_grammar(plant(tmp_path, text))) == 1


def test_checkpoints_run_no_code():
    none(rules.runs_foreign_code(CORE, BACKENDS))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "    from dill import loads",
        "torch.load(path)",
        "AutoConfig.from_pretrained(p, trust_remote_code=True)",
    ],
)
def test_checkpoints_that_run_code(tmp_path, text):
    assert len(rules.runs_foreign_code(plant(tmp_path, text))) == 1


def test_folders_are_alike():
    none(rules.folder_shape(rules.REPOSITORY))


def test_folders_unlike(tmp_path):
    package = ("inferplane_x/__init__.py", "inferplane_x/plugin.py", "inferplane_x/backend.py")
    for name in ("README.md", "backend.json", *package):
        plant(tmp_path / "backends" / "x", "", name)
    none(rules.folder_shape(tmp_path))
    plant(tmp_path / "core", "", "__init__.py")
    (tmp_path / "backends" / "x" / "README.md").unlink()
    assert len(rules.folder_shape(tmp_path)) == 2


# End of a path -> why it may read the clock that people set.
READ_THE_CLOCK = {
    "dialogue/render.py": "templates name the date",
    "verbs/bench/startup.py": "compares times of two processes",
    "verbs/bench/startup_process.py": "compares times of two processes",
    "verbs/bench/environment.py": "the date of a report",
    "conformance/evidence.py": "the date of a report",
    "serving/model.py": "`created` of OpenAI's format",
    "serving/rendering.py": "`created` of OpenAI's format",
    "serving/logs.py": "the time of a line",
    "serving/tracing.py": "the time of a span",
}


def test_limits_of_time_are_kept_by_a_clock_that_nobody_sets():
    none(rules.readings_of_the_clock(*rules.SHIPPED, allowed=READ_THE_CLOCK))


@pytest.mark.parametrize(
    "text", ["limit = time.time() + 3", "x = time.time_ns()", "datetime.now()", "datetime.datetime.utcnow()"]
)
def test_a_limit_kept_by_the_clock(tmp_path, text):
    assert len(rules.readings_of_the_clock(plant(tmp_path, text), allowed={})) == 1
    none(rules.readings_of_the_clock(plant(tmp_path, "limit = time.monotonic() + 3"), allowed={}))
