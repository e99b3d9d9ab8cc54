"""Predictions against public measurements: what `make accuracy` shows. No wheel has it."""
