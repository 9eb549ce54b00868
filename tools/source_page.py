"""The tables of docs/coming-from-paddlenlp.md and of its Chinese version, from the code: between marks in the pages.

A table stands between `<!-- NAME -->` and `<!-- end -->`. The Chinese words are in source_page_zh.json, by the English
ones of the code: a word without a translation ends `make docs`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from inferplane.serving import source_names
from inferplane.serving.settings import FIELDS
from inferplane.serving.source_models import EXPORTED, PUBLISHED
from inferplane.source import download_model
from inferplane.source.flags import EXPORT_FLAGS, MODEL_FLAGS, PREDICTOR_FLAGS, Flag

WORDS: dict[str, str] = json.loads((Path(__file__).parent / "source_page_zh.json").read_text(encoding="utf-8"))
PAGES = {"docs/coming-from-paddlenlp.md": str, "docs/zh/coming-from-paddlenlp.md": lambda text: WORDS[text]}
"""Page -> what makes its language of the code's English."""
TABLE = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHARED = {
    "MP_NUM": "processes that share the model, one a device; of fewer devices each has one, and a note says so",
    "MP_NNODE": "machines; torchrun starts the processes of each",
    "POD_IPS": "addresses of the machines; which one this machine is follows from its own addresses",
    "POD_0_IP": "the first machine, whose processes the others find, and which alone answers",
    "INTER_PROC_PORT": "at which processes on several machines find each other; no effect on one machine",
    "model_name": "`model`, and for a name of the tables below `quantization`, `dtype` and `speculative_method`",
    "BLOCK_BS": "`kv_cache_tokens`: BLOCK_BS x MAX_SEQ_LEN tokens, of all sequences together",
}
ELSEWHERE = {"CUDA_VISIBLE_DEVICES": "the device's own runtime reads it: other devices are not there"}
"""Variables that are not Inferplane's."""
Say = Callable[[str], str]
COLON = ": "
"""Between a verdict and its reason; each language has its own."""


def render(text: str, say: Say) -> str:
    """A page with its tables as the code has them today."""

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}{TABLES[found[2]](say)}\n{found[3]}"

    return TABLE.sub(table, text)


def _rows(say: Say, heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(say(head) for head in heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def variables(say: Say) -> str:
    """What each variable of the server is here."""
    rows = []
    older: dict[str, list[str]] = {}
    for old, name in source_names.OLDER.items():
        older.setdefault(name, []).append(old)
    names = [*SHARED, *source_names.NAMES, *source_names.WITHOUT_EFFECT, *ELSEWHERE]
    for name in dict.fromkeys(name for name in names if name not in source_names.OLDER):
        if name in SHARED:
            words = say(SHARED[name])
        elif name in source_names.NAMES:
            setting = source_names.NAMES[name].setting
            words = f"`{setting}`" + ("" if FIELDS[setting].type != "bool" else say(" (") + say("a switch") + say(")"))
        else:
            reason = source_names.WITHOUT_EFFECT.get(name)
            words = say(ELSEWHERE[name]) if reason is None else f"{say('no effect')}{say(COLON)}{say(reason)}"
        rows.append((f"`{name}`", ", ".join(f"`{old}`" for old in older.get(name, ())) or "", words))
    return _rows(say, ("variable", "before 3.0.0", "here"), rows)


def _flags(say: Say, flags: tuple[Flag, ...]) -> str:
    rows = []
    for flag in flags:
        words = f"{say('needs no switch')}{say(COLON)}{say(flag.needless)}" if flag.needless else say(flag.words)
        if flag.kind == "count" and flag.range[1] is not None:
            words += f"{say(' (')}{flag.range[0]} {say('to')} {flag.range[1]}{say(')')}"
        default = "" if flag.default in (None, False) else f"`{flag.default}`"
        rows.append((f"`--{flag.name}`", default, words))
    return _rows(say, ("flag", "default", "here"), rows)


def predictor_flags(say: Say) -> str:
    """What each flag of predictor.py and export_model.py does."""
    own = {flag.name: flag for flag in (*MODEL_FLAGS, *PREDICTOR_FLAGS, *EXPORT_FLAGS)}
    return _flags(say, tuple(own.values()))


def download_flags(say: Say) -> str:
    """What each flag of download_model.py does."""
    return _flags(say, download_model.FLAGS)


def models(say: Say) -> str:
    """What each name of a model stands for."""
    rows = []
    for model in (*EXPORTED.values(), *PUBLISHED.values()):
        draft = f"`{model.draft_quantization}`" if model.draft_quantization else ""
        formats = f"`{model.quantization or model.dtype}`" if model.quantization or model.dtype else ""
        rows.append((f"`{model.name}`", f"`{model.repository}`", formats, draft, str(model.nodes)))
    return _rows(say, ("name", "repository", "format", "drafts in", "machines there"), rows)


TABLES: dict[str, Callable[[Say], str]] = {
    "variables": variables,
    "predictor_flags": predictor_flags,
    "download_flags": download_flags,
    "models": models,
}
"""Name of a table in the pages -> what makes it."""


def pages(root: Path) -> dict[str, str]:
    """The pages with their tables, by path."""
    there = {path: say for path, say in PAGES.items() if (root / path).is_file()}
    return {path: render((root / path).read_text(encoding="utf-8"), say) for path, say in there.items()}
