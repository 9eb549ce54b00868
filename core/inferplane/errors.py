"""The exceptions of Inferplane. Each class states what is at fault and what fixes it. Each message states what is
wrong, what there is, and what to do.

`InferplaneError` has these three parts as attributes, so that front ends (command line, HTTP) can format them. `str()`
joins them, one sentence each, or one line each if the first part has several lines.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

_CORE = Path(__file__).resolve().parent
_STANDARD = Path(sysconfig.get_path("stdlib"))


def first_of(names: Sequence[str], max_names: int = 5) -> str:
    """Format names for a message: the first few, and the number of the others."""
    left = len(names) - max_names
    return ", ".join(names[:max_names]) + (f" and {left} more" if left > 0 else "")


def deprecation_message(old: str, new: str) -> str:
    """The text of every DeprecationWarning about an old name."""
    return f"{old} is deprecated; use {new} (removed in 0.3)."


def install_hint(extra: str) -> str:
    """The command that installs an extra of Inferplane: from the clone, if this is one, else from a package index."""
    clone = _CORE.parents[1]
    if _CORE.parent.name == "core" and (clone / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]' in {clone}"
    return f"pip install 'inferplane[{extra}]'"


def sentence(text: str) -> str:
    """End a text with one full stop, whether it has one already or not; an ellipsis, "?" and "!" end it too."""
    text = text.rstrip()
    if text.endswith(("...", "?", "!")):
        return text
    return f"{text.rstrip('.')}."


def in_words(error: BaseException) -> str:
    """Type, message and place of an exception on one line: "ValueError: no card at /home/me/acme/backend.py:12".

    The place is the innermost frame of code that is neither core's, torch's nor Python's: where a plugin failed.
    """
    try:
        words = " ".join(str(error).split())
    except Exception:  # __str__ of the exception may be code of the plugin
        words = ""
    return (f"{type(error).__name__}: {words}" if words else type(error).__name__) + place_of(error)


def place_of(error: BaseException) -> str:
    """The words " at FILE:LINE" for the innermost frame outside of core, torch and Python's library; else empty."""
    if isinstance(error, SyntaxError):  # its message has file and line
        return ""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    others = {_CORE, Path(torch).parent} if torch else {_CORE}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        folders = set(Path(frame.filename).parents)
        is_standard = _STANDARD in folders and "site-packages" not in frame.filename
        if not (frame.filename.startswith("<") or is_standard or others & folders):
            return f" at {frame.filename}:{frame.lineno}"
    return ""


class InferplaneError(Exception):
    """Base class of all errors that Inferplane raises on purpose.

    Args:
        what: what was requested and why it is impossible.
        there_is: what is available instead (may be empty).
        remedy: what the user can do (may be empty).
    """

    def __init__(self, what: str, *, there_is: str = "", remedy: str = "") -> None:
        self.what, self.there_is, self.remedy = what, there_is, remedy
        super().__init__(what)

    def __str__(self) -> str:
        parts = [self.what]
        if self.there_is:
            parts.append(sentence(f"There is: {self.there_is}"))
        if self.remedy:
            parts.append(sentence(f"To do: {self.remedy}"))
        return ("\n" if "\n" in self.what else " ").join(parts)

    def add_subject(self, subject: str) -> None:
        """Begin the first part with what it is about: one of several inputs."""
        self.what = f"{subject}: {self.what}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.there_is, self.remedy)


def _rebuild(cls: type[InferplaneError], what: str, there_is: str, remedy: str) -> InferplaneError:
    error = cls.__new__(cls)
    InferplaneError.__init__(error, what, there_is=there_is, remedy=remedy)
    return error


class UsageError(InferplaneError, ValueError):
    """An argument is invalid: a wrong name, an empty prompt, a negative size.

    At fault: the calling code. Fix: change the argument that the message names.
    """


class DeviceError(InferplaneError, RuntimeError):
    """The requested device cannot be used. No other device is ever used silently.

    At fault: the installation (a runtime is missing) or the hardware. Fix: follow the install hint in the message, or
    choose another `device=`.
    """


class PluginError(InferplaneError, RuntimeError):
    """A plugin raised an exception, failed validation, or uses another major version of the API.

    At fault: the plugin that the message names (with distribution and version). Fix: correct the plugin, or exclude it
    with `INFERPLANE_PLUGINS=-name`.
    """


class KernelError(InferplaneError, RuntimeError):
    """A kernel's declaration is invalid, it cannot be imported, or its result does not fit its op.

    At fault: the kernel's provider. Fix: correct the kernel, or pin another provider for that op.
    """


class BindError(InferplaneError, RuntimeError):
    """No plan satisfies the options: a pin that no kernel meets, or `strict=True` with ops on the reference.

    At fault: usually the combination of model, device and options. Fix: remove the pin or `strict`, or add a kernel for
    the ops that the message names.
    """


class UnsupportedModelError(InferplaneError, ValueError):
    """The checkpoint's architecture, or a setting in its config, is not implemented.

    At fault: none. Fix: add the family (docs/adding-a-model.md) or load another model.
    """


class CheckpointError(InferplaneError, RuntimeError):
    """A checkpoint is incomplete, damaged or contradicts its config. The message names the file and the tensor.

    At fault: the files. Fix: download or export them again.
    """


class DownloadError(InferplaneError, RuntimeError):
    """A model cannot be downloaded: no network, a busy or refusing hub, a gated repository, an unwritable cache.

    At fault: what the message names. Fix: as it says; what has arrived is used again.
    """


class CapacityError(InferplaneError, RuntimeError):
    """Memory or KV blocks do not suffice for the request; nothing was lost.

    At fault: the requested sizes. Fix: use the smaller sizes that the message names.
    """


class GenerationError(InferplaneError, RuntimeError):
    """All requests of a call failed while they ran. (If only some fail, their results have the reason.)

    At fault: a kernel or the device, named in the message. Fix: pin another provider for the op, or repair the device.
    """


class EngineError(InferplaneError, RuntimeError):
    """The engine has ended or cannot be reached; all its streams ended with this error.

    At fault: the cause in the message: a device, a lack of memory, a signal that ended the process. Fix: start a new
    engine.
    """


class InferplaneWarning(UserWarning):
    """Something works, but slower than it could: a demoted kernel, a hot op on its reference."""


def warn(what: str) -> None:
    """Issue an `InferplaneWarning` at the nearest caller outside of `inferplane`."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("inferplane"):
        frame, level = frame.f_back, level + 1
    warnings.warn(what, InferplaneWarning, stacklevel=level)


def log_choice(what: str) -> None:
    """Log a line about a choice that the user did not make: at the level INFO, but at WARNING in a program that has not
    configured logging, which shows warnings alone.
    """
    log = logging.getLogger("inferplane")
    is_configured = log.level != logging.NOTSET or log.isEnabledFor(logging.INFO)
    log.log(logging.INFO if is_configured else logging.WARNING, "%s", what)
