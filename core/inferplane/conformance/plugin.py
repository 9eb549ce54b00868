"""The pytest plugin: options, expected failures, exit status, evidence.

Every pytest run in an environment that has Inferplane imports this module, so it imports nothing heavy, and it adds its
options (`--device` is a likely name elsewhere too) only to a run that asks for this suite.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from inferplane.conformance.evidence import Result
    from inferplane.conformance.subject import Subject
    from inferplane.conformance.xfails import Expected

SUITE = "inferplane.conformance"
FOLDER = Path(__file__).resolve().parent
CASE = "inferplane_case"
MEASURED = "inferplane_measured"
HARDWARE = "inferplane_hardware"
EMULATED = "inferplane_emulated"
NEEDS_NO_DEVICE = "test_hygiene"
NOT_RUN_STATUS = 5
"""pytest's own status for "no tests ran"."""

SUBJECT: pytest.StashKey[Subject] = pytest.StashKey()
EXPECTED: pytest.StashKey[list[Expected]] = pytest.StashKey()
HELD_BACK: pytest.StashKey[bool] = pytest.StashKey()
STALE: pytest.StashKey[list[Expected]] = pytest.StashKey()


def _asks_for_suite(args: list[str]) -> bool:
    named = [arg.replace(os.sep, ".") for arg in map(str, args)]
    return any(SUITE in arg and not arg.endswith(f"{SUITE}.plugin") for arg in named)  # -p names this module only


def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> None:
    """Add the options, early enough for the command line to be parsed with them."""
    if not _asks_for_suite(args):
        return
    group = parser.getgroup("inferplane", "Inferplane's conformance suite")
    group.addoption("--device", dest="inferplane_device", metavar="NAME", help="the device to test, as in LLM(device=)")
    group.addoption(
        "--dtype",
        dest="inferplane_dtype",
        metavar="LIST",
        default="float32,bfloat16",
        help="dtypes of activations, separated by commas (default: %(default)s)",
    )
    group.addoption(
        "--xfails",
        dest="inferplane_xfails",
        metavar="FILE",
        help="expected failures, strict (default: xfails.txt in the backend's folder, if it is there)",
    )
    group.addoption(
        "--slow",
        dest="inferplane_slow",
        action="store_true",
        help="two layers at true sizes also in host memory (5 GB); accelerators always run them",
    )
    told = "write what ran, as JSON; in a folder under a name of its own"
    group.addoption("--evidence", dest="inferplane_evidence", metavar="FILE", help=told)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes long, or much memory")
    device = getattr(config.option, "inferplane_device", _NOT_ASKED)
    if device is _NOT_ASKED or config.option.help:
        return
    if importlib.util.find_spec("hypothesis") is None:
        raise pytest.UsageError("The conformance suite needs hypothesis. To do: pip install 'inferplane[test]'.")
    from inferplane.conformance import xfails
    from inferplane.conformance.subject import Subject
    from inferplane.errors import InferplaneError
    from inferplane.plugins import host

    try:
        if device is None:
            names = ", ".join(entry.name for entry in host().devices()) or "no device"
            raise pytest.UsageError(f"Say which device to test, --device NAME. There is: {names}.")
        subject = config.stash[SUBJECT] = Subject.of(host(), str(device), config.option.inferplane_dtype)
        given = config.option.inferplane_xfails
        path = Path(given) if given else _own_xfails(subject)
        config.stash[EXPECTED] = xfails.read(path) if path else []
    except InferplaneError as error:
        raise pytest.UsageError(str(error)) from error
    config.pluginmanager.register(_Record(config, subject, path), "inferplane-conformance-record")


def pytest_sessionstart(session: pytest.Session) -> None:
    """From here pytest answers Ctrl-C in its own words; `inferplane conform` held it back while pytest was imported."""
    if getattr(session.config.option, "inferplane_device", _NOT_ASKED) is not _NOT_ASKED:
        from inferplane.cli.signals import raise_for_signal

        held_back = session.config.stash[HELD_BACK] = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if held_back:
            signal.signal(signal.SIGINT, raise_for_signal)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """All has run, and reports are written: it is too late for Ctrl-C."""
    if session.config.stash.get(HELD_BACK, False):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


_NOT_ASKED = object()


def _own_xfails(subject: Subject) -> Path | None:
    """`xfails.txt` in the backend's folder, beside its package, or inside the package where that was installed."""
    module = importlib.import_module(type(subject.backend).__module__.partition(".")[0])
    package = Path(module.__file__ or "").resolve().parent
    candidates = [package / "xfails.txt", package.parent / "xfails.txt"]
    return next((path for path in candidates if path.is_file()), None)


def _case_id(item: pytest.Item) -> str:
    """What failures, xfails and evidence call a case: "ops/rms_norm/toy:rms_norm/t3_d64/float32"."""
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
    """Whether the whole suite was asked for, no file or test of it and no selection."""
    whole = all(str(arg) == SUITE or Path(arg).resolve() == FOLDER for arg in config.args)
    return whole and not config.option.keyword and not config.option.markexpr


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report: pytest.TestReport = yield
    case = dict(report.user_properties).get(CASE)
    if report.failed and case:
        report.sections.append(
            ("case", f"{case}\nIf this is to be expected, list it in an xfails file under a reason.")
        )
    return report


class _Record:
    """Gathers how each case ended and says it at the end; in a run with workers, only where they report to."""

    def __init__(self, config: pytest.Config, subject: Subject, xfails: Path | None) -> None:
        self.config, self.subject, self.xfails = config, subject, xfails
        self.worker = hasattr(config, "workerinput")
        self.results: dict[str, Result] = {}
        self.hardware = self.emulated = ""

    def pytest_report_header(self) -> list[str]:
        entry = self.subject.entry
        state = self.subject.absent or entry.probe.reason
        lines = [f"device {entry.name}, served by {entry.distribution} {entry.version}: {state}"]
        return [*lines, f"expected failures: {self.xfails}"] if self.xfails else lines

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from inferplane.conformance.evidence import Result

        properties = dict(report.user_properties)
        case = properties.get(CASE)
        if not isinstance(case, str) or (report.passed and report.when != "call"):
            return
        status, detail = _status(report)
        measured = properties.get(MEASURED)
        facts: dict[str, Any] = dict(measured) if isinstance(measured, dict) else {}
        error = facts.get("error")
        self.results[case] = Result(
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
        """A worker of pytest-xdist has ended; it opened the device, this process did not."""
        told = getattr(node, "workeroutput", {})
        self.hardware, self.emulated = told.get(HARDWARE) or self.hardware, told.get(EMULATED) or self.emulated

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
        counts: dict[str, int] = {}
        for r in results:
            counts[r.status] = counts.get(r.status, 0) + 1
        told = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
        name = self.subject.name
        terminalreporter.section("conformance")
        served = f"{name}, served by {self.subject.entry.distribution} {self.subject.entry.version}"
        proved = evidence.level(results, complete=complete, emulated=bool(self.emulated))
        terminalreporter.line(f"{served}: {told}; level proved: {proved}")
        if self.emulated:
            terminalreporter.line(f"NOT RUN on hardware: {self.emulated}", yellow=True)
        if self.subject.absent:
            terminalreporter.line(f"NOT RUN on {name}: it is {self.subject.absent}", red=True)
            terminalreporter.line("Only what needs no device was checked.", red=True)
        path = self.config.option.inferplane_evidence
        if path:
            args = self.config.invocation_params.args
            command = " ".join(["pytest", *map(str, args)])
            ran = evidence.Run(self.hardware or "none", command, complete, self.emulated)
            written = evidence.write(path, self.subject, results, ran)
            terminalreporter.line(f"evidence: {written}")


def _status(report: pytest.TestReport) -> tuple[str, str]:
    """How a case ended, and why when it did not pass."""
    if hasattr(report, "wasxfail") and report.skipped:
        return "xfailed", str(report.wasxfail).removeprefix("reason: ")
    if report.passed:
        return "passed", ""
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        return ("refused" if reason.startswith("refused") else "not run"), reason
    words = [line for line in str(report.longrepr).splitlines() if line.strip()]
    return "failed", words[0] if words else ""
