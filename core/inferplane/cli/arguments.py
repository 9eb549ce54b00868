"""Options that several verbs share, and a parser that answers mistakes as the rest of Inferplane does."""

from __future__ import annotations

import argparse
import copy
import difflib
import os
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib import metadata
from typing import TYPE_CHECKING, Any, NoReturn

from inferplane.engine.clients.options import (
    ALL_OPTIONS,
    PLAIN_PARTS,
    EngineOptions,
    SpeculativeOptions,
    flags,
    help_text,
)
from inferplane.engine.request.other_engines import advice, as_flag
from inferplane.errors import UsageError

if TYPE_CHECKING:
    from inferplane.engine import RunnerOptions

PROGRAM = "inferplane"
AUTO = "auto"
MOST_COLUMNS = 100
DRAFTS = 3
LEAST_LIKENESS, ALMOST_EQUAL = 0.7, 0.85
"""Of an unknown option and the one that is suggested, without their dashes: `--task` is not `--tls-key`."""
BINDING = ("dtype", "kv_cache_dtype", "index_key_dtype", "quantization", "head_format", "max_model_len")
"""Options of the engine that decide which kernels are bound, beside the device and pins."""
LONG_NAMES = {"-n": "--n-predict"}
"""Short options of other engines that are a parameter's name here, and so are no rows of `other_engines`."""
# `inferplane.plugins` knows both, but importing it imports torch.
PLUGIN_GROUP = "inferplane.plugins"
PLUGIN_VARIABLE = "INFERPLANE_PLUGINS"


class _Layout(argparse.HelpFormatter):
    """Paragraphs and options in the terminal's width, up to lines that are read with ease; examples as written."""

    def __init__(self, prog: str, **options: Any) -> None:
        options.setdefault("width", min(MOST_COLUMNS, shutil.get_terminal_size().columns - 2))
        super().__init__(prog, max_help_position=26, **options)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(p if "\n  " in p else super(_Layout, self)._fill_text(p, width, indent) for p in paragraphs)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [x for x in action.option_strings if x not in getattr(action, "aliases", ())]
        return super()._format_action_invocation(shown)


class Parser(argparse.ArgumentParser):
    """argparse, with errors as `UsageError` and no guessing at abbreviated options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Layout, **options)

    def error(self, message: str) -> NoReturn:
        """What argparse calls when the words make no sense."""
        raise UsageError(f"{message[0].upper()}{message[1:]}.", remedy=f"see `{self.prog} --help`")

    def parse_all(self, words: Sequence[str], *, pass_on: str | None = None) -> argparse.Namespace:
        """Parse, leaving nothing over.

        Args:
            words: what stands behind the verb.
            pass_on: name of the attribute that receives unknown words; None refuses them.

        Raises:
            UsageError: the words make no sense; an unknown option is answered with what to use in place of another
                engine's option of that name, else with the one it resembles.
        """
        args, rest = self.parse_known_args(words)
        if pass_on is not None:
            setattr(args, pass_on, rest)
        elif rest:
            raise self._unknown(rest)
        self._refuse_contradictions(words)
        check_device(getattr(args, "device", None), indexed="--index" in self._option_string_actions)
        return args

    def _refuse_contradictions(self, words: Sequence[str]) -> None:
        """Raise UsageError if parsed words give an option two values, of which argparse takes the last; lists are
        exempt."""
        given: dict[str, tuple[str, str]] = {}  # option -> its flag as typed, and its value
        for at, word in enumerate(words):
            flag, equals, value = word.partition("=")
            action = self._option_string_actions.get(flag)
            if word == "--":
                return
            if action is None or isinstance(action, argparse._AppendAction) or action.nargs in ("*", "+"):
                continue
            if action.nargs == 0:
                value = "no" if flag.startswith("--no-") else "yes"
            elif not equals:
                value = words[at + 1]
            first, before = given.setdefault(action.dest, (flag, value))
            if before != value:
                same = f"{first} is given twice" if first == flag else f"{first} and {flag} are one option"
                raise UsageError(f"{same}, with two values.", remedy="keep one of them")

    def _unknown(self, rest: Sequence[str]) -> UsageError:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        shown = [name for name in known if name not in getattr(self._option_string_actions[name], "aliases", ())]
        options = [word.partition("=")[0] for word in rest if word.startswith("-") and not word[1:2].isdigit()]
        elsewhere = [found for word in options if (found := advice(LONG_NAMES.get(word, word), as_flag))]
        close = [near for word in options if (near := _find_near(word, shown) or _find_near(word, known))]
        if options:
            what = f"option{'s' * (len(options) > 1)} {' and '.join(map(repr, options))}"
        else:
            what = f"argument {' '.join(rest)!r}"
            elsewhere = [f"quote words that belong together; a prompt stands behind -p; see `{self.prog} --help`"]
            if not self._get_positional_actions():
                first = shlex.quote(rest[0])
                elsewhere = [f"`{PROGRAM} show {first}` lists a model's files, `{PROGRAM} estimate {first}` its memory"]
        perhaps = f"perhaps {' and '.join(close)} {'were' if close[1:] else 'was'} meant"
        remedy = "; ".join(elsewhere) or (perhaps if close else f"see `{self.prog} --help`")
        return UsageError(f"{self.prog} has no {what}.", remedy=remedy)


def _find_near(word: str, known: Sequence[str]) -> str:
    """The option that an unknown one resembles: one of almost the same letters, else the only one that has all of its
    words in their order (`--max-len` is short for `--max-model-len`), else one of similar letters; "" if there is none.
    """
    plain, names = word.lstrip("-"), [name[2:] for name in known]
    parts = plain.split("-")
    longer = [name for name in names if parts[1:] and _has_words(name.split("-"), parts)]
    close = difflib.get_close_matches(plain, names, n=1, cutoff=ALMOST_EQUAL)
    if not close:
        close = longer if len(longer) == 1 else difflib.get_close_matches(plain, names, n=1, cutoff=LEAST_LIKENESS)
    return f"--{close[0]}" if close else ""


def _has_words(words: Iterable[str], requested: Sequence[str]) -> bool:
    rest = iter(words)
    return all(word in rest for word in requested)


def device_words() -> list[str]:
    """Names by which devices are probably served, read from package metadata alone: for help, never for choosing."""
    names = {point.name for point in metadata.entry_points(group=PLUGIN_GROUP)}
    for item in filter(None, (part.strip() for part in os.environ.get(PLUGIN_VARIABLE, "").split(","))):
        if item[0] != "-" and "@" not in item and item != "only":
            names.add(item.partition(".")[0].removeprefix(f"{PROGRAM}_"))
    return sorted(names)


def add_model(parser: Parser, *, config: bool = False) -> None:
    """The positional MODEL; with `config`, a config alone will do."""
    also = (
        "a config.json or a folder that holds one, config:NAME as config:glm-5"
        if config
        else "a folder in the Hugging Face layout"
    )
    words = f"{also}, a GGUF file, or a name as hf:ORG/NAME or qwen3:0.6b; left out: the demo model"
    parser.add_argument("model", metavar="MODEL", nargs="?", default="demo", help=words)
    add_offline(parser)


def add_offline(parser: Parser) -> None:
    """`--offline`."""
    parser.add_argument("--offline", action="store_true", help="download nothing: a folder, or a model in the cache")


def add_device(parser: Parser | argparse._ArgumentGroup, *, required: bool = False, default: str | None = AUTO) -> None:
    """`--device`."""
    known = ", ".join(device_words()) or "see `inferplane devices`"
    words = known if required or default is None else f"{known}; left out: {AUTO}, the best one here"
    parser.add_argument("--device", metavar="X", required=required, default=default, help=words)


def check_device(device: str | None, *, indexed: bool, name: str = "--device") -> None:
    """One rule for every verb: `--device` names a kind of device, and a number behind a colon is refused.

    Args:
        device: the user's word.
        indexed: there is an `--index`.
        name: of where the word was found.

    Raises:
        UsageError: a number follows the colon, where variants stand.
    """
    kind, _, number = (device or "").partition(":")
    if kind and number.isdigit():
        raise UsageError(
            f"{name} {device}: what follows the colon is a variant, not a number.",
            remedy=f"pass --device {kind} --index {int(number)}" if indexed else f"pass --device {kind}",
        )


def add_option(group: argparse._ActionsContainer, name: str, **more: Any) -> None:
    """Add the flags of an option of the engine as its record describes it; help shows the first of them alone.

    Args:
        group: of the parser.
        name: of the option.
        more: arguments of `add_argument` that differ from the record's.
    """
    option = ALL_OPTIONS[name]
    kind, words, default = str(option.type), help_text(name), option.default
    given: dict[str, Any] = {"dest": name, "default": default, "help": words}
    if kind == "bool":
        given["action"] = "store_true" if default is False else argparse.BooleanOptionalAction
    else:
        given["metavar"] = option.metadata["metavar"]
        if kind.startswith(("int", "float")):
            given["type"] = int if kind.startswith("int") else float
        if default not in (None, AUTO):
            given["help"] = f"{words} ({default})"
    add_flags(group, flags(name), **{**given, **more})


def add_flags(group: argparse._ActionsContainer, names: Sequence[str], **given: Any) -> None:
    """Add an option that has several flags, of which help shows the first one alone; `given` as for `add_argument`."""
    action = group.add_argument(*names, **given)
    hidden = [flag for flag in action.option_strings if flag.replace("--no-", "--") in names[1:]]
    action.aliases = hidden  # type: ignore[attr-defined]


def add_examples(parser: Parser, *examples: str) -> None:
    """Commands to try, below the options; `{X}` in one stands for a device that a plugin serves."""
    devices = device_words()
    lines = [f"  {parser.prog} {e.replace('{X}', devices[-1] if devices else 'X')}".rstrip() for e in examples]
    parser.epilog = "\n".join(("examples:", *lines))


def add_json(parser: Parser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout; what goes wrong, on stderr")


def add_binding(parser: Parser) -> argparse._ArgumentGroup:
    """What decides which kernels are bound: device, dtypes, pins."""
    group = parser.add_argument_group("where and how it runs")
    add_device(group)
    for name in BINDING:
        add_option(group, name)
    group.add_argument(
        "--op", metavar="WHAT=PROVIDER", action="append", default=[], dest="ops", help=f"{help_text('ops')}; repeatable"
    )
    add_option(group, "strict")
    return group


def binding_options(args: argparse.Namespace, **more: Any) -> RunnerOptions:
    """The words of `add_binding`, and of `add_speculation` where a verb has them, for a plan without weights; `more`
    are further fields.

    Raises:
        UsageError: a word that `LLM` refuses, too.
    """
    from inferplane.engine import RunnerOptions
    from inferplane.engine.speculate import SpeculativeConfig, with_draft

    own = {name: getattr(args, name) for name in (*BINDING, "strict")}
    EngineOptions(**own)  # checks them
    options = RunnerOptions(**own, ops=pins(args.ops), **more)
    config = speculation(args) if hasattr(args, "speculative_method") else None
    return with_draft(options, SpeculativeConfig.of(config), configs=True)


def add_running(parser: Parser) -> None:
    """As `add_binding`, and how weights are read."""
    group = add_binding(parser)
    for name in ("index", "lock", "load_format"):
        add_option(group, name)
    add_speculation(parser)


def add_speculation(parser: Parser) -> None:
    """How to draft."""
    group = parser.add_argument_group("speculative decoding (off by default)")
    add_option(group, "speculative_method")
    drafts = f"{help_text('num_speculative_tokens')}; left out: {DRAFTS} with a method"
    add_option(group, "num_speculative_tokens", default=None, help=drafts)
    for name in ("speculative_model", "speculative_quantization", *PLAIN_PARTS):
        add_option(group, name)


def speculation(args: argparse.Namespace) -> dict[str, Any] | None:
    """What `LLM` takes as `speculative_config`, from the words of `add_speculation`.

    Raises:
        UsageError: drafts without a method.
    """
    given = {f.name: getattr(args, f.name) for f in fields(SpeculativeOptions)}
    given = {name: value for name, value in given.items() if value is not None}
    if given and "speculative_method" not in given:
        what = f"{next(iter(given))} without --speculative-method."
        raise UsageError(what, remedy="name the method, as in --speculative-method mtp")
    return SpeculativeOptions(**{"num_speculative_tokens": DRAFTS, **given}).config()


def add_generating(parser: Parser, *, max_tokens: int) -> None:
    """As `add_running`, and how tokens are chosen; what is left out is as `sampling_defaults` says."""
    group = parser.add_argument_group("how tokens are chosen (left out: as the checkpoint recommends, else greedily)")
    words = f"maximum tokens to generate; left out: {max_tokens}, or fewer if the model's length ends before"
    group.add_argument("--max-tokens", metavar="N", type=int, help=words)
    words = "0: always the most probable token; 1: the model's own probabilities"
    group.add_argument("--temperature", metavar="T", type=float, help=words)
    words = "keep the most probable tokens whose probabilities add up to P"
    group.add_argument("--top-p", metavar="P", type=float, help=words)
    group.add_argument("--top-k", metavar="K", type=int, help="keep the K most probable tokens; 0: all")
    words = "keep tokens at least P times as probable as the most probable one"
    group.add_argument("--min-p", metavar="P", type=float, help=words)
    words = "equal seeds give equal text; left out: a random seed, which is printed"
    group.add_argument("--seed", metavar="N", type=int, help=words)
    group.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text; repeatable")
    group.set_defaults(default_max_tokens=max_tokens)
    add_running(parser)


def suggest(word: str, known: Iterable[str], otherwise: str, form: str = "{}") -> str:
    """The remedy for an unknown word: the known one that it resembles, in some form; without one, `otherwise`."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"perhaps {form.format(close[0])} was meant" if close else otherwise


def pins(words: Sequence[str], flag: str = "--op") -> dict[str, str]:
    """`--op` words as a mapping; `flag` is the option that they are of.

    Raises:
        UsageError: a word is not WHAT=PROVIDER, or pins something twice.
    """
    out: dict[str, str] = {}
    for word in words:
        what, equals, provider = (part.strip() for part in word.partition("="))
        if not (what and equals and provider):
            raise UsageError(
                f"{flag} {word!r} is not WHAT=PROVIDER.", remedy=f"write for example {flag} linear=reference"
            )
        if out.setdefault(what, provider) != provider:
            raise UsageError(f"{flag} pins {what!r} to {out[what]!r} and to {provider!r}.", remedy="keep one of them")
    return out


def as_text(words: str) -> str:
    """Words as they came, if they are text.

    Raises:
        UsageError: bytes that are no UTF-8, which Python reads as lone surrogates.
    """
    try:
        words.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"The prompt is no text: {error}.", remedy="pass UTF-8") from error
    return words
