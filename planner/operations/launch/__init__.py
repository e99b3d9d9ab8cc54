"""From plan to operation: one launch of a replica, and every file that starts, watches and checks it."""

from planner.operations.launch.command import Launch, launch, launch_of, launches
from planner.operations.launch.files import FILES, IN_POOLS, documents, file_names, ramp

__all__ = ["FILES", "IN_POOLS", "Launch", "documents", "file_names", "launch", "launch_of", "launches", "ramp"]
