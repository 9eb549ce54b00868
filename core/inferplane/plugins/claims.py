"""Decides which plugin serves a name that several registered. The order of registration does not count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from inferplane.plugins.records import OURS, Claim, Quarantined, family, normalize_name, quarantine
from inferplane.plugins.selection import VARIABLE, PluginSelection


@dataclass
class Settlement:
    """The result for one kind of names.

    Args:
        winners: name -> the claim that gets it.
        vacant: name -> why no claim gets it, as a sentence without full stop.
        losers: a record for each claim that does not get its name.
    """

    winners: dict[str, Claim] = field(default_factory=dict)
    vacant: dict[str, str] = field(default_factory=dict)
    losers: list[Quarantined] = field(default_factory=list)


def settle(claims: Sequence[Claim], choice: PluginSelection, *, devices: bool) -> Settlement:
    """Give each name to one distribution: the user's choice, else the in-tree one, else the only one, else none.

    A distribution that serves a variant of a family claims the name of the family too. Otherwise installing a wheel
    could change the meaning of a device name.

    Args:
        claims: of one kind (devices, architectures, ...).
        choice: the user's choice.
        devices: the names are devices, which have families.
    """
    outcome = Settlement()
    parties: dict[str, dict[str, list[Claim]]] = defaultdict(lambda: defaultdict(list))
    for claim in claims:
        parties[claim.name][normalize_name(claim.origin.distribution)].append(claim)
    if devices:
        for claim in claims:
            head = family(claim.name)
            if head in parties:
                parties[head][normalize_name(claim.origin.distribution)].append(claim)
    for name in sorted(parties):
        _settle_one(name, parties[name], choice.claims.get(name), devices, outcome)
    return outcome


def _settle_one(
    name: str, parties: dict[str, list[Claim]], chosen: str | None, devices: bool, outcome: Settlement
) -> None:
    default = next(iter(parties)) if len(parties) == 1 else OURS  # which may not be among them: then none is chosen
    winner = default if chosen is None else chosen
    claims = [claim for party in parties.values() for claim in party]
    own = parties.get(winner, [])
    exact = [claim for claim in own if claim.name == name]
    if len(exact) == 1:
        outcome.winners[name] = exact[0]
        why = f"{name!r} is served by {exact[0].origin}, " + (f"chosen in {VARIABLE}" if chosen else "in-tree")
    elif own and not exact:
        why = f"{name!r} is a family of {own[0].origin}"
    else:
        origins = sorted({f"{claim.origin} ({claim.origin.entry_point})" for claim in claims})
        why = f"{name!r} is claimed by {', '.join(origins)}; "
        why += f"{VARIABLE} gives it to {chosen}" if chosen else "none serves it until one is chosen"
        outcome.vacant[name] = why
    for claim in claims:
        if claim.name == name and claim is not outcome.winners.get(name):
            remedy = f"choose this one by {VARIABLE}={name}@{claim.origin.distribution}"
            losing = quarantine(claim.origin, "claim", why, devices=(name,) if devices else (), remedy=remedy)
            outcome.losers.append(losing)
