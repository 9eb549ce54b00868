"""The pytest plugin: options, expected failures, exit status, evidence.

Every pytest run in an environment with Inferplane imports this module, so its imports are light. It adds its options
only to runs of this suite, because other plugins may define an option such as `--device` too.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from inferplane.conformance.evidence import CaseResult
    from inferplane.conformance.subject import Subject
    from inferplane.conformance.xfails import Expected

SUITE = "inferplane.conformance"
FOLDER = Path(__file__).resolve().parent
CASE = "inferplane_case"
MEASURED = "inferplane_measured"
HARDWARE = "inferplane_hardware"
EMULATED = "inferplane_emulated"
NEEDS_NO_DEVICE = "test_hygiene"
FILE = {"metavar": "FILE"}
NOT_RUN_STATUS = 5
"""pytest's own status for "no tests ran"."""

OPTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("device", "the device to test, as in LLM(device=)", {"metavar": "NAME"}),
    (
        "dtype",
        "dtypes of activations, separated by commas (default: %(default)s)",
        {"metavar": "LIST", "default": "float32,bfloat16"},
    ),
    ("xfails", "expected failures, strict (default: xfails.txt in the backend's folder, if it exists)", FILE),
    (
        "slow",
        "two layers at true sizes also in host memory (5 GB); accelerators always run them",
        {"action": "store_true"},
    ),
    ("evidence", "write the results as JSON; in a folder, choose the name of the file", FILE),
)
"""The suite's options: name, help, and further settings of pytest's `addoption`."""

SUBJECT: pytest.StashKey[Subject] = pytest.StashKey()
EXPECTED: pytest.StashKey[list[Expected]] = pytest.StashKey()
SIGINT_BLOCKED: pytest.StashKey[bool] = pytest.StashKey()
STALE: pytest.StashKey[list[Expected]] = pytest.StashKey()


def _runs_suite(args: list[str]) -> bool:
    named = [arg.replace(os.sep, ".") for arg in map(str, args)]
    return any(SUITE in arg and not arg.endswith(f"{SUITE}.plugin") for arg in named)  # -p names only this module


def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> None:
    """Add the options before pytest parses the command line."""
    if not _runs_suite(args):
        return
    group = parser.getgroup("inferplane", "Inferplane's conformance suite")
    for name, words, settings in OPTIONS:
        group.addoption(f"--{name}", dest=f"inferplane_{name}", help=words, **settings)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes long, or much memory")
    if not hasattr(config.option, "inferplane_device") or config.option.help:
        return
    from inferplane.conformance import xfails
    from inferplane.conformance.subject import Subject
    from inferplane.errors import InferplaneError, install_hint
    from inferplane.plugins import host

    if importlib.util.find_spec("hypothesis") is None:
        raise pytest.UsageError(f"The conformance suite needs hypothesis. To do: {install_hint('test')}.")
    try:
        device = config.option.inferplane_device
        if device is None:
            names = ", ".join(entry.name for entry in host().devices()) or "no device"
            raise pytest.UsageError(f"State the device to test, --device NAME. There is: {names}.")
        subject = config.stash[SUBJECT] = Subject.of(host(), str(device), config.option.inferplane_dtype)
        given = config.option.inferplane_xfails
        path = Path(given) if given else _own_xfails(subject)
        config.stash[EXPECTED] = xfails.read(path) if path else []
    except InferplaneError as error:
        raise pytest.UsageError(str(error)) from error
    config.pluginmanager.register(_ResultCollector(config, subject, path), "inferplane-conformance-recorder")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Unblock Ctrl-C, which `inferplane conform` blocks while it imports pytest; from here on pytest handles it."""
    if hasattr(session.config.option, "inferplane_device"):
        from inferplane.cli.signals import raise_for_signal

        blocked = session.config.stash[SIGINT_BLOCKED] = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if blocked:
            signal.signal(signal.SIGINT, raise_for_signal)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Block Ctrl-C again: all cases have run, and the reports are written."""
    if session.config.stash.get(SIGINT_BLOCKED, False):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _own_xfails(subject: Subject) -> Path | None:
    """`xfails.txt` inside the backend's package or, in a source tree, beside it."""
    module = importlib.import_module(type(subject.backend).__module__.partition(".")[0])
    package = Path(module.__file__ or "").resolve().parent
    candidates = [package / "xfails.txt", package.parent / "xfails.txt"]
    return next((path for path in candidates if path.is_file()), None)


def _case_id(item: pytest.Item) -> str:
    """The id of a case in failures, xfails and evidence: "ops/rms_norm/toy:rms_norm/t3_d64/float32"."""
    group = item.path.stem.removeprefix("test_")
    callspec = getattr(item, "callspec", None)
    return f"{group}/{callspec.id if callspec else item.name.removeprefix('test_')}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SUBJECT not in config.stash:
        return
    subject, expected = config.stash[SUBJECT], config.stash[EXPECTED]
    ours = [item for item in items if item.path.parent == FOLDER]
    used: set[int] = set()
    for item in ours:
        case = _case_id(item)
        item.user_properties.append((CASE, case))
        if subject.absent and item.path.stem != NEEDS_NO_DEVICE:
            item.add_marker(pytest.mark.skip(reason=f"not run: {subject.name} is {subject.absent}"))
        elif item.get_closest_marker("slow") and not (config.option.inferplane_slow or subject.accelerator):
            item.add_marker(pytest.mark.skip(reason="not run: in host memory only with --slow"))
        for line in expected:
            if line.matches(case):
                used.add(line.line)
                item.add_marker(pytest.mark.xfail(reason=line.reason, strict=True))
    config.stash[STALE] = [line for line in expected if line.line not in used] if _complete(config) else []


def _complete(config: pytest.Config) -> bool:
    """True if the user requested the whole suite, not a part of it."""
    all_files = all(str(arg) == SUITE or Path(arg).resolve() == FOLDER for arg in config.args)
    return all_files and not config.option.keyword and not config.option.markexpr


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report: pytest.TestReport = yield
    case = dict(report.user_properties).get(CASE)
    if report.failed and case:
        report.sections.append(
            ("case", f"{case}\nIf this failure is expected, list it in an xfails file with a reason.")
        )
    return report


class _ResultCollector:
    """Collects the result of each case and reports all at the end, in a run with workers only on their controller."""

    def __init__(self, config: pytest.Config, subject: Subject, xfails: Path | None) -> None:
        self.config, self.subject, self.xfails = config, subject, xfails
        self.worker = hasattr(config, "workerinput")
        self.results: dict[str, CaseResult] = {}
        self.hardware = self.emulated = ""

    def pytest_report_header(self) -> list[str]:
        entry = self.subject.entry
        state = self.subject.absent or entry.probe.reason
        lines = [f"device {entry.name}, served by {entry.distribution} {entry.version}: {state}"]
        return [*lines, f"expected failures: {self.xfails}"] if self.xfails else lines

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from inferplane.conformance.evidence import CaseResult

        properties = dict(report.user_properties)
        case = properties.get(CASE)
        if not isinstance(case, str) or (report.passed and report.when != "call"):
            return
        facts: dict[str, Any] = {}
        for name, measured in report.user_properties:
            if name == MEASURED and isinstance(measured, dict):
                facts.update(measured)
        status, detail = _status(report, refused=bool(facts.get("refused")))
        error = facts.get("error")
        self.results[case] = CaseResult(
            group=case.partition("/")[0],
            case=case,
            status=status,
            op=facts.get("op", ""),
            error=error if error is not None and math.isfinite(error) else None,
            tolerance=facts.get("tolerance"),
            detail=detail,
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the hardware from a worker of pytest-xdist that ended: it opened the device, this process did not."""
        output = getattr(node, "workeroutput", {})
        self.hardware, self.emulated = output.get(HARDWARE) or self.hardware, output.get(EMULATED) or self.emulated

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.subject.state is not None:
            self.hardware = f"{self.subject.state.name}, {self.subject.state.arch}"
            self.emulated = self.subject.state.emulated
        if self.worker:
            output = self.config.workeroutput  # type: ignore[attr-defined]
            output[HARDWARE], output[EMULATED] = self.hardware, self.emulated
            return
        ran = any(r.status in ("passed", "xfailed") for r in self.results.values())
        if exitstatus == 0 and (self.subject.absent or not ran):
            session.exitstatus = NOT_RUN_STATUS

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.worker or not self.results:
            return
        from inferplane.conformance import evidence

        results, complete = list(self.results.values()), _complete(self.config)
        counts = Counter(r.status for r in results)
        totals = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
        name = self.subject.name
        terminalreporter.section("conformance")
        served = f"{name}, served by {self.subject.entry.distribution} {self.subject.entry.version}"
        proved = evidence.level(results, complete=complete, emulated=bool(self.emulated))
        terminalreporter.line(f"{served}: {totals}; level proved: {proved}")
        if self.emulated:
            terminalreporter.line(f"NOT RUN on hardware: {self.emulated}", yellow=True)
        if self.subject.absent:
            terminalreporter.line(f"NOT RUN on {name}: it is {self.subject.absent}", red=True)
            terminalreporter.line("Only cases that need no device ran.", red=True)
        path = self.config.option.inferplane_evidence
        if path:
            args = self.config.invocation_params.args
            command = " ".join(["pytest", *map(str, args)])
            ran = evidence.Run(self.hardware or "none", command, complete, self.emulated)
            written = evidence.write(path, self.subject, results, ran)
            terminalreporter.line(f"evidence: {written}")


def _status(report: pytest.TestReport, *, refused: bool) -> tuple[str, str]:
    """The status of a case, and the reason if it did not pass; `refused`: the kernel does not accept the case."""
    if hasattr(report, "wasxfail") and report.skipped:
        return "xfailed", str(report.wasxfail).removeprefix("reason: ")
    if report.passed:
        return "passed", ""
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return ("refused" if refused else "not run"), reason.removeprefix("Skipped: ")
    words = [line for line in str(report.longrepr).splitlines() if line.strip()]
    return "failed", words[0] if words else ""
