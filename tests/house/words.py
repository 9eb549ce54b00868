"""Rules of words: names that one would search for, and sentences that say what they mean.

As in `rules.py`, each rule reads a folder and returns its findings, so that it can be run on a planted fault too.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.house.rules import finding, parsed

BANNED_WORDS: dict[str, str] = {
    "asked": "requested",
    "asks": "requests",
    "chain": "layers, decoder_stack or model",
    "chains": "layers, or independent sums",
    "coded": "quantized",
    "codes": "quantized values, or quantizes_to",
    "crowd": "oversubscription",
    "crowded": "oversubscribed",
    "cut": "limit, truncate, chunk or slice",
    "cuts": "limits, chunks or slices",
    "door": "admission or gate",
    "doors": "admissions or gates",
    "ends": "end_tokens, boundaries or stops",
    "everybody": "all, or what they are",
    "fixed": "batch_invariant or constant",
    "gone": "closed, removed or lost",
    "guess": "estimate",
    "guessed": "estimated",
    "hand": "pass, attach or return",
    "handed": "given, or the type of what is passed",
    "handing": "passing, attaching or returning",
    "kept": "stored, remaining or filtered",
    "let": "allow, or what it does",
    "likeliest": "argmax or top-k",
    "meant": "intended or requested",
    "nobody": "none",
    "offered": "available or supported",
    "offers": "supports",
    "riddle": "what it means",
    "room": "capacity, free blocks or arena",
    "rooms": "capacities, free blocks or arenas",
    "said": "message or reason",
    "sixteens": "multiple_of_16",
    "somebody": "caller, user or request",
    "told": "explicit, reported or requested",
    "turn": "lock, order, repeat or chat message",
    "turns": "lock, order, repeats or chat messages",
    "uncoded": "not_quantized",
    "untold": "not_reported, implicit or unrequested",
    "usual": "expected or default",
    "varied": "reorderable",
    "wanted": "requested",
    "wants": "requests",
    "weigh": "token_weights or compare",
    "whoever": "caller",
    "whom": "caller, target or name of it",
}
"""Words that nobody would search for, and what to say instead."""

NATIVE_SUFFIXES = (".h", ".hpp", ".c", ".cc", ".cpp", ".cu", ".cuh", ".inc", ".js")


def words_of(name: str) -> list[str]:
    """The words of an identifier, `is_kept`, `isKept` and `kIsKept` alike, in lower case."""
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def banned_names(*roots: Path, allowed: Mapping[str, str] | None = None) -> list[str]:
    """Names that contain a banned word: of files and modules, classes, functions, parameters, fields and variables.

    In C++ and CUDA every identifier counts, since what is used has been defined somewhere.

    Args:
        roots: folders to read.
        allowed: names that may stay, each with its reason: an entry that no longer occurs is a finding too.
    """
    allowed = allowed or {}
    found, met = set(), set()
    for path, line, name in _names(*roots):
        for word in words_of(name):
            if word in BANNED_WORDS and name in allowed:
                met.add(name)
            elif word in BANNED_WORDS:
                found.add(finding(path, line, f"{name}: {word!r} says little; say {BANNED_WORDS[word]}"))
    return sorted(found) + [f"{name}: allowed, and no longer there" for name in sorted(set(allowed) - met)]


def _names(*roots: Path) -> Iterator[tuple[Path, int, str]]:
    for path, tree in parsed(*roots):
        for line, name in defined_names(tree):
            yield path, line, name
    for root in roots:
        for path in sorted(root.rglob("*")):
            if "__pycache__" in path.parts or not path.is_file():
                continue
            yield path, 1, path.stem
            if path.suffix in NATIVE_SUFFIXES:
                for line, text in _native_lines(path):
                    for name in re.findall(r"[A-Za-z_]\w*", text):
                        yield path, line, name


def _native_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of C++ or JavaScript without comments and strings."""
    text = path.read_text(encoding="utf-8")

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    hidden = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    if path.suffix == ".js":
        hidden += r"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`"
    code = re.sub(hidden, blank, text, flags=re.DOTALL)
    yield from enumerate(code.splitlines(), 1)


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each class, function, parameter, field, variable and alias of an import."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if alias.asname:
                    yield node.lineno, alias.asname
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.lineno, node.name


# ------------------------------------------------------------------ letters

_ONE_LETTER = re.compile(r"_?[A-Za-z]$")


def one_letter_parameters(*roots: Path) -> list[str]:
    """Parameters of public functions, and of methods of public classes, that have a letter for a name."""
    found = []
    for path, tree in parsed(*roots):
        for function in _public_functions(tree.body):
            arguments = function.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            for argument in filter(None, every):
                if _ONE_LETTER.match(argument.arg):
                    where = f"{function.name}({argument.arg})"
                    found.append(finding(path, argument.lineno, f"{where}: a word says what it is"))
    return found


def _public_functions(body: Iterable[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not re.match(r"_(?!_)", node.name):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node.body)
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _public_functions([*node.body, *node.orelse])


# ------------------------------------------------------------------ sentences

RIDDLES: dict[str, str] = {
    r"told|untold": "reported, stated or requested",
    r"(?<!by )hand(?:s|ed)?": "pass, give or return",
    r"nobody|somebody|everybody|whoever": "name who: a caller, a client, a process",
    r"(?:has|have|is|of|no|more|little) room|room for|what has room": "capacity, free blocks or memory",
    r"likeliest": "most probable",
    r"wants?|wanted": "requests, needs or reads",
    r"guess(?:es|ed)?": "estimate or draft",
    r"riddle": "what it means",
    r"crowd(?:ed)?": "how many there are",
    r"cannot be meant": "invalid",
    r"(?:was|were|is|are) asked|asked for": "requested, or the options",
    r"left to itself": "by default",
    r"turn by turn": "in alternation",
    r"is gone|are gone": "has ended, was closed or is lost",
}
"""Words that a user has to interpret, as patterns, and what to say instead."""
_RIDDLE = {re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.IGNORECASE): say for pattern, say in RIDDLES.items()}


def riddles(*roots: Path) -> list[str]:
    """Texts that users read, with a word that they would have to interpret.

    These are all strings of several words except docstrings (messages, help, legends), and of the docstrings those that
    become help: of records of options and of the command line's verbs.
    """
    found = set()
    for path, tree in parsed(*roots):
        hidden = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                helps = node.name.endswith("Options") if isinstance(node, ast.ClassDef) else "verbs" in path.parts
                helps &= not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                hidden |= set() if helps else {id(getattr(each, "value", None)) for each in node.body}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if " " in text and id(node) not in hidden:
                found |= {
                    finding(path, node.lineno, f"{match.group()!r} in {text[:60]!r}: say {say}")
                    for pattern, say in _RIDDLE.items()
                    for match in pattern.finditer(text)
                }
    return sorted(found)


def riddles_in_docstrings(exports: Mapping[str, Any]) -> list[str]:
    """The same words in the docstrings of classes and functions, and of the public methods and properties of classes.

    Args:
        exports: name -> what it stands for.
    """
    described = dict(exports)
    for name, each in exports.items():
        members = vars(each) if inspect.isclass(each) else {}
        described |= {f"{name}.{member}": value for member, value in members.items() if not member.startswith("_")}
    return [
        f"{name}: {match.group()!r}: say {say}"
        for name, each in described.items()
        if inspect.isroutine(each) or isinstance(each, (type, property))
        for pattern, say in _RIDDLE.items()
        for match in pattern.finditer(re.sub(r"`[^`]*`", "", each.__doc__ or ""))
    ]


def riddles_in_pages(pages: Iterable[Path]) -> list[str]:
    """The same words in pages and in descriptions of schemas; spans of code, fenced blocks and the glossary's table of
    earlier words are left out."""
    found = []
    for page in pages:
        text = page.read_text(encoding="utf-8").partition("\n## Words of earlier versions")[0]
        prose = re.sub(r"```.*?```|`[^`\n]*`", lambda code: re.sub(r"[^\n]", " ", code.group()), text, flags=re.DOTALL)
        found += [
            finding(page, number, f"{match.group()!r}: say {say}")
            for number, line in enumerate(prose.splitlines(), 1)
            for pattern, say in _RIDDLE.items()
            for match in pattern.finditer(line)
        ]
    return found


_PERSON = re.compile(r"(?<![\w'./-])(?:he|him|his|himself|she|her|hers|herself)(?![\w'-])", re.IGNORECASE)


def persons(paths: Iterable[Path]) -> list[str]:
    """`he` and `his` for code in pages, docstrings and comments: a sentence names what does it."""
    found = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lines = _prose(text) if path.suffix == ".py" else enumerate(text.splitlines(), 1)
        found += [
            finding(path, number, f"{match.group()!r}: name what it is")
            for number, line in lines
            for match in _PERSON.finditer(re.sub(r"`[^`]*`", "", line))
        ]
    return found


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Comments of Python code, and its strings of several words."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])
