"""Texts that a model is calibrated on: files, folders of them, JSON lines; also compressed by gzip."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from inferplane.errors import UsageError

SUFFIXES = (".txt", ".md", ".rst", ".jsonl", ".py", ".html")
"""Files of a folder that are read; each may end in .gz too."""
FIELD = "text"
"""The field of a JSON line that is read."""
MIN_WINDOW = 16


@dataclass(frozen=True)
class Text:
    """A text, and the file that it is of."""

    name: str
    text: str


def read_texts(paths: Iterable[str | Path]) -> list[Text]:
    """Read all texts.

    Args:
        paths: text files, files of JSON lines with a field "text", and folders of such files, in this order.

    Raises:
        UsageError: a path is not there, holds no text, or is no UTF-8.
    """
    found = [Text(str(path), text) for given in paths for path in _list_files(Path(given)) if (text := _read(path))]
    if not any(each.text.strip() for each in found):
        raise UsageError("The files of --data hold no text.", remedy="name files or folders of text")
    return found


def _list_files(path: Path) -> Iterator[Path]:
    path = path.expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.name.removesuffix(".gz").endswith(SUFFIXES))
        if not files:
            listed = ", ".join(SUFFIXES)
            raise UsageError(f"{path} holds no texts.", there_is=f"files in {listed} are read", remedy="name the files")
        yield from files
    elif path.is_file():
        yield path
    else:
        raise UsageError(f"--data {path}: there is no such file.", remedy="name a file or a folder of text")


def _read(path: Path) -> str:
    try:
        data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        text = data.decode("utf-8")
        if not path.name.removesuffix(".gz").endswith(".jsonl"):
            return text
        return "\n".join(str(json.loads(line)[FIELD]) for line in text.splitlines() if line.strip())
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as text: {error}.", remedy="convert it to UTF-8") from error
    except (ValueError, KeyError, TypeError) as error:
        what = f"{path} is not JSON lines with a field {FIELD!r}: {error}."
        raise UsageError(what, remedy=f'write one {{"{FIELD}": "..."}} a line') from error


class Window(NamedTuple):
    """Token ids of a text, and the file that they are of."""

    name: str
    ids: list[int]


def slice_windows(texts: Sequence[Text], encode: Callable[[str], list[int]], tokens: int) -> list[Window]:
    """All windows of texts, in order and without overlap; what remains of a text is left out. Each begins as a text
    does, with the tokenizer's first token if it has one.

    Args:
        texts: what is divided.
        encode: from a text to its ids.
        tokens: of a window, at least `MIN_WINDOW`.

    Raises:
        UsageError: no text has a whole window.
    """
    found: list[Window] = []
    begin = encode("")
    step = tokens - len(begin)
    for each in texts:
        ids = encode(each.text)[len(begin) :]
        found += [Window(each.name, begin + ids[i : i + step]) for i in range(0, len(ids) - step + 1, step)]
    if not found:
        raise UsageError(
            f"No text of --data has {tokens} tokens.", remedy="give longer texts, or lower --window-tokens"
        )
    return found


def draw_windows(windows: Sequence[Window], count: int, seed: int) -> list[Window]:
    """At most `count` windows, in a seeded order."""
    found = list(windows)
    random.Random(seed).shuffle(found)
    return found[:count]


def hash_windows(windows: Iterable[Sequence[int]]) -> str:
    """The SHA-256 of windows of token ids, as the model card has it."""
    found = hashlib.sha256()
    for ids in windows:
        found.update(b"".join(i.to_bytes(4, "little") for i in ids) + b"\xff" * 4)
    return found.hexdigest()
