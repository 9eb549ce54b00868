"""Who serves a name that several plugins registered. The order of registration plays no part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from inferplane.plugins.records import OURS, Claim, Quarantined, family, normalized, quarantine
from inferplane.plugins.selection import VARIABLE, PluginSelection


@dataclass
class Settlement:
    """The outcome for one kind of names.

    Args:
        winners: name -> the claim that has it.
        vacant: name -> why nobody has it, as a sentence without its full stop.
        losers: one record for each claim that did not get its name.
    """

    winners: dict[str, Claim] = field(default_factory=dict)
    vacant: dict[str, str] = field(default_factory=dict)
    losers: list[Quarantined] = field(default_factory=list)


def settle(claims: Sequence[Claim], choice: PluginSelection, *, devices: bool) -> Settlement:
    """Give each name to one distribution: the one the user chose, else the in-tree one, else the only one, else none.

    A distribution that serves a variant of a family has a claim on the family's bare name as well: otherwise
    installing a wheel could change what a user's word means.

    Args:
        claims: of one kind (devices, architectures, ...).
        choice: the user's.
        devices: the names are devices, which have families.
    """
    outcome = Settlement()
    parties: dict[str, dict[str, list[Claim]]] = defaultdict(lambda: defaultdict(list))
    for claim in claims:
        parties[claim.name][normalized(claim.origin.distribution)].append(claim)
    if devices:
        for claim in claims:
            head = family(claim.name)
            if head in parties:
                parties[head][normalized(claim.origin.distribution)].append(claim)
    for name in sorted(parties):
        _settle_one(name, parties[name], choice.claims.get(name), devices, outcome)
    return outcome


def _settle_one(
    name: str, parties: dict[str, list[Claim]], chosen: str | None, devices: bool, outcome: Settlement
) -> None:
    if chosen is not None:
        takes = chosen
    elif OURS in parties:
        takes = OURS
    else:
        takes = next(iter(parties)) if len(parties) == 1 else ""
    everybody = [claim for party in parties.values() for claim in party]
    held = parties.get(takes, [])
    exact = [claim for claim in held if claim.name == name]
    if len(exact) == 1:
        outcome.winners[name] = exact[0]
        why = f"{name!r} is served by {exact[0].origin}, " + (f"chosen in {VARIABLE}" if chosen else "in-tree")
    elif held and not exact:
        why = f"{name!r} is a family of {held[0].origin}"
    else:
        who = sorted({f"{claim.origin} ({claim.origin.entry_point})" for claim in everybody})
        why = f"{name!r} is claimed by {', '.join(who)}; "
        why += f"{VARIABLE} gives it to {chosen}" if chosen else "nobody has it until one is chosen"
        outcome.vacant[name] = why
    for claim in everybody:
        if claim.name == name and claim is not outcome.winners.get(name):
            remedy = f"choose this one by {VARIABLE}={name}@{claim.origin.distribution}"
            served = (name,) if devices else ()
            outcome.losers.append(quarantine(claim.origin, "claim", why, devices=served, remedy=remedy))
