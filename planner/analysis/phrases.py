"""Load the phrases of analysis sentences from `phrases.yaml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from planner.core.readers import read_yaml
from planner.planning.slo import LatencyMetric


class BasisPhrase(TypedDict):
    """What the step costs are based on, and how much of a risk that is (a violation weighs 3)."""

    says: str
    doubt: float


class RiskPhrase(TypedDict):
    """A risk, and what to measure first to settle it."""

    risk: str
    measure: str


class AnalysisPhrases(TypedDict):
    """The sections of `phrases.yaml`."""

    basis: Mapping[str, BasisPhrase]
    risks: Mapping[str, RiskPhrase]


ANALYSIS_PHRASES: AnalysisPhrases = read_yaml(Path(__file__).with_name("phrases.yaml"))
CALIBRATION_BASIS_LABELS: Mapping[str, str] = {
    name: basis["says"] for name, basis in ANALYSIS_PHRASES["basis"].items()
}
"""What the step costs are based on, by `Performance.basis`."""
METRIC_NAMES: Mapping[LatencyMetric, str] = {
    "ttft": "First token",
    "tpot": "Time per token",
    "itl": "Gap between tokens",
    "e2e": "Whole answer",
}
"""Latency metrics as people read them, beside their usual short names."""
VERDICT_NAMES: Mapping[str, str] = {
    "holds": "Meets targets",
    "at_risk": "At risk",
    "nothing_meets": "No plan meets the targets",
}
"""What people read of a plan, by `Plan.verdict`."""
