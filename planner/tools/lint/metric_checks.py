"""Check the metrics that a text names against the /metrics pages of an engine's versions."""

import re
from collections.abc import Sequence

from planner.core.errors import find_closest
from planner.core.versions import Version
from planner.engines.cli_options import get_cli_options, load_flag_lists, load_recorded_names
from planner.tools.lint.findings import LintFinding, OptionChange, load_engine_changes
from planner.tools.lint.option_checks import CheckedCommand


def check_metric(name: str, engine: str, version: str | Version) -> LintFinding:
    """Return the verdict on a metric's name, with or without a histogram's or counter's suffix."""
    known, all_versions = load_recorded_names("metrics", engine), load_flag_lists(engine).versions
    nearest = get_cli_options(engine, version).version
    bare = re.sub(r"_(bucket|sum|count|created)$", "", name)
    recorded_name = next(
        (
            spelling
            for spelling in (name, bare, f"{bare}_total", re.sub(r"_total$", "", name))
            if spelling in known or spelling in load_engine_changes(engine).metrics
        ),
        name,
    )
    present_in = known.get(recorded_name, ())
    if nearest in present_in or not any(nearest in versions for versions in known.values()):
        return LintFinding("metric", name, name, "ok")
    change = load_engine_changes(engine).metrics.get(recorded_name) or OptionChange()
    earlier = [
        listed for listed in present_in if all_versions.index(listed) <= all_versions.index(nearest)
    ]
    later = [listed for listed in present_in if listed not in earlier]
    if earlier or (change.advice and not later):
        last = f"; {earlier[-1]} had it" if earlier else ""
        instead = change.becomes or change.instead
        return LintFinding(
            "metric", name, name, change.verdict, f"not on /metrics of {nearest}{last}", instead
        )
    if later:
        return LintFinding(
            "metric", name, name, "unknown", f"on /metrics since {later[0]}, or shortly before"
        )
    why = f"not on /metrics of {engine} {nearest}"
    return LintFinding("metric", name, name, "unknown", why, find_closest(name, known, 0.8))


def check_metrics(
    names: Sequence[str], commands: Sequence[CheckedCommand], version: str | None
) -> list[LintFinding]:
    """Return the verdicts on the metrics that a text names.

    The version is that of the command of the metric's engine, if the text starts one.
    """
    metrics = []
    for name in names:
        engine = name.partition(":")[0]
        command_version = next(
            (checked.version for checked in commands if checked.command.engine == engine), None
        )
        checked_version = (
            (version if command_version or not commands else None)
            or command_version
            or load_flag_lists(engine).versions[-1]
        )
        finding = check_metric(name, engine, checked_version)
        reasons = (_explain_disabled_metrics(c) for c in commands if c.command.engine == engine)
        reason = next(filter(None, reasons), "")
        if finding.verdict == "ok" and reason:
            why = f"the server has none: {reason}"
            finding = LintFinding("metric", name, name, "contradicts", why)
        metrics.append(finding)
    return metrics


def _explain_disabled_metrics(checked: CheckedCommand) -> str:
    """Return why a server has no metrics, as an option; empty if it has them."""
    values = checked.as_meant.values
    if checked.command.engine == "vllm" and values.get("disable_log_stats"):
        return "--disable-log-stats"
    silent = checked.command.engine == "sglang" and not values.get("enable_metrics")
    return "it starts without --enable-metrics" if silent else ""
