"""Names of models: `hf:org/name[@revision][:file]`, `ms:org/name`, `pypi:project`, plain `org/name`, short names."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from inferplane.errors import UsageError
from inferplane.hub.short_names import ShortName, read_short_names

HUGGING_FACE, MODELSCOPE, PYPI = "hf", "ms", "pypi"
_PREFIXES = {
    "hf://": HUGGING_FACE,
    "huggingface://": HUGGING_FACE,
    "hf:": HUGGING_FACE,
    "huggingface:": HUGGING_FACE,
    "ms://": MODELSCOPE,
    "modelscope://": MODELSCOPE,
    "ms:": MODELSCOPE,
    "modelscope:": MODELSCOPE,
    "pypi:": PYPI,
}
"""How a name may begin -> where it is looked up; the longer ones first."""
_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_NAME = re.compile(rf"(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[^:@\s]+))?(?::(?P<part>[^:\s]+))?", re.ASCII)
_PACKAGE = re.compile(r"(?P<project>[A-Za-z0-9]+(?:[._-]+[A-Za-z0-9]+)*)(?:==(?P<version>[A-Za-z0-9.!+]+))?", re.ASCII)
PACKAGES = "pypi.org"
"""In place of an organization for models that are published as packages; no organization of the hub has a dot."""
_SHORT = re.compile(rf"{_PART}(?::{_PART})?", re.ASCII)
_FILES = (".gguf", ".safetensors", ".json", ".yaml", ".bin")
"""Ends of texts that are paths, rather than plain names of repositories."""
FORMS = (
    "a folder in the Hugging Face layout, a GGUF file, hf:ORG/NAME[@REVISION][:FILE or quantization], ORG/NAME, "
    "ms:ORG/NAME, pypi:PACKAGE, or a short name"
)
"""What a user may write for a model."""


@dataclass(frozen=True)
class ModelName:
    """A repository on a hub.

    Args:
        text: the name as the user wrote it.
        source: `HUGGING_FACE`, `MODELSCOPE` or `PYPI`.
        repository: organization and name; of a package `PACKAGES` and its name.
        revision: a branch, tag or commit, or a package's version; None: the default one.
        part: a file or a quantization of a repository of GGUF files; None: all that is read.
        short: the entry of the short name that the user wrote.
    """

    text: str
    source: str
    repository: str
    revision: str | None = None
    part: str | None = None
    short: ShortName | None = None

    @property
    def full(self) -> str:
        """The name with its source: `hf:org/name@revision`, `pypi:project==version`."""
        if self.source == PYPI:
            return display_name(self.repository) + (f"=={self.revision}" if self.revision else "")
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.source}:{self.repository}{revision}{f':{self.part}' if self.part else ''}"


def parse_name(text: str) -> ModelName | None:
    """Parse the name of a model; None if the text is neither a name on a hub nor a short name.

    Raises:
        UsageError: the text begins as a name on a hub, and goes on otherwise; or the user's list of short names cannot
            be read.
    """
    for prefix, source in _PREFIXES.items():
        if text.startswith(prefix):
            match = _match_package if source == PYPI else _match
            found = match(text.removeprefix(prefix), text, source)
            if found is None:
                raise UsageError(f"{text!r} is no name of a model.", there_is=FORMS)
            return found
    if not text.endswith(_FILES) and (found := _match(text, text, HUGGING_FACE)):
        return found
    if _SHORT.fullmatch(text) is None:
        return None
    short = read_short_names().get(text.lower())
    if short is None:
        return None
    found = parse_name(short.model)
    if found is None:
        raise UsageError(f"{short.origin}: {short.name!r} names no model, but {short.model!r}.", there_is=FORMS)
    return ModelName(text, found.source, found.repository, found.revision, found.part, short)


def _match(name: str, text: str, source: str) -> ModelName | None:
    found = _NAME.fullmatch(name)
    if found is None or ".." in found["repository"] or "--" in found["repository"]:
        return None  # the caches separate organization and name by two dashes
    revision = found["revision"]
    if revision is not None and (".." in revision or revision.startswith("/")):
        raise UsageError(f"{text!r} has no valid revision.", there_is="branches, tags and commits, as in @main")
    return ModelName(text, source, found["repository"], revision, found["part"])


def display_name(repository: str) -> str:
    """A repository of the cache as a user may write it."""
    organization, _, name = repository.partition("/")
    return f"{PYPI}:{name}" if organization == PACKAGES else repository


def _match_package(name: str, text: str, source: str) -> ModelName | None:
    found = _PACKAGE.fullmatch(name)
    if found is None:
        return None
    project = re.sub(r"[._-]+", "-", found["project"]).lower()
    return ModelName(text, source, f"{PACKAGES}/{project}", found["version"])


def near_short_names(text: str) -> list[str]:
    """Short names that resemble a text, the nearest first; empty if the user's list cannot be read."""
    try:
        known = read_short_names()
    except UsageError:
        return []
    last = text.rpartition("/")[2].lower()
    return difflib.get_close_matches(last, known, n=3, cutoff=0.55)
