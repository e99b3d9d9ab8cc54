"""Altair charts, one module per chapter."""
