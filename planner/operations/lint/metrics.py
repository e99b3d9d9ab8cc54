"""A verdict on every metric that a text names: what a version's /metrics page has of it."""

import re
from collections.abc import Sequence

from planner.core.quantities import closest
from planner.operations.flags import listed, lists, options
from planner.operations.lint.judging import Judged
from planner.operations.lint.verdicts import Change, Finding, changes


def metric(name: str, engine: str, version: str) -> Finding:
    """The verdict on the name of a metric, with or without what a histogram or counter adds to it."""
    known, all_versions = listed("metrics", engine), lists(engine).versions
    nearest = options(engine, version).version
    spelt = next((one for one in _spellings(name) if one in known or one in changes(engine).metrics), name)
    had = known.get(spelt, ())
    if nearest in had or not any(nearest in versions for versions in known.values()):
        return Finding("metric", name, name, "ok")
    change = changes(engine).metrics.get(spelt) or Change()
    earlier = [one for one in had if all_versions.index(one) <= all_versions.index(nearest)]
    later = [one for one in had if one not in earlier]
    if earlier or (change.advice and not later):
        last = f"; {earlier[-1]} had it" if earlier else ""
        instead = change.becomes or change.instead
        return Finding("metric", name, name, change.verdict, f"not on /metrics of {nearest}{last}", instead)
    if later:
        return Finding("metric", name, name, "unknown", f"on /metrics since {later[0]}, or shortly before")
    why = f"not on /metrics of {engine} {nearest}"
    return Finding("metric", name, name, "unknown", why, closest(name, known, 0.8))


def _spellings(name: str) -> list[str]:
    bare = re.sub(r"_(bucket|sum|count|created)$", "", name)
    return [name, bare, f"{bare}_total", re.sub(r"_total$", "", name)]


def metrics(names: Sequence[str], judged: Sequence[Judged], version: str | None) -> list[Finding]:
    """The verdicts on metrics that a text names, of the engines that it starts or of their own prefix."""
    found = []
    for name in names:
        engine = name.partition(":")[0]
        own = next((one.version for one in judged if one.command.engine == engine), None)
        at = (version if own or not judged else None) or own or lists(engine).versions[-1]
        verdict = metric(name, engine, at)
        off = next((one for one in judged if one.command.engine == engine and _unwatched(one)), None)
        if verdict.verdict == "ok" and off:
            verdict = Finding("metric", name, name, "contradicts", f"the server has none: {_unwatched(off)}", "")
        found.append(verdict)
    return found


def _unwatched(judged: Judged) -> str:
    values = judged.parsed.values
    if judged.command.engine == "vllm" and values.get("disable_log_stats"):
        return "--disable-log-stats"
    silent = judged.command.engine == "sglang" and not values.get("enable_metrics")
    return "it starts without --enable-metrics" if silent else ""
