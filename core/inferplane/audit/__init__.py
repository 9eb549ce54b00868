"""What a format, a device or a method costs: models held against each other on texts."""

from inferplane.audit.evaluate import Evaluation, Interval, TokenScores, evaluate, score_windows

__all__ = ["Evaluation", "Interval", "TokenScores", "evaluate", "score_windows"]
