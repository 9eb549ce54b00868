"""Loads a checkpoint's tokenizer through transformers, and holds it to its own tokenizer.json."""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from inferplane.errors import CheckpointError
from inferplane.files import file_size
from inferplane.hub.repository import VOCABULARIES

PROBES = (
    "Hello",
    " leading, two  spaces and\ttabs\n\n\n  indented\r\n",
    "def f(x):\n    return x + 1  # naïve café Ünïcödé e\u0301 ﬁ Ａ\n",
    "日本語のテキスト 한국어 Русский العربية 🎉👩‍💻 \x00 12345678 3.14 don't U.S.A.",
    "हिन्दी में বাংলা ગુજરાતી தமிழ் తెలుగు ಕನ್ನಡ മലയാളം සිංහල ภาษาไทยที่ ພາສາລາວ ខ្មែរ မြန်မာ བོད་ཡིག አማርኛ",
    "ქართული Հայերեն Ελληνικά שָׁלוֹם مُحَمَّد Tiếng Việt İı ß ﷺ ½ ² १२३ ٤٥٦ I'LL DON'T x'S",
    "Ti\u1ebf\u0302ng \u1100\u1161\u11a8 \u212b a\u200bb\u00adc \u3000d",
)
"""Texts with what tokenizers treat differently: first and repeated spaces, lines, marks, scripts, digits."""
PARTS = ("normalizer", "pre_tokenizer", "decoder")
"""Parts of a tokenizer of tokenizers that must be those of the file. What puts tokens around a text is left to the
probes: classes of transformers rebuild it on purpose."""
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that may name tokens beside those of tokenizer.json."""
FILES = (*VOCABULARIES, "merges.txt", *SETTINGS)
MAX_FILE_BYTES = 2**28
"""The largest known one, with 262,144 tokens, has 34 MB."""
MAX_ADDED_TOKENS = 64
"""Most added tokens that are tried between words."""


def no_vocabulary(name: str, folder: Path, remedy: str) -> CheckpointError:
    """The error for a model, by its name, whose folder holds no vocabulary."""
    files = ", ".join(VOCABULARIES[:-1])
    what = f"{name} has no tokenizer: {folder} holds none of its files ({files} or {VOCABULARIES[-1]})."
    return CheckpointError(what, remedy=remedy)


def load_tokenizer(folder: Path, kind: str) -> tuple[Any, str]:
    """A folder's tokenizer, of the class of transformers that `kind` names, else of the one that transformers chooses;
    and the name of that class, with its module.

    Choosing reads the model's configuration and imports torch, which takes a second or two and 170 MB; a process that
    gets the `kind` from another one needs neither. If that class does not encode as the folder's tokenizer.json does
    (several classes of transformers 5 build another tokenizer from its vocabulary), the file itself is taken.

    Raises:
        ValueError: only the checkpoint's own code defines the class, or a library is missing, or a file is too large.
        CheckpointError: a file is a pipe or a device, which may never end.
        Exception: as transformers and tokenizers raise it.
    """
    for name in FILES:
        if (folder / name).exists() and (size := file_size(folder / name)) > MAX_FILE_BYTES:
            raise ValueError(f"its {name} has {size} bytes, of at most {MAX_FILE_BYTES}")
    if not kind:
        import transformers

        _check_class(_settings(folder), transformers)
        _check_libraries(folder)
    try:
        found = _by_transformers(folder, kind)
    except Exception:  # some classes take no other kind of vocabulary than their own
        try:
            found = _from_file(folder)
        except Exception:
            found = None
        if found is None:
            raise
    chosen = type(found)
    return _as_written(found, folder), f"{chosen.__module__}.{chosen.__qualname__}"


def _by_transformers(folder: Path, kind: str) -> Any:
    """A folder's tokenizer of the class that `kind` names, or that transformers chooses."""
    module, _, name = kind.rpartition(".")
    if module.startswith("transformers."):
        chosen = getattr(importlib.import_module(module), name)
        return chosen.from_pretrained(str(folder), local_files_only=True)  # some take nothing else
    import transformers

    return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _from_file(folder: Path) -> Any:
    """A folder's tokenizer.json under transformers' plain class; None without that file."""
    from transformers import PreTrainedTokenizerFast

    exists = (folder / "tokenizer.json").is_file()
    return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True) if exists else None


def _settings(folder: Path) -> Mapping[str, Any]:
    """The entries of tokenizer_config.json; empty without one."""
    from inferplane.models.reading.json_object import read_object

    path = folder / SETTINGS[0]
    return read_object(path) if path.is_file() else {}


def _strings(entries: Any) -> Iterator[str]:
    """Yield the texts in JSON data, keys too."""
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, (Mapping, list, tuple)):
        for entry in entries.items() if isinstance(entries, Mapping) else entries:
            yield from _strings(entry)


def _check_class(settings: Mapping[str, Any], transformers: Any) -> None:
    """Raise ValueError if only the checkpoint's own code defines the tokenizer's class.

    transformers before 5.21 loaded another class in its place.
    """
    own, name = settings.get("auto_map"), settings.get("tokenizer_class")
    if not isinstance(own, Mapping) or "AutoTokenizer" not in own or not isinstance(name, str):
        return
    if not hasattr(transformers, name):
        raise ValueError(f"its class {name} is code of the checkpoint's own, which is not run")


def _check_libraries(folder: Path) -> None:
    """Raise ValueError if there is only a vocabulary that needs a library which is not installed.

    transformers asks for tiktoken in either case: it tries that when sentencepiece is missing.
    """
    path = folder / "tokenizer.model"
    if (folder / "tokenizer.json").is_file() or not path.is_file():
        return
    with path.open("rb") as file:
        first = file.read(1)
    # A line of base64 in tiktoken's; in SentencePiece's, the tag of a protobuf message's field.
    is_text = first.isalnum()
    name, modules = ("tiktoken", ["tiktoken"]) if is_text else ("SentencePiece", ["sentencepiece", "google.protobuf"])
    missing = [m for m in modules if not _is_installed(m)]
    if missing:
        packages = " ".join(m.removeprefix("google.") for m in missing)
        raise ValueError(f"its tokenizer.model is a {name} model, which needs `pip install {packages}`")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _as_written(tokenizer: Any, folder: Path) -> Any:
    """The tokenizer, if it encodes as the folder's tokenizer.json does, or is made of another file; otherwise that file
    under transformers' plain class, with the chat template, the special tokens and the added tokens that the other one
    had: transformers takes them from further files too, and gives them the ids that follow the vocabulary's. Pieces of
    the vocabulary that only the other class makes special stay plain text.
    """
    path = folder / "tokenizer.json"
    if not path.is_file() or not hasattr(tokenizer, "backend_tokenizer"):
        return tokenizer
    import tokenizers

    written = tokenizers.Tokenizer.from_file(str(path))
    written.no_truncation()
    written.no_padding()
    known = {token.content for token in written.get_added_tokens_decoder().values()}
    files = [folder / name for name in SETTINGS if (folder / name).is_file()]
    named = set(_strings([json.loads(file.read_text("utf-8")) for file in files]))  # read_object would import torch
    if _has_vocabulary(tokenizer.backend_tokenizer, written, known | named) and _agree(tokenizer, written):
        return tokenizer
    from transformers import PreTrainedTokenizerFast

    others = [token for _, token in sorted(tokenizer.backend_tokenizer.get_added_tokens_decoder().items())]
    extra = [
        t for t in others if t.content not in known and (t.content in named or written.token_to_id(t.content) is None)
    ]
    if any(token.content in named for token in extra):  # the class's own defaults count for their ids alone
        for token in extra:
            written.add_tokens([token])
    empty = tokenizers.Tokenizer(tokenizers.models.BPE())  # the class copies what it gets, which takes a second or more
    special = tokenizer.special_tokens_map.items()
    special = {name: text for name, text in special if all(written.token_to_id(x) is not None for x in _strings(text))}
    plain = PreTrainedTokenizerFast(tokenizer_object=empty, **special)
    plain._tokenizer = written
    plain.chat_template = tokenizer.chat_template
    return plain


def _has_vocabulary(own: Any, written: Any, added: Collection[str]) -> bool:
    """Whether a tokenizer has all tokens of the written one under their ids, and adds none but those of `added`."""
    if not written.get_vocab(with_added_tokens=True).items() <= own.get_vocab(with_added_tokens=True).items():
        return False
    return all(token.content in added for token in own.get_added_tokens_decoder().values())


def _agree(tokenizer: Any, written: Any) -> bool:
    """Whether a tokenizer of transformers has the parts of one of tokenizers, and encodes and decodes the probes as it
    does, with and without special tokens around them.
    """
    own = tokenizer.backend_tokenizer
    if any(_state(getattr(own, part)) != _state(getattr(written, part)) for part in PARTS):
        return False
    if repr(own.model) != repr(written.model):  # all options and the first pieces; writing all of it takes a second
        return False
    added = [token.content for _, token in sorted(written.get_added_tokens_decoder().items())][:MAX_ADDED_TOKENS]
    texts = (*PROBES, "".join(f"a{token}b {token} c\n" for token in added))
    for text, special in product(texts, (False, True)):
        ids = written.encode(text, add_special_tokens=special).ids
        if list(tokenizer.encode(text, add_special_tokens=special)) != ids:
            return False
        back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if back != written.decode(ids, skip_special_tokens=False):
            return False
    return True


def _state(part: Any) -> bytes | None:
    """A part of a tokenizer of tokenizers as that writes it to a file."""
    return None if part is None else bytes(part.__getstate__())
