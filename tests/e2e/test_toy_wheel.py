"""The example backend as a third party ships it: a wheel of its own, used and judged in a clean environment."""

from __future__ import annotations

import json

import pytest

from inferplane import LLM, SamplingParams
from tests.e2e import toy
from tests.e2e.suite import conformance, environment, told
from tests.e2e.tiny_models import make, prompts

LINES = 90
FAULT = ("k, v = kv.blocks[:, :, table]", "v, k = kv.blocks[:, :, table]")

USE = """
import json, sys, warnings
from inferplane import LLM, SamplingParams
folder, device, many = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    llm = LLM(folder, device=device, dtype="float32", max_batch=4, kv_cache_bytes=1 << 22)
results = llm.generate(many, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
print("REPORT " + json.dumps({
    "tokens": [result.token_ids for result in results],
    "warnings": [str(w.message) for w in caught],
    "plan": llm.explain(),
}))
"""


def test_example_is_short():
    """Under 90 lines; blank ones are not counted."""
    text = (toy.EXAMPLE / toy.MODULE).read_text(encoding="utf-8")
    assert sum(1 for line in text.splitlines() if line.strip()) < LINES


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, make("llama", "gqa", folder)


@pytest.fixture(scope="module")
def wanted(model):
    """What the cpu device makes of some prompts, as `USE` runs them."""
    many = prompts(160, (40, 7, 1))
    with LLM(model[0], device="cpu", dtype="float32", max_num_seqs=4, kv_cache_bytes=1 << 22) as llm:
        results = llm.generate(many, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    return many, [result.token_ids for result in results]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The python of an environment where the wheel is installed."""
    folder = tmp_path_factory.mktemp("toy")
    return toy.environment_with(toy.wheel(toy.copy(folder / "source"), folder / "dist"), folder / "env")


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The same with a fault in one kernel: K and V are taken for each other."""
    folder = tmp_path_factory.mktemp("broken_toy")
    return toy.environment_with(toy.wheel(toy.copy(folder / "source", FAULT), folder / "dist"), folder / "env")


def clean() -> dict[str, str]:
    """Wheels are found by their entry points alone; where Inferplane is not installed, its source tree is named."""
    env = environment()
    if toy.installed():
        del env["PYTHONPATH"], env["INFERPLANE_PLUGINS"]
    else:
        env["INFERPLANE_PLUGINS"] = "inferplane_cpu.plugin"
    return env


def use(python, folder, many: list[list[int]]) -> dict:
    out = toy.run([str(python), "-c", USE, str(folder), "toy", json.dumps(many)], clean(), cwd=folder)
    return json.loads(out.rpartition("REPORT ")[2])


def site(plan: dict, op: str) -> dict:
    return next(s for s in plan["sites"] if s["op"] == op)


def test_generates_the_cpu_devices_tokens(installed, model, wanted):
    many, theirs = wanted
    ours = use(installed, model[0], many)
    assert ours["tokens"] == theirs
    assert all(len(tokens) == 24 for tokens in ours["tokens"])
    assert not [w for w in ours["warnings"] if "wrong results" in w]
    plan = ours["plan"]
    assert [(kv["kind"], kv["layout"]) for kv in plan["kv_layouts"]] == [("gqa", "toy_32")]
    assert site(plan, "attention")["chosen"]["kernel"] == "toy:attention"
    assert site(plan, "linear")["chosen"]["kernel"] == "toy:linear"
    assert site(plan, "rms_norm")["chosen"]["kernel"] == "reference"


def test_passes_conformance(installed, tmp_path):
    done = conformance("toy", cwd=tmp_path, env=clean(), python=str(installed))
    assert done.returncode == 0, told(done)
    assert "toy, served by inferplane-toy 0.1.0: " in done.stdout


def test_a_fault_is_found_and_demoted(broken, model, wanted, tmp_path):
    """Conformance fails and says in which case; the canary keeps the kernel away, and the tokens are right."""
    done = conformance("toy", "-k", "ops or attention", cwd=tmp_path, env=clean(), python=str(broken))
    assert done.returncode == 1, told(done)
    assert "toy:attention does not compute attention" in done.stdout
    assert "ops/attention/toy:attention/decode/float32/toy_32" in done.stdout
    assert "toy:linear does not compute" not in done.stdout

    many, theirs = wanted
    ours = use(broken, model[0], many)
    assert ours["tokens"] == theirs
    assert [w for w in ours["warnings"] if w.startswith("Kernel toy:attention for op 'attention'")]
    attention = site(ours["plan"], "attention")
    assert attention["chosen"]["kernel"] == "reference"
    (loser,) = attention["rejected"]
    assert loser["kernel"] == "toy:attention" and loser["reason"].startswith(
        "demoted: canary failed on sample 'decode'"
    )
    assert site(ours["plan"], "linear")["chosen"]["kernel"] == "toy:linear"
