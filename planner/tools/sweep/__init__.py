"""Thousands of what-ifs at once."""
