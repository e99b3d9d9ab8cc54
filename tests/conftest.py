"""Property tests draw the same cases every time, so that a run of the suite means the same everywhere."""

import sys

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
"""A grammar that jsonschema builds in seconds when it is imported, for a check that nobody asks for."""
