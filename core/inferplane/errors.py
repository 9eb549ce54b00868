"""One tree of errors. Each class says who is at fault and who can mend it; each message says what was asked, what
there is, and what to do.

`InferplaneError` carries the three parts separately so that front ends (command line, HTTP) can show them as they
like; `str()` joins them into one sentence each, on lines of their own where the first part has several.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence


def first_of(names: Sequence[str], most: int = 5) -> str:
    """Names for a message: the first few, and how many more there are."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")


class InferplaneError(Exception):
    """Root of every error raised on purpose by Inferplane.

    Args:
        what: what was asked for and why it cannot be done.
        there_is: what is available instead (may be empty).
        remedy: what the reader can do about it (may be empty).
    """

    def __init__(self, what: str, *, there_is: str = "", remedy: str = "") -> None:
        self.what, self.there_is, self.remedy = what, there_is, remedy
        super().__init__(what)

    def __str__(self) -> str:
        parts = [self.what]
        if self.there_is:
            parts.append(f"There is: {self.there_is}.")
        if self.remedy:
            parts.append(f"To do: {self.remedy}.")
        return ("\n" if "\n" in self.what else " ").join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.there_is, self.remedy)


def _rebuild(cls: type[InferplaneError], what: str, there_is: str, remedy: str) -> InferplaneError:
    error = cls.__new__(cls)
    InferplaneError.__init__(error, what, there_is=there_is, remedy=remedy)
    return error


class UsageError(InferplaneError, ValueError):
    """The caller passed something that cannot be meant: a wrong name, an empty prompt, a negative size.

    At fault: the calling code. Mended by: changing the argument that the message names.
    """


class DeviceError(InferplaneError, RuntimeError):
    """The device that was asked for cannot be used. Another device is never taken silently.

    At fault: the installation (a runtime is missing) or the hardware. Mended by: the install hint in the message, or
    another `device=`.
    """


class PluginError(InferplaneError, RuntimeError):
    """A plugin broke its promise: it raised, failed validation, or speaks another API major.

    At fault: the plugin named in the message (with distribution and version). Mended by: its author, or by excluding
    it with `INFERPLANE_PLUGINS=-name`.
    """


class KernelError(InferplaneError, RuntimeError):
    """A kernel is declared wrongly, cannot be imported, or returned something its op does not promise.

    At fault: the kernel's provider. Mended by: its author, or by pinning another provider for that op.
    """


class BindError(InferplaneError, RuntimeError):
    """No plan satisfies what was asked: a pin that no kernel meets, or `strict=True` with ops left on the reference.

    At fault: usually the combination of model, device and options. Mended by: dropping the pin or `strict`, or a
    kernel for the ops that the message names.
    """


class UnsupportedModelError(InferplaneError, ValueError):
    """The checkpoint's architecture, or a setting in its config, is not implemented.

    At fault: nobody. Mended by: adding the family (docs/adding-a-model.md) or loading another model.
    """


class CheckpointError(InferplaneError, RuntimeError):
    """A checkpoint is incomplete, damaged or contradicts its config. Names the file and the tensor.

    At fault: the files. Mended by: downloading or exporting them again.
    """


class CapacityError(InferplaneError, RuntimeError):
    """Memory or KV blocks do not suffice for what was asked; nothing was lost.

    At fault: the sizes asked for. Mended by: the smaller sizes that the message names.
    """


class GenerationError(InferplaneError, RuntimeError):
    """Every request of a call failed while it ran. (A single one that fails ends alone, with the reason in its result.)

    At fault: a kernel or the device, named in the message. Mended by: another provider for the op, or the device.
    """


class EngineError(InferplaneError, RuntimeError):
    """The engine has ended, or cannot be reached; every stream that it ran was told so.

    At fault: what the message names: a device, a lack of memory, somebody who ended the process. Mended by: a new
    engine.
    """


class InferplaneWarning(UserWarning):
    """Something works, but worse than it could: a demoted kernel, a hot op on its reference."""


def warn(what: str) -> None:
    """Warn with an `InferplaneWarning` at the nearest caller whose module's name does not begin with `inferplane`."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("inferplane"):
        frame, level = frame.f_back, level + 1
    warnings.warn(what, InferplaneWarning, stacklevel=level)
