"""Which CANN a release of torch-npu is made for, and which CANN is here.

Source: COMPATIBILITY.md of Ascend/pytorch at 031eec5c. Releases that it does not list yet are not judged.
"""

from __future__ import annotations

import re
from pathlib import Path

REQUIRED_CANN = {
    "2.12.0": "9.1.0",
    "2.11.0": "9.1.0",
    "2.10.0": "9.1.0",
    "2.9.0.post3": "9.1.0",
    "2.9.0.post2": "9.0.0",
    "2.9.0": "8.5.0",
    "2.8.0.post4": "9.0.0",
    "2.8.0.post2": "8.5.0",
    "2.8.0": "8.3.RC1",
    "2.7.1.post5": "9.1.0",
    "2.7.1.post4": "9.0.0",
    "2.7.1.post2": "8.5.0",
    "2.7.1": "8.3.RC1",
    "2.6.0.post5": "8.5.0",
    "2.6.0.post3": "8.3.RC1",
    "2.6.0": "8.2.RC1",
    "2.5.1.post1": "8.2.RC1",
    "2.5.1": "8.1.RC1",
}
"""torch-npu -> CANN."""

INFO_FILES = ("ascend_toolkit_install.info", "version.info", "compiler/version.info", "runtime/version.info")
"""Where an installation of CANN states its version, below its folder or a folder named for its machine."""

_VERSION = re.compile(r"^\s*version\s*=\s*([0-9][0-9A-Za-z.]*)", re.MULTILINE | re.IGNORECASE)


def cann_version(toolkit: str | None) -> str | None:
    """The version of the CANN in a folder, None where it does not state one that we can read."""
    if toolkit is None:
        return None
    folder = Path(toolkit)
    for place in (folder, *sorted(folder.glob("*-linux"))):
        for name in INFO_FILES:
            try:
                found = _VERSION.search((place / name).read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
            if found:
                return found[1]
    return None


def mismatch(torch_npu: str, cann: str | None) -> str:
    """Why a torch-npu and an older CANN do not fit, with both versions; empty when they fit or it is unknown.

    A newer CANN is taken: the vendor keeps the interfaces of older ones.
    """
    required = REQUIRED_CANN.get(torch_npu.partition("+")[0])
    if required is None or cann is None or _order(cann) >= _order(required):
        return ""
    return f"torch-npu {torch_npu} is made for CANN {required}, here is CANN {cann}"


def _order(version: str) -> tuple[int, ...]:
    """8.3.RC1 comes before 8.3.0; builds behind the third part do not count."""
    major, minor, *rest = version.split(".")
    last = rest[0] if rest else "0"
    candidate = re.match(r"(?:RC|alpha|beta)\.?(\d*)", last, re.IGNORECASE)
    if candidate:
        return int(major), int(minor), -1, int(candidate[1] or 0)
    number = re.match(r"\d+", last)
    return int(major), int(minor), int(number[0]) if number else 0, 0
