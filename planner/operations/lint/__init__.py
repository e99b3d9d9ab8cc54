"""A command that runs today: what its version takes of it, what it does on a GPU, and what to write instead."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from planner.core.quantities import PlannerError, aligned, one_line
from planner.facts.engines import release
from planner.facts.workload import Workload
from planner.memory.budget import MemoryPlan, safe_utilization
from planner.operations.flags import lists
from planner.operations.lint.contradictions import contradictions
from planner.operations.lint.deployment import counted
from planner.operations.lint.drift import later
from planner.operations.lint.judging import Judged, engine_at, judge
from planner.operations.lint.launching import Command
from planner.operations.lint.mending import Mended, mended
from planner.operations.lint.metrics import metrics
from planner.operations.lint.planned import Planned, figures, planned
from planner.operations.lint.reading import read
from planner.operations.lint.verdicts import Finding, secret
from planner.operations.rendering import render

__all__ = ["Finding", "Lint", "Linted", "lint"]


@dataclass(frozen=True)
class Linted:
    """One command: what is to be said of it, how it should be written, and what it does on a GPU."""

    judged: Judged
    mended: Mended
    planned: Planned | None  # of the command as it is, or once it is `mended` where it does not start as it is
    unplanned: str  # why there is no plan, where a GPU was named

    @property
    def refused(self) -> bool:
        """The server ends at once over how it is written."""
        return any(found.refused for found in self.judged.findings)

    @property
    def said(self) -> list[Finding]:
        """What there is to say something of."""
        return [found for found in self.judged.findings if found.verdict != "ok" or found.why]

    @property
    def good(self) -> list[str]:
        """The names of the rest."""
        names = dict.fromkeys(found.name for found in self.judged.findings if found not in self.said)
        return [one_line(name)[:40] for name in names]

    @property
    def stuck(self) -> bool:
        """Only its author can say how it starts."""
        return not self.planned and any(found.kind == "flag" and found.verdict == "contradicts" for found in self.said)


@dataclass(frozen=True)
class Lint:
    """All that is to be said of a text, and what another version would make of it."""

    commands: tuple[Linted, ...]
    metrics: tuple[Finding, ...]
    notes: tuple[str, ...]
    to: str | None
    drift: tuple[Finding, ...]  # what changes at `to`

    @property
    def findings(self) -> list[Finding]:
        """Of all commands and metrics."""
        return [*(found for one in self.commands for found in one.judged.findings), *self.metrics]

    @property
    def mend(self) -> bool:
        """Something should be mended: now, or to start at `to`."""
        starts = all(memory.starts for memory in self._memories)
        return not starts or any(found.mend for found in (*self.findings, *self.drift))

    @property
    def verdict(self) -> Literal["ok", "at_risk", "mend"]:
        """At risk: it starts, but something in it is risky, or its memory may not suffice."""
        wrong = {found.verdict for found in (*self.findings, *self.drift) if found.mend}
        if wrong - {"risky"} or not all(memory.starts for memory in self._memories):
            return "mend"
        return "at_risk" if wrong or any(memory.status != "ok" for memory in self._memories) else "ok"

    @property
    def _memories(self) -> list[MemoryPlan]:
        return [one.planned.memory for one in self.commands if one.planned]

    def frame(self) -> list[dict[str, Any]]:
        """One row for each finding, for tables."""
        return [{**vars(found), "mend": found.mend} for found in self.findings]

    def json(self) -> dict[str, Any]:
        return {
            "commands": [
                {
                    "where": one.judged.command.where, "engine": one.judged.command.engine,
                    "engine_version": one.judged.version, "command": _public(one.judged.command),
                    "findings": [vars(found) for found in one.judged.findings],
                    "better": _public(one.mended.command) if one.mended.diff else None, "diff": list(one.mended.diff),
                    "refused": one.refused, "planned": figures(one.planned) if one.planned else None,
                    "unplanned": one.unplanned or None,
                }
                for one in self.commands
            ],
            "metrics": [vars(found) for found in self.metrics],
            "to": self.to, "drift": [vars(found) for found in self.drift],
            "notes": list(self.notes), "mend": self.mend, "verdict": self.verdict,
        }  # fmt: skip

    def __str__(self) -> str:
        return render("lint", found=self, table=_table, public=_public).strip("\n")


def lint(
    what: str, version: str | None = None, *, engine: str | None = None, gpu: str | None = None,
    to: str | None = None, workload: Workload | None = None,
) -> Lint:  # fmt: skip
    """Judge the command line, or the file, `what` for an engine's version; on a `gpu` also what it does and is worth.

    The version is that of the image where none is given, or else the newest that is listed; a file of a plan names its
    version, and its GPU where no `gpu` is given. `to` is another version that the command is to move to. Nothing of
    `what` is run. Raises `PlannerError` where nothing can be made of it.
    """
    text = read(what, engine)
    notes = list[str]()
    for given in filter(None, (version, to)):
        if not given.startswith("nightly"):
            release(given)
    found, drift = list[Linted](), list[Finding]()
    if gpu is not None:
        counted(gpu)
    for command in text.commands:
        at = version or command.version or lists(command.engine).versions[-1]
        judged = _judged(command, at)
        notes += filter(None, (judged.options.note, command.note))
        pool = f"a {command.role} worker of pools is planned as a server of its own, which does both"
        on = gpu or command.planned_on or None
        notes += [pool] if command.role and on else []
        notes += [] if version or command.version else [f"no version given: judged for {command.engine} {at}"]
        found.append(_planned(judged, on, at, workload))
        drift += later(judged, to) if to else []
    watched = metrics(text.metrics, [one.judged for one in found], version) if text.metrics else []
    if to and text.metrics:
        now = {one.name: one for one in watched}
        then = metrics(text.metrics, [one.judged for one in found], to)
        drift += [one for one in then if one != now[one.name] and one.mend]
    return Lint(tuple(found), tuple(watched), tuple(dict.fromkeys(notes)), to, tuple(dict.fromkeys(drift)))


def _judged(command: Command, version: str) -> Judged:
    """The verdicts on a command, those on its model among them."""
    judged = judge(command, version)
    engine = engine_at(command.engine, version)
    return replace(judged, findings=_joined(judged.findings, contradictions(judged, engine)))


def _planned(judged: Judged, gpu: str | None, version: str, workload: Workload | None) -> Linted:
    """One command, planned where a GPU is named and the planner knows enough; what does not start, once mended."""
    better = mended(judged)
    if gpu is None:
        return Linted(judged, better, None, "")
    starting = judged
    if any(found.refused for found in judged.findings):
        starting = _judged(better.command, version)
        if still := next((found for found in starting.findings if found.refused), None):
            why = f"the server ends with an error while it starts. {still.written}: {still.why}"
            return Linted(judged, better, None, why)
    try:
        done = planned(starting, gpu, version, workload)
    except PlannerError as error:
        return Linted(judged, better, None, str(error))
    judged = _roomy(judged, done)
    return Linted(judged, mended(judged, {step.argument: step.value for step in done.steps}), done, "")


def _roomy(judged: Judged, done: Planned) -> Judged:
    """The findings, without the rule on large shares of memory where this GPU's memory plan says that it is safe."""
    if done.deployment.args.gpu_memory_utilization > safe_utilization(done.deployment):
        return judged
    share = ("--gpu-memory-utilization", "risky")
    findings = (
        replace(one, verdict="ok", why="", instead="") if (one.name, one.verdict) == share else one
        for one in judged.findings
    )
    return replace(judged, findings=tuple(findings))


def _joined(findings: Iterable[Finding], more: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings, those of `more` in place of what was said of the same item and was no more than a risk."""
    made = {(one.kind, one.name): one for one in findings}
    for one in more:
        said = made.get((one.kind, one.name))
        if said is None or not said.mend or said.verdict == "risky":
            made[one.kind, one.name] = one
    return tuple(made.values())


def _public(command: Command) -> str:
    """The command in one line, with its environment in front, and without secrets."""
    secret = {name for name, value in command.environment.items() if len(value) > 7 and name.endswith(("KEY", "TOKEN"))}
    shown = [f"{name}={'...' if name in secret else value}" for name, value in command.environment.items()]
    return one_line(" ".join([*shown, _hidden(command)]))


def _hidden(command: Command) -> str:
    words = list(command.argv)
    for at, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if secret(name) and equals:
            words[at] = f"{name}=..."
        elif secret(name) and at + 1 < len(words):
            words[at + 1] = "..."
    return replace(command, argv=tuple(words)).line


def _table(findings: Iterable[Finding]) -> list[str]:
    """A line for each finding: verdict, item, why, and what to write instead."""
    rows = [("", one.verdict, one_line(one.name if one.kind == "metric" else one.written)[:70], _said(one))
            for one in findings]  # fmt: skip
    return aligned(rows).splitlines() if rows else []


def _said(one: Finding) -> str:
    return one_line("; ".join(filter(None, (one.why, f"instead: {one.instead}" if one.instead else ""))))
