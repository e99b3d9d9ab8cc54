"""The planner's answers as tools for agents, over the Model Context Protocol."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from threading import Lock
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, InputRequiredResult, ToolAnnotations
from pydantic import ValidationError

from planner import __version__
from planner.answers.serialization import build_plan_json
from planner.core.access import limit_reading
from planner.core.catalog import CATALOG_DIR, PACKAGE_DIR
from planner.core.errors import PlannerError
from planner.core.redaction import redact_json, redact_text
from planner.core.text import escape_to_one_line
from planner.models.hub import list_config_folders
from planner.planning.scenario import load_scenario
from planner.planning.search import search_deployments
from planner.tools import diagnostics
from planner.tools.batch import predict_row
from planner.tools.lint import report
from planner.ui.catalog_json import serialize_gpus, serialize_models
from planner.ui.log_explanation import explain_log

JsonObject = dict[str, Any]
Cell = str | int | float | bool | None
INSTRUCTIONS = """Capacity planning for LLM serving. Figures in lists are [expected, low, high] of an
80% interval, columns with _lo and _hi are its ends. `basis` names the catalogs that an answer rests
on, each with the newest date that its sources state. Files are read only if you pass them, or a
file that you pass names them, and only below the server's folder; addresses only if it was started
with --addresses. Nothing runs."""
STEP_COSTS = ("gpus.yaml", "models.yaml", "engines.yaml", "memory.yaml", "calibration/*.yaml")
OPTIONS = ("engines.yaml", "flags/*.yaml")
_LOCK = Lock()
"""Tools run in threads; one answer at a time is computed."""
_STATED_DATE = re.compile(r"""\bdate: ?["']?(\d{4}(?:-\d\d){0,2})""")


class PlannerServer(MCPServer[Any]):
    """A server whose errors are one sentence, and that refuses unknown arguments."""

    async def call_tool(
        self, name: str, arguments: JsonObject, context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool; raise `ToolError` with one sentence if it fails."""
        for tool in await self.list_tools():
            accepted = tool.input_schema.get("properties", {})
            if tool.name == name and (unknown := sorted({*arguments} - {*accepted})):
                listed = ", ".join(accepted)
                problem = f"{name}, argument {unknown[0]}: unknown, expected one of {listed}"
                raise ToolError(str(PlannerError(problem)))
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            raise ToolError(_describe_failure(name, error)) from None


def _describe_failure(name: str, error: ToolError) -> str:
    """Describe in one sentence why a tool failed."""
    cause = error.__cause__
    if isinstance(cause, PlannerError):
        return str(cause)
    if isinstance(cause, ValidationError):
        problem = cause.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        return str(PlannerError(f"{name}, argument {where}: {problem['msg']}"))
    if isinstance(cause, OSError):
        return str(PlannerError(f"{name}: {cause.filename or 'a file'}: {cause.strerror or cause}"))
    if cause is None:
        return redact_text(escape_to_one_line(str(error)))
    return f"{name}: this is a bug of the planner, please report it ({type(cause).__name__})"


@cache
def find_catalog_dates(*patterns: str) -> dict[str, str]:
    """Return the newest date that each catalog states, by file; those without one are left out."""
    paths = [path for pattern in patterns for path in sorted(CATALOG_DIR.glob(pattern))]
    dates = {
        path.relative_to(CATALOG_DIR).as_posix(): max(
            _STATED_DATE.findall(path.read_text(encoding="utf-8")), default=""
        )
        for path in paths
    }
    return {name: stated for name, stated in dates.items() if stated}


def _add_basis(answer: Mapping[str, object], *patterns: str) -> JsonObject:
    """Return an answer without secrets and infinite numbers, and with what it rests on."""
    dates = find_catalog_dates(*patterns)
    basis = {
        "planner": __version__,
        "catalogs_date": max(dates.values(), default=None),
        "sources": dict(dates),
        "interval": "80%; lists are [expected, low, high], _lo and _hi are its ends",
    }
    return {**redact_json(_drop_infinities(answer)), "basis": basis}


def _drop_infinities(value: Any) -> Any:
    """Return JSON in which null stands for numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _drop_infinities(item) for name, item in value.items()}
    return [_drop_infinities(item) for item in value] if isinstance(value, list | tuple) else value


def answer_plan(scenario: str, set: dict[str, Any] | None = None) -> JsonObject:
    """Plan a scenario: the cheapest deployment that meets its targets, as in plan.json.

    Args: scenario is the path of a YAML file or the name of a shipped scenario (chat-70b, ...).
    set changes fields by dotted name, such as {"workload.rate": 12, "gpus.0.at_most": 8}.
    """
    with _LOCK:
        plan = search_deployments(load_scenario(scenario, set))
        return _add_basis(build_plan_json(plan), *STEP_COSTS, "prices.yaml", "start_up.yaml")


def answer_predict(row: dict[str, Cell]) -> JsonObject:
    """Predict memory, capacity and latency of one deployment.

    Args: row has the columns of `headroom predict`: model and gpu; optional engine, engine_version,
    quantization, tp, pp, replicas and engine arguments; for latencies isl and osl (mean tokens of
    prompt and answer) with request_rate (per second) or concurrency.
    """
    cells = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in row.items()
        if value is not None
    }
    with _LOCK:
        answer = predict_row(cells)
    if answer["status"] == "error":
        raise PlannerError(answer["error"])
    return _add_basis(answer, *STEP_COSTS, "prices.yaml")


def answer_lint(
    what: str,
    engine_version: str | None = None,
    engine: str | None = None,
    gpu: str | None = None,
    scenario: str | None = None,
    to: str | None = None,
) -> JsonObject:
    """Check a launch command, or the path of a script, unit, compose file, manifest or Helm values.

    Args: engine_version is what it runs (default: its image's tag, or the newest known); engine is
    needed if there are only options; gpu (4xH100) also plans it; scenario is whose traffic it
    serves; to is a version to upgrade to.
    """
    with _LOCK:
        linted = report.lint(
            what, engine_version, engine=engine, gpu=gpu, to=to,
            workload=load_scenario(scenario).workload if scenario else None, is_confined=True,
        )  # fmt: skip
        return _add_basis(linted.to_json(), *OPTIONS, *(STEP_COSTS if gpu else ()))


def answer_diagnose(
    pages: Sequence[str] = (),
    log: str | None = None,
    plan: str | None = None,
    seconds: float | None = None,
) -> JsonObject:
    """Name what is wrong with a server, with evidence and remedies.

    Args: pages are one or two saved /metrics pages of a replica, the earlier first, or its address;
    log is its startup log; plan is a scenario or plan.json; seconds is the time between the pages.
    """
    with _LOCK:
        diagnosis = diagnostics.diagnose(pages, log, plan, seconds)
        return _add_basis(diagnosis.to_json(), *STEP_COSTS, "metrics.yaml")


def answer_explain_log(
    log: str,
    gpu: str | None = None,
    scenario: str | None = None,
    command: str | None = None,
    model: str | None = None,
) -> JsonObject:
    """Compare a vLLM startup log with the plan of its memory, figure by figure.

    Args: log is a path; gpu is what it ran on; scenario is whose plan it is; command is the command
    line or file that started it (with gpu); model is what it served, if the log does not name it.
    """
    with _LOCK:
        explanation = explain_log(
            log, gpu, scenario=scenario, command=command, model=model, is_confined=True
        )
        return _add_basis(explanation.to_json(), *STEP_COSTS)


def answer_models(pattern: str = "") -> JsonObject:
    """List the models of the catalog; pattern is part of a name, * is anything."""
    return _add_basis({"models": serialize_models(pattern)}, "models.yaml")


def answer_gpus(pattern: str = "") -> JsonObject:
    """List the GPUs of the catalog with memory, bandwidth, price and engines."""
    return _add_basis({"gpus": serialize_gpus(pattern)}, "gpus.yaml", "prices.yaml")


TOOLS: dict[str, Callable[..., JsonObject]] = {
    "plan": answer_plan,
    "predict": answer_predict,
    "lint": answer_lint,
    "diagnose": answer_diagnose,
    "explain_log": answer_explain_log,
    "list_models": answer_models,
    "list_gpus": answer_gpus,
}
"""Functions by the name of their tool."""


def build_server(root: Path | None = None, *, allows_addresses: bool = False) -> PlannerServer:
    """Build the server with all tools; they only read, and only what the caller names.

    Files are read below `root` (default: the working directory) alone, also those that a file
    names, besides the planner's own and configurations of the Hub in this machine's caches.
    """
    folders = (root or Path.cwd(), CATALOG_DIR, PACKAGE_DIR, *list_config_folders())

    def confine(function: Callable[..., JsonObject]) -> Callable[..., JsonObject]:
        @wraps(function)
        def answer(*args: Any, **arguments: Any) -> JsonObject:
            with limit_reading(folders, allows_addresses=allows_addresses):
                return function(*args, **arguments)

        return answer

    server = PlannerServer(
        "headroom", instructions=INSTRUCTIONS, version=__version__, log_level="ERROR"
    )
    for name, function in TOOLS.items():
        hints = ToolAnnotations(read_only_hint=True, open_world_hint=allows_addresses)
        server.add_tool(confine(function), name=name, annotations=hints)
    return server
