"""What production says, judged: which failure mode a /metrics page or a log shows, why, and what would mend it."""

from planner.operations.diagnose.verdict import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
