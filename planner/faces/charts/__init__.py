"""Altair charts, a module for each chapter."""
