"""Run one vendor's suites, each in a process of its own: two vendors may use one operator namespace differently.

    python tests/vendors/run.py NAME [--evidence] [pytest's arguments]

`tests/vendors/NAME/suite.json` says what there is:

- `device`: the device's name; `plugin`: the module that registers it on an emulator;
- `emulated`: variables for each run of tests/vendors/NAME/test_*.py on the emulator;
- `conformance`: `{"label", "dtypes", "variables"}` of each run of the conformance suite on it;
- `contract`: `{"environment", "tests", "prepare", "variables"}`: the folder of an environment with the vendor's own
  library, the test files that run there on the calls that the other runs have noted, a script that prepares it, and
  variables for all of this; each may be left out. Where there is no environment, because no library can be had or
  loaded, the calls are bound to the restated schemas by tests/vendors/every/test_published.py.

Each run on the emulator has the vendor's own tests, and those of every vendor in tests/vendors/every.

With `--evidence` the runs write dated files to the backend's folder. `{build}` stands for build/vendors/NAME.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
EVERY = REPOSITORY / "tests" / "vendors" / "every"
PUBLISHED = EVERY / "test_published.py"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


class Suite:
    """One vendor's suites.

    Args:
        name: the vendor's folder.
        evidence: whether dated files are written.
        arguments: passed on to pytest.
    """

    def __init__(self, name: str, evidence: bool, arguments: list[str]) -> None:
        self.name, self.evidence, self.arguments = name, evidence, arguments
        self.folder = REPOSITORY / "tests" / "vendors" / name
        self.build = REPOSITORY / "build" / "vendors" / name
        self.suite: dict[str, Any] = json.loads((self.folder / "suite.json").read_text(encoding="utf-8"))
        self.failed: list[str] = []
        self.start = time.monotonic()

    def run(self) -> int:
        contract = self.suite.get("contract", {})
        contract_tests = [self.folder / name for name in contract.get("tests", ())]
        ignored = [f"--ignore={path}" for path in (*contract_tests, PUBLISHED)]
        shutil.rmtree(self.build / "calls", ignore_errors=True)
        for variables in self.suite["emulated"]:
            label = " ".join(f"{key}={value}" for key, value in variables.items())
            self.step(f"on the emulator, {label}", self.pytest(str(self.folder), str(EVERY), *ignored), variables)
        for run in self.suite["conformance"]:
            more = ["--pyargs", "inferplane.conformance", "--device", self.suite["device"], "--dtype", run["dtypes"]]
            if self.evidence:
                more += ["--evidence", str(self.evidence_file("l2", run["label"]))]
            self.step(f"conformance on the emulator, {run['label']}", self.pytest(*more), run["variables"])
        if contract:
            self.check_contract(contract, contract_tests)
        outcome = f"FAILED: {', '.join(self.failed)}" if self.failed else "all passed"
        print(f"\n== {self.name}: {outcome} ({self.seconds()} s)")
        return 1 if self.failed else 0

    def check_contract(self, contract: dict[str, Any], files: list[Path]) -> None:
        """Hold the noted calls against the vendor's library, or against what it publishes."""
        own = contract.get("environment")
        python = str(REPOSITORY / own / "bin" / "python") if own else sys.executable
        if "prepare" in contract:
            self.step("contract: preparing", [python, *contract["prepare"]], {}, emulated=False)
        # The source tree's own entry points are found from its folder, and there is no Inferplane here.
        variables = {**contract.get("variables", {}), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        if self.evidence:
            variables["INFERPLANE_CONTRACT_EVIDENCE"] = str(self.evidence_file("l1", "contract"))
        tests = map(str, files if own else (PUBLISHED, *files))
        against = "the vendor's own library" if own else "the vendor's published schemas"
        command = [python, "-m", "pytest", "-q", "-r", "fE", "--noconftest", *tests]
        self.step(f"contract with {against}", command, variables, emulated=False)

    def pytest(self, *more: str) -> list[str]:
        workers = os.environ.get("WORKERS", "2")
        command = [sys.executable, "-m", "pytest", "-q", "-r", "fE", "-n", workers, "--dist", "worksteal"]
        return [*command, *more, *self.arguments]

    def step(self, label: str, command: list[str], variables: dict[str, str], *, emulated: bool = True) -> None:
        print(f"\n== {self.name}: {label} (at {self.seconds()} s)", flush=True)
        environment = {**os.environ, **SETTINGS, "INFERPLANE_EMULATED_VENDOR": self.name}
        if emulated:
            environment["INFERPLANE_PLUGINS"] = f"only,inferplane_cpu.plugin,{self.suite['plugin']}"
            environment["INFERPLANE_EMULATED_CALLS"] = str(self.build / "calls")
        environment.update({key: self.fill(value) for key, value in variables.items()})
        command = [self.fill(word) for word in command]
        if subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode:
            self.failed.append(label)

    def fill(self, words: str) -> str:
        return words.replace("{build}", str(self.build))

    def evidence_file(self, level: str, label: str) -> Path:
        backend = Path("backends") / self.suite["device"].partition(":")[0] / "evidence"
        today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
        return backend / f"{level}-{today}-{label}.json"

    def seconds(self) -> int:
        return round(time.monotonic() - self.start)


if __name__ == "__main__":
    words = sys.argv[2:]
    sys.exit(Suite(sys.argv[1], "--evidence" in words, [w for w in words if w != "--evidence"]).run())
