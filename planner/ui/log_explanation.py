"""Compare a startup log with what a scenario or a command planned."""

from pathlib import Path

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.planning.scenario import Scenario, load_scenario
from planner.tools.diagnostics.log_comparison import LogExplanation, explain_log_file
from planner.tools.lint.report import read_launched_deployment


def explain_log(
    log: str | Path,
    gpu: str | None = None,
    *,
    scenario: str | None = None,
    command: str | None = None,
    model: str | None = None,
) -> LogExplanation:
    """Compare the log in a file with its plan; see `explain_log_file`.

    `command` is the command line or file that started it, on `gpu`. Raises `PlannerError` if it
    comes without a GPU or with a scenario.
    """
    planned: Deployment | Scenario | None = None
    if command:
        if scenario or not gpu:
            raise PlannerError("--command goes with --gpu NAME, and without --scenario")
        planned = read_launched_deployment(command, gpu)
    elif scenario:
        planned = load_scenario(scenario)
    return explain_log_file(log, gpu, planned, model)
