"""Analyses behind notebooks, reports and the cockpit: tables, sweeps and sentences about plans."""
