"""Property tests draw the same cases every time, so that a run of the suite means the same everywhere."""

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")
