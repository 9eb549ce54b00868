"""Where torch's own operator ranks that this card needs in parts, and the vendor's libraries as features."""

from __future__ import annotations

RANK_IN_PARTS = 11
"""torch's own operator, called so that it is right on this card."""

KUNLUN, SPEEDGATE, GROUP_TOPK = ("kunlun-ops",), ("xspeedgate-ops",), ("group-topk",)
"""Features: functions of kunlun_ops, operators of xspeedgate_ops, and a function that came with a later kunlun_ops."""
