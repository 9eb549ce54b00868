"""The source system's settings: its page's own examples, and what estimate prints of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from inferplane.cli import main
from inferplane.engine.runner.sizes.sizing import Sizing, Traffic, count_cache_tokens
from inferplane.errors import UsageError
from inferplane.kvcache import PoolShape
from tests.unit.engine.runner.test_estimate import SMALL

K = 1024


def test_the_examples_of_the_page():
    """8K x 40 are 320K tokens; a 32K model then has 10; 300 and 1500 tokens have a ratio of about 0.25."""
    tokens = count_cache_tokens(40, 8 * K)
    assert tokens == 320 * K
    assert Sizing(tokens, 8 * K).block_bs == 40 and Sizing(tokens, 32 * K).block_bs == 10
    assert Traffic(300, 1500).block_ratio() == pytest.approx(0.25, rel=0.05)
    assert Traffic(300, 1500).block_ratio(1.2) == pytest.approx(1.2 * 428 / 1800)
    assert Sizing(tokens, 8 * K, Traffic(6000, 2000)).max_batch == 320 * K // 8000 == 40
    assert Sizing(tokens, 8 * K, Traffic(300, 1500)).max_batch == 128, "the source system's largest"
    assert Traffic(1000, 20).block_ratio() == 1.0


def test_there_is_no_average_of_nothing():
    with pytest.raises(UsageError, match="prompt_tokens = 0"):
        Traffic(0, 5)
    with pytest.raises(UsageError, match="output_tokens = -1"):
        Traffic(5, -1)


def test_settings_of_an_estimate():
    """45 blocks of 16 tokens; with two tables half of them hold a sequence's tokens."""
    assert SMALL.size(2900).data() == {"cache_tokens": 720, "block_bs": 7, "max_batch": None, "block_ratio": None}
    assert replace(SMALL, pools=(PoolShape((None, None), 64),)).size(2900).cache_tokens == 22 * 16
    found = SMALL.data(Traffic(300, 60))["caches"][1]
    assert (found["block_bs"], found["max_batch"], found["block_ratio"]) == (7, 2, 1.0)


def test_the_command_line(capsys, monkeypatch):
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    words = ["estimate", "demo", "--device", "cpu", "--memory", "1GiB", "--prompt-tokens", "300"]
    assert main.main(words) == main.WRONG_USAGE and "belong together" in capsys.readouterr().err
    words += ["--output-tokens", "1500"]
    assert main.main([*words, "--json"]) == main.DONE
    found = json.loads(capsys.readouterr().out)["caches"][1]
    assert main.main(words) == main.DONE
    line = (
        f"all free memory holds {found['cache_tokens']} tokens: BLOCK_BS {found['block_bs']} x 2048; max_batch "
        f"{found['max_batch']} for requests of 300 + 1500 tokens, BLOCK_RATIO 0.24"
    )
    assert line in " ".join(capsys.readouterr().out.split())
