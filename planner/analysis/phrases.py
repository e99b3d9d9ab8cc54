"""Load the phrases of analysis sentences from `phrases.yaml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.core.readers import read_yaml

ANALYSIS_PHRASES: Mapping[str, Any] = read_yaml(Path(__file__).with_name("phrases.yaml"))
CALIBRATION_BASIS_LABELS: Mapping[str, str] = {
    name: basis["says"] for name, basis in ANALYSIS_PHRASES["basis"].items()
}
"""What the step costs are based on, by `Performance.basis`."""
