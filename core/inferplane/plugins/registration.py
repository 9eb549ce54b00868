"""The `register` callbacks. They check at once what a plugin passes, so that a mistake raises at the plugin's line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.errors import PluginError
from inferplane.plugins.hookspecs import HOOKS
from inferplane.plugins.records import Claim, Origin
from inferplane.types import Backend, Kernel, WeightFormat

AUTO = "auto"
"""The value of `device=` for "the preferred available device"; no plugin may register this name."""

NOT_PROPOSERS = ("draft_model", "mtp", "eagle", "draft", "inference_with_reference", "none", "None")
"""Methods of speculation that load a network, and other spellings; no plugin may register them."""

REGISTER_HOOKS = tuple(hook for hook in HOOKS if hook.startswith("inferplane_register_"))

_DEVICE = re.compile(r"[a-z][a-z0-9_-]*(:[a-z][a-z0-9_-]*)?")
_WORD = re.compile(r"[A-Za-z][\w.-]*")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class Registrations:
    """The registrations of one plugin. The host uses them only after all hooks of the plugin returned.

    Args:
        origin: the plugin.
    """

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.devices: list[Claim] = []
        self.kernels: list[Claim] = []
        self.quantization: list[Claim] = []
        self.models: list[Claim] = []
        self.reply_forms: list[Claim] = []
        self.calibration: list[Claim] = []
        self.proposers: list[Claim] = []
        self._open = True

    def callback(self, hook: str) -> Callable[[str, Any], None]:
        """The callback to pass to this hook."""
        callbacks: dict[str, Callable[[str, Any], None]] = {
            "inferplane_register_backends": self._backend,
            "inferplane_register_kernels": self._kernels,
            "inferplane_register_quantization": self._quantization,
            "inferplane_register_models": self._model,
            "inferplane_register_reply_forms": self._reply_form,
            "inferplane_register_calibration": self._calibration,
            "inferplane_register_proposers": self._proposer,
        }
        return callbacks[hook]

    def close(self) -> None:
        """Refuse later calls, because a plugin may store a callback."""
        self._open = False

    def _backend(self, name: str, target: Any) -> None:
        _check(name, _DEVICE, "device", '"name" or "family:variant" in lower case')
        if name.partition(":")[0] == AUTO:
            raise PluginError(f"device {name!r} cannot be registered: {AUTO!r} means the preferred device.")
        if isinstance(target, type) and issubclass(target, Backend):
            if problem := unfit(name, target):
                raise PluginError(f"device {name!r}: {problem}.")
        elif not (isinstance(target, str) and _DOTTED.fullmatch(target)):
            raise PluginError(
                f"device {name!r}: target {target!r} is neither a Backend subclass nor a dotted name.",
                remedy='pass a class that derives from Backend, or its name as "module:Class"',
            )
        self._add(self.devices, "device", name, target)

    def _kernels(self, device: str, kernels: Sequence[Kernel] | str) -> None:
        _check(device, _DEVICE, "device", '"name" or "family:variant" in lower case')
        if isinstance(kernels, str):
            if not _DOTTED.fullmatch(kernels):
                raise PluginError(f'kernels for {device!r}: {kernels!r} is not a dotted name "module:function".')
        else:
            kernels = check_kernels(kernels, f"kernels for {device!r}")
        self._add(self.kernels, "", device, kernels)

    def _quantization(self, name: str, target: str | WeightFormat | Callable[..., Any]) -> None:
        self._add_named(self.quantization, "quantization", name, target)

    def _model(self, architecture: str, target: str | Callable[..., Any]) -> None:
        self._add_named(self.models, "architecture", architecture, target)

    def _reply_form(self, name: str, form: ReplyForm) -> None:
        _check(name, _WORD, "reply form", "letters, digits, '_', '.', '-'")
        if not isinstance(form, ReplyForm):
            raise PluginError(f"reply form {name!r}: {form!r} is not a ReplyForm.")
        if form.name != name:
            raise PluginError(f"reply form {name!r}: its name is {form.name!r}.", remedy="register it by its name")
        self._add(self.reply_forms, "reply form", name, form)

    def _calibration(self, name: str, target: str | Callable[..., Any]) -> None:
        self._add_named(self.calibration, "calibration method", name, target)

    def _proposer(self, name: str, target: str | Callable[..., Any]) -> None:
        if name in NOT_PROPOSERS:
            raise PluginError(f"proposer {name!r} cannot be registered: that name has a meaning of core's.")
        self._add_named(self.proposers, "proposer", name, target)

    def _add_named(self, into: list[Claim], what: str, name: str, target: Any) -> None:
        _check(name, _WORD, what, "letters, digits, '_', '.', '-'")
        fits = isinstance(target, WeightFormat) if what == "quantization" else False
        if not (fits or callable(target) or (isinstance(target, str) and _DOTTED.fullmatch(target))):
            wrong = f'target {target!r} is neither callable nor a dotted name "module:name"'
            raise PluginError(f"{what} {name!r}: {wrong}.")
        self._add(into, what, name, target)

    def _add(self, into: list[Claim], unique: str, name: str, target: Any) -> None:
        if not self._open:
            raise PluginError(f"{name!r} is registered too late: register() works inside its hook only.")
        if unique and any(claim.name == name for claim in into):
            raise PluginError(f"{unique} {name!r} is registered twice by the same plugin.")
        into.append(Claim(name, target, self.origin))


def check_kernels(kernels: Any, what: str) -> list[Kernel]:
    """Return `kernels` as a list.

    Raises:
        PluginError: it is not a sequence of `Kernel`.
    """
    if not isinstance(kernels, Sequence) or isinstance(kernels, str):
        raise PluginError(f"{what}: {type(kernels).__name__} is not a list of Kernel.")
    for i, kernel in enumerate(kernels):
        if not isinstance(kernel, Kernel):
            raise PluginError(f"{what}: item {i} is a {type(kernel).__name__}, not a Kernel.")
    return list(kernels)


def unfit(name: str, target: Any) -> str:
    """The reason why `target` cannot serve the device `name`; empty if it can."""
    if not (isinstance(target, type) and issubclass(target, Backend)):
        return f"{target!r} is not a Backend subclass"
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        return f"{target.__name__} lacks {', '.join(missing)}"
    for attribute in ("name", "torch_device"):
        if not isinstance(getattr(target, attribute, None), str):
            return f"{target.__name__}.{attribute} is not a string"
    if target.name != name:
        return f"{target.__name__}.name is {target.name!r}, registered is {name!r}"
    if type(target.auto_rank) is not int:
        return f"{target.__name__}.auto_rank is {target.auto_rank!r}, not an integer"
    return ""


def _check(name: Any, pattern: re.Pattern[str], what: str, form: str) -> None:
    if not (isinstance(name, str) and pattern.fullmatch(name)):
        raise PluginError(f"{what} name {name!r} is malformed.", remedy=f"write {form}")
