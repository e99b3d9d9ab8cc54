"""A verdict on every metric that a text names: what a version's /metrics page has of it."""

import re
from collections.abc import Sequence

from planner.core.errors import find_closest
from planner.core.versions import Version
from planner.engines.cli_options import get_cli_options, load_flag_lists, load_recorded_names
from planner.tools.lint.findings import LintFinding, OptionChange, load_engine_changes
from planner.tools.lint.option_checks import CheckedCommand


def check_metric(name: str, engine: str, version: str | Version) -> LintFinding:
    """The verdict on the name of a metric, with or without what a histogram or counter adds to it."""
    known, all_versions = load_recorded_names("metrics", engine), load_flag_lists(engine).versions
    nearest = get_cli_options(engine, version).version
    spelt = next(
        (
            one
            for one in _list_metric_spellings(name)
            if one in known or one in load_engine_changes(engine).metrics
        ),
        name,
    )
    had = known.get(spelt, ())
    if nearest in had or not any(nearest in versions for versions in known.values()):
        return LintFinding("metric", name, name, "ok")
    change = load_engine_changes(engine).metrics.get(spelt) or OptionChange()
    earlier = [one for one in had if all_versions.index(one) <= all_versions.index(nearest)]
    later = [one for one in had if one not in earlier]
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


def _list_metric_spellings(name: str) -> list[str]:
    bare = re.sub(r"_(bucket|sum|count|created)$", "", name)
    return [name, bare, f"{bare}_total", re.sub(r"_total$", "", name)]


def check_metrics(
    names: Sequence[str], judged: Sequence[CheckedCommand], version: str | None
) -> list[LintFinding]:
    """The verdicts on metrics that a text names, of the engines that it starts or of their own prefix."""
    metrics = []
    for name in names:
        engine = name.partition(":")[0]
        own = next(
            (checked.version for checked in judged if checked.command.engine == engine), None
        )
        at = (version if own or not judged else None) or own or load_flag_lists(engine).versions[-1]
        verdict = check_metric(name, engine, at)
        off = next(
            (
                one
                for one in judged
                if one.command.engine == engine and _explain_disabled_metrics(one)
            ),
            None,
        )
        if verdict.verdict == "ok" and off:
            verdict = LintFinding(
                "metric",
                name,
                name,
                "contradicts",
                f"the server has none: {_explain_disabled_metrics(off)}",
                "",
            )
        metrics.append(verdict)
    return metrics


def _explain_disabled_metrics(judged: CheckedCommand) -> str:
    values = judged.as_meant.values
    if judged.command.engine == "vllm" and values.get("disable_log_stats"):
        return "--disable-log-stats"
    silent = judged.command.engine == "sglang" and not values.get("enable_metrics")
    return "it starts without --enable-metrics" if silent else ""
