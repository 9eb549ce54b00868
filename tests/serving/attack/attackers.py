"""Misbehaving clients in a process of their own: threads that take one kind after the other, in random order."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty
from random import Random
from typing import Any

from tests.serving.attack.control import CLIENTS_NICE, processor_s
from tests.serving.attack.kinds import KINDS, Kind
from tests.serving.attack.target import Target
from tests.serving.live import Live

KEYS = {"good": "good-key-1", "evil": "evil-key-2", "load": "load-key-3"}
SETTINGS = (
    *("--max-num-seqs", "16", "--max-waiting", "32", "--max-num-seqs-per-key", "8"),
    *("--max-num-batched-tokens", "64", "--max-prompt-tokens", "512", "--max-output-tokens", "256"),
    *("--header-timeout-s", "2", "--body-timeout-s", "2", "--write-timeout-s", "2"),
    *("--health-port", "0", "--grpc-port", "0", "--allowed-hosts", "localhost"),
)
"""A server that several clients share: each has a key and a share, and none may ask for more than a step's worth of
another's time. Its limits of time are short, so that slow clients meet them."""
CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 32},
    **{"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "eos_token_id": 1},
}
"""A model so small that its steps take about as long as the server's work for them, not longer."""
HOLD_S = 2.5
THREADS, PAUSE_S = 40, 1.0
PATIENCE_S = 120.0
"""How long the attackers' process may take to start, and its clients to leave a server that answers them."""
READY = "ready"


def start_server(folder: Path, *more: str) -> Live:
    """A server with `SETTINGS`, `more` and `KEYS`, over a random model with the demo model's tokenizer, in a folder."""
    from tests.serving.faults import DEMO, TOOLS  # imports an engine, which the attackers' process has no use for

    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in TOOLS:
        if (DEMO / name).exists():
            shutil.copy(DEMO / name, folder / name)
    key_file = folder / "keys"
    key_file.write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    key_file.chmod(0o600)
    model = ("--load-format", "dummy", "--dtype", "float32", str(folder))
    return Live(*SETTINGS, *more, "--api-key-file", str(key_file), *model, environment={"INFERPLANE_API_KEY": ""})


def target_of(server: Live, hold_s: float = HOLD_S) -> Target:
    """The server as attackers see it."""
    grpc_port = int(server.event("listening")["grpc"].rpartition(":")[2])
    return Target(server.host, server.port, grpc_port, KEYS["evil"], hold_s)


@dataclass(frozen=True)
class Attack:
    """What one client of a kind did.

    Args:
        kind: its name.
        started: on the monotonic clock, in seconds.
        ended: see there.
        statuses: of the answers that it read.
        wrong: what should not have happened.
    """

    kind: str
    started: float
    ended: float
    statuses: list[int] = field(default_factory=list)
    wrong: str = ""


def attack_once(kind: Kind, target: Target, draw: Random) -> Attack:
    """Do what a client of a kind does, and judge what it got."""
    started, statuses, wrong = time.monotonic(), [], ""
    if kind.is_load:
        target = replace(target, key=KEYS["load"])
    try:
        statuses = kind.run(target, draw)
    except Exception:
        wrong = traceback.format_exc(limit=-3)
    if bad := [s for s in statuses if s not in kind.allowed]:
        wrong = f"answers {bad}, none of {sorted(kind.allowed)}"
    return Attack(kind.name, started, time.monotonic(), statuses, wrong)


def shuffled_kinds(draw: Random, kinds: Sequence[Kind] = KINDS) -> Iterator[Kind]:
    """Every kind once in random order, then again in another order, and so on."""
    while True:
        yield from draw.sample(kinds, len(kinds))


def kinds_of(only: str) -> list[Kind]:
    """Kinds that send valid requests for "load", the others for "attack", every kind for ""."""
    return [kind for kind in KINDS if not only or kind.is_load == (only == "load")]


def _attack(target: Target, seed: int, pause_s: float, only: str, active: Any, busy: Any, found: Any) -> None:
    os.nice(CLIENTS_NICE)
    draw, lock = Random(seed), threading.Lock()
    deck = shuffled_kinds(draw, kinds_of(only))

    def work() -> None:
        while True:
            active.wait()
            with busy.get_lock():
                busy.value += 1
            with lock:
                kind, own = next(deck), Random(draw.random())
            found.put(attack_once(kind, target, own))
            with busy.get_lock():
                busy.value -= 1
            time.sleep(own.random() * 2 * pause_s)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(THREADS)]
    for worker in workers:
        worker.start()
    found.put(READY)
    for worker in workers:
        worker.join()


class Attackers:
    """`THREADS` clients at once, which attack when they are told to.

    Args:
        target: the server.
        seed: of the order of kinds, and of what each draws.
        pause_s: seconds that a client waits on average before it comes back as another kind.
        only: see `kinds_of`.
    """

    def __init__(self, target: Target, seed: int, pause_s: float = PAUSE_S, only: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self._active, self._busy, self._found = context.Event(), context.Value("i", 0), context.Queue()
        arguments = (target, seed, pause_s, only, self._active, self._busy, self._found)
        self._process = context.Process(target=_attack, args=arguments, daemon=True)
        self.attacks: list[Attack] = []

    def __enter__(self) -> Attackers:
        self._process.start()
        assert self._found.get(timeout=PATIENCE_S) == READY
        return self

    def __exit__(self, *unused: object) -> None:
        self._process.kill()
        self._process.join()

    @property
    def processor_s(self) -> float:
        """Seconds of processors that all clients have used so far."""
        return processor_s(self._process.pid or 0)

    def attack(self, seconds: float) -> None:
        """Attack for so long, then wait until the last client has left; AssertionError if one stays longer."""
        self._active.set()
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            self._collect(0.2)
        self._active.clear()
        limit = time.monotonic() + PATIENCE_S
        while self._busy.value:
            assert time.monotonic() < limit, f"{self._busy.value} clients still wait for the server"
            self._collect(0.1)
        self._collect(0.5)

    def _collect(self, wait_s: float) -> None:
        assert self._process.is_alive(), "the attackers' process has ended"
        try:
            self.attacks.append(self._found.get(timeout=wait_s))
            while True:
                self.attacks.append(self._found.get_nowait())
        except Empty:
            pass
