"""`python -m planner` is the command `planner`."""

from planner.ui.cli import main

raise SystemExit(main())
