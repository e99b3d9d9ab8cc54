"""Predicted against measured: start-up logs, serving benchmarks, timed runs."""
