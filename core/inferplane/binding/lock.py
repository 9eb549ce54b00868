"""The lock file: kernel choices that were measured once, valid for one fingerprint of machine and versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferplane.errors import UsageError
from inferplane.files import write_atomically
from inferplane.ops import Op

SCHEMA = 1


def signature(op: Op) -> str:
    """Twelve hexadecimal digits that name an op's static signature; equal across processes and machines."""
    return op.once("signature", lambda: hashlib.sha256(repr(op.key()).encode()).hexdigest()[:12])


def read_lock(path: str | Path, fingerprint: Mapping[str, Any] | None) -> dict[str, str]:
    """Choices of a lock file, `{"op|step_kind|signature": kernel}`.

    Args:
        path: the file.
        fingerprint: this machine's; the file's fingerprint must equal it. None: any will do.

    Raises:
        UsageError: the file cannot be read, has another schema, or has another fingerprint (the message names the
            differences).
    """
    try:
        content = json.loads(Path(path).read_text())
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"Lock file {path} cannot be read: {error}.", remedy="create it again on this machine"
        ) from error
    if content.get("schema") != SCHEMA:
        raise UsageError(f"Lock file {path} has schema {content.get('schema')!r}.", there_is=f"schema {SCHEMA}")
    theirs, choices = content.get("fingerprint"), content.get("choices")
    if not isinstance(theirs, dict) or not isinstance(choices, dict):
        raise UsageError(
            f"Lock file {path} lacks its fingerprint or its choices.", remedy="create it again on this machine"
        )
    here = theirs if fingerprint is None else fingerprint
    other = sorted(k for k in {*theirs, *here} if theirs.get(k) != here.get(k))
    if other:
        difference = ", ".join(f"{k}: {theirs.get(k)!r} there, {here.get(k)!r} here" for k in other)
        raise UsageError(
            f"Lock file {path} was made for another machine ({difference}).", remedy="create one on this machine"
        )
    return {str(k): str(v) for k, v in choices.items()}


def write_lock(
    path: str | Path,
    fingerprint: Mapping[str, Any],
    choices: Mapping[str, str],
    measured: Mapping[str, Any] | None = None,
) -> None:
    """Write a lock file completely or not at all.

    Args:
        path: the file.
        fingerprint: of this machine.
        choices: `{"op|step_kind|signature": kernel}`.
        measured: the measurements behind each choice, by the same keys, for reviewers; nothing reads it.

    Raises:
        UsageError: it cannot be written.
    """
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "fingerprint": dict(fingerprint),
        "choices": dict(sorted(choices.items())),
    }
    if measured is not None:
        content["measured"] = dict(sorted(measured.items()))
    write_atomically(Path(path), json.dumps(content, indent=1) + "\n")
