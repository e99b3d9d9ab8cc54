"""Diagnose a server from its metrics and its log."""

from planner.tools.diagnostics.diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
