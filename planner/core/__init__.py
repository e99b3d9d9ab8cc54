"""Shared ground without LLM knowledge: units, intervals, errors, and how catalogs are read."""
