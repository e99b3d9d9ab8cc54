"""The command `headroom`, which says in a line if another package hides its own.

The distribution llm-d-planner brings a package `planner` too.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def run() -> int:
    """Run the command if the package `planner` is Headroom's; return the exit code."""
    spec = find_spec("planner")
    if not (spec and spec.origin and _is_own(Path(spec.origin))):
        where = f" in {Path(spec.origin).parent}" if spec and spec.origin else ""
        print(
            f"headroom: the package planner{where} is another project's, such as llm-d-planner's;"
            " install headroom-planner into an environment of its own",
            file=sys.stderr,
        )
        return 2
    from planner.__main__ import run as run_planner

    return run_planner()


def _is_own(path: Path) -> bool:
    return path.read_text(encoding="utf-8", errors="replace").startswith('"""Headroom: ')


if __name__ == "__main__":
    raise SystemExit(run())
