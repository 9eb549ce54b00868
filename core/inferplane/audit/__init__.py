"""What a format, a device or a method costs, and where: models held against each other on texts."""

from inferplane.audit.evaluate import Evaluation, Interval, TokenScores, evaluate, score_windows
from inferplane.audit.sites import find_part_pins
from inferplane.audit.sitewise import SiteAudit, SiteErrors, audit_sites

__all__ = [
    "Evaluation",
    "Interval",
    "SiteAudit",
    "SiteErrors",
    "TokenScores",
    "audit_sites",
    "evaluate",
    "find_part_pins",
    "score_windows",
]
