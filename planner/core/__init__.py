"""Code without knowledge of LLMs: units, intervals, versions, errors and catalog files."""
