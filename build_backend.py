"""Build wheels that carry the simulator's machine code, so that nobody who installs one compiles.

A build backend (PEP 517) in front of hatchling's, which lets a wheel need more than an editable
install, and hatchling's hook for the wheel's content. A wheel is for one version of Python, since
numba's code is. Where it does not fit, the planner compiles as it does in a clone.
"""

import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hatchling.build
from hatchling.build import *  # noqa: F403
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    """Return what a wheel's build needs: all that the planner imports, since the build runs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*hatchling.build.get_requires_for_build_wheel(), *project["dependencies"]]


class CustomBuildHook(BuildHookInterface[Any]):
    """Compile the simulator for every processor of this kind, and include the code."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into a temporary folder; `finalize` removes it."""
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        level = "x86-64-v3" if platform.machine().lower() in ("x86_64", "amd64") else "generic"
        target = {"NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": ""}
        subprocess.run(
            [sys.executable, "-m", "planner.simulator"],
            cwd=ROOT,
            env={**os.environ, **target, "NUMBA_CACHE_DIR": self._folder.name},
            check=True,
        )
        build_data["force_include"][self._folder.name] = "planner/simulator/compiled"
        build_data["tag"] = f"cp{sys.version_info.major}{sys.version_info.minor}-none-any"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        if version != "editable":
            self._folder.cleanup()
