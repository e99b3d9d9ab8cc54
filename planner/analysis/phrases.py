"""Load the phrases of analysis sentences from `phrases.yaml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict

from planner.core.readers import read_yaml


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
SloState = Literal["met", "at risk", "missed"]
SLO_STATES: Mapping[str, SloState] = {"kept": "met", "at risk": "at risk", "broken": "missed"}
"""What people read of one target, by `get_slo_status`."""
