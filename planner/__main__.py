"""`python -m planner` is the command `planner`."""

from planner.faces.cli import main

raise SystemExit(main())
