"""What sentences are made of: `phrases.yaml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.core.catalog import read_yaml

PHRASES: Mapping[str, Any] = read_yaml(Path(__file__).with_name("phrases.yaml"))
BASES: Mapping[str, str] = {name: basis["says"] for name, basis in PHRASES["basis"].items()}
"""What a step cost rests on, by `Performance.basis`."""
