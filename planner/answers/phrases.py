"""Load the phrases of risks and of what step costs rest on from `phrases.yaml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from planner.core.readers import read_yaml


class BasisPhrase(TypedDict):
    """What the step costs are based on, and how much of a risk that is (a violation weighs 3)."""

    says: str
    doubt: float


class RiskPhrase(TypedDict):
    """A risk, and what to measure first to settle it."""

    risk: str
    measure: str


_PHRASES = read_yaml(Path(__file__).with_name("phrases.yaml"))
BASIS_PHRASES: Mapping[str, BasisPhrase] = _PHRASES["basis"]
RISK_PHRASES: Mapping[str, RiskPhrase] = _PHRASES["risks"]
