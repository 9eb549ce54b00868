"""Options of verbs that run models over texts in windows, and write tables and one page."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from inferplane.cli.arguments import Parser

if TYPE_CHECKING:
    from inferplane.calibrate.texts import Text, Window
    from inferplane.engine.request.text import Tokenizer

WINDOW_TOKENS = 512


def add_texts(parser: Parser, *, windows: int | None, seed: str) -> None:
    """`--data`, `--windows`, `--window-tokens`, `--seed`, `--html`.

    Args:
        parser: of the verb.
        windows: most windows by default; None: all.
        seed: what `--seed` is of.
    """
    words = "files of text or JSON lines, and folders of them"
    parser.add_argument("--data", metavar="PATH", nargs="+", required=True, help=words)
    limit = "; left out: all" if windows is None else f" (default {windows})"
    words = f"most windows of text{limit}"
    parser.add_argument("--windows", metavar="N", type=int, default=windows, help=words)
    words = f"tokens of a window (default {WINDOW_TOKENS})"
    parser.add_argument("--window-tokens", metavar="N", type=int, default=WINDOW_TOKENS, help=words)
    parser.add_argument("--seed", metavar="N", type=int, default=0, help=seed)
    parser.add_argument("--html", metavar="FILE", help="write tables and plots to this page")


@dataclass(frozen=True)
class TextWindows:
    """The texts of a command, read before a model is loaded.

    Args:
        texts: all of them. tokens: of a window. most: largest number of windows; None: all. seed: of which are drawn.
        page: the page to write, or None.
    """

    texts: list[Text]
    tokens: int
    most: int | None
    seed: int
    page: Path | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> TextWindows:
        """Read the texts that `add_texts` names.

        Raises:
            UsageError: an option is out of range, a text cannot be read, or the page cannot be written.
        """
        from inferplane.calibrate import read_texts
        from inferplane.engine.request.arguments import as_integer
        from inferplane.files import check_writable

        tokens = as_integer("window_tokens", args.window_tokens, 16)
        most = None if args.windows is None else as_integer("windows", args.windows, 1)
        page = None if args.html is None else Path(args.html).expanduser()
        if page is not None:
            check_writable(page)
        return cls(read_texts(args.data), tokens, most, args.seed, page)

    def draw(self, tokenizer: Tokenizer) -> list[Window]:
        """The windows, of a tokenizer's ids.

        Raises:
            UsageError: no text has a whole window.
        """
        from inferplane.calibrate import draw_windows, slice_windows

        windows = slice_windows(self.texts, partial(tokenizer.encode, is_prompt=False), self.tokens)
        return windows if self.most is None else draw_windows(windows, self.most, self.seed)

    def write_page(self, text: str) -> None:
        """Write the page, whole or not at all."""
        from inferplane.files import write_atomically

        assert self.page is not None
        write_atomically(self.page, text)
