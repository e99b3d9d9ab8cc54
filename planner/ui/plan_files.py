"""Write a plan as a folder of files."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from planner import __version__
from planner.answers import Answer, serialize_answer
from planner.answers.answer import PHRASES
from planner.core.catalog import StrictEntry, validate_entry
from planner.core.errors import PlannerError
from planner.core.files import (
    check_not_overwriting,
    check_output_folder,
    ensure_folder,
    get_report_date,
    list_unfinished,
    replace_atomically,
)
from planner.core.number_format import format_number, format_probability, format_usd
from planner.core.readers import parse_json, read_text
from planner.core.text import escape_to_one_line, format_columns
from planner.deploy import ALL_ARTIFACT_FILES, render_artifacts
from planner.deploy.artifacts import BENCHMARK_ARTIFACTS, BENCHMARK_DIR, SECRETS_FILE
from planner.hardware.prices import HOURS_PER_MONTH
from planner.planning.scenario import Scenario


def serialize_plan_file(answer: Answer) -> dict[str, object]:
    """Return the content of plan.json: the answer, and the day and version that it was made with."""
    made = {"date": get_report_date().isoformat(), "headroom": __version__}
    return {**serialize_answer(answer), "made": made}


class _SavedPart(StrictEntry):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class _SavedOption(_SavedPart):
    name: str
    deployment: str


class _SavedLimit(_SavedPart):
    name: str
    unit: str
    limit: float
    expected: float | None


class SavedPlan(_SavedPart):
    """The fields of a plan.json that are told beside those of a new plan."""

    verdict: Literal["holds", "at_risk", "nothing_meets"]
    probability: float = Field(ge=0, le=1)
    options: tuple[_SavedOption, ...] = ()
    usd_per_hour: tuple[float | None, float | None, float | None] | None = None
    limits: tuple[_SavedLimit, ...] = ()
    made: dict[str, Any] = Field(default_factory=dict)

    @property
    def facts(self) -> dict[str, str]:
        """What it answers, by name and in words."""
        chosen = {each.name: each.deployment for each in self.options}.get("recommended")
        usd = self.usd_per_hour[0] if self.usd_per_hour else None
        return {
            "Verdict": f"{PHRASES['verdicts'][self.verdict]}, {format_probability(self.probability)} likely",
            "Deployment": chosen or "none; the closest:",
            "Cost": "" if usd is None else f"{format_usd(usd * HOURS_PER_MONTH)}/month",
            **{
                each.name: f"{format_number(math.inf if each.expected is None else each.expected)} of"
                f" {format_number(each.limit)} {each.unit}"
                for each in self.limits
            },
        }


def read_saved_plan(path: Path) -> SavedPlan | None:
    """Read the plan.json at `path`; None for a scenario's own file."""
    if path.suffix != ".json":
        return None
    data = parse_json(read_text(path), path.name)
    return validate_entry(SavedPlan, data, f"{path.name} is not a plan.json of this planner")


def format_beside_saved(saved: SavedPlan, answer: Answer) -> str:
    """Format a table of what a saved plan answers, and of the new answer to its scenario."""
    then, now = saved.facts, SavedPlan.model_validate(serialize_answer(answer)).facts
    rows = [("", f"saved {saved.made.get('date', '')}", "now")]
    rows += [(name, then.get(name, ""), now.get(name, "")) for name in {**then, **now}]
    return format_columns([[escape_to_one_line(cell) for cell in row] for row in rows])


def write_plan_files(answer: Answer, out: Path, report: Path | None = None) -> tuple[str, ...]:
    """Write `plan.json`, the plan's files and a finished `report` to `out`, all of them or none.

    Files of an earlier plan that this one does not have are removed. Returns the names; raises
    `PlannerError` if `out` cannot be written.
    """
    paths = write_plan_folders({out: answer}, {out / "report.pdf": report} if report else {})
    return tuple(path.relative_to(out).as_posix() for path in paths)


def write_plan_folders(
    answers: Mapping[Path, Answer], finished: Mapping[Path, Path]
) -> tuple[Path, ...]:
    """Write each plan to its folder, and copies of `finished` files by place: all of them or none.

    Returns the paths of the plans' files.
    """
    texts = {
        out / name: text for out, answer in answers.items() for name, text in _render(answer, out)
    }
    paths = [*texts, *finished]
    check_not_overwriting(
        [file for answer in answers.values() for file in answer.scenario.files], paths
    )
    for folder in {path.parent for path in paths}:
        ensure_folder(folder)
    stale = set[Path]()

    def find_stale() -> set[Path]:
        for out in answers:
            kept = {SECRETS_FILE} if _has_secrets(out) else set()
            stale.update(out / name for name in _list_previous_files(out) - kept)
        stale.difference_update(paths)
        return stale

    with replace_atomically(*paths, find_stale=find_stale) as parts:
        for part, (path, text) in zip(parts, texts.items(), strict=False):
            part.write_text(text, encoding="utf-8")
            if path.name == SECRETS_FILE:
                part.chmod(0o600)
                with suppress(OSError):  # its new content would take over a wider mode
                    path.chmod(0o600)
        for part, path in zip(parts[len(texts) :], finished.values(), strict=True):
            shutil.copyfile(path, part)
    for folder in {path.parent for path in stale} - {path.parent for path in paths}:
        with suppress(OSError):  # the user has other files there
            folder.rmdir()
    return tuple(texts)


def _has_secrets(out: Path) -> bool:
    """Return whether the file of secrets in `out` sets variables."""
    if not (secrets := out / SECRETS_FILE).is_file():
        return False
    text = secrets.read_text(encoding="utf-8", errors="replace")  # also where a writer was killed
    return any(line.strip() and line[0] != "#" for line in text.splitlines())


def _render(answer: Answer, out: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file of a plan in `out`."""
    chosen, scenario, first = answer.chosen, answer.scenario, answer.measure_first
    limits = (scenario.slo_targets, scenario.storage)
    if chosen:
        texts = render_artifacts(
            chosen.prediction, *limits, scenario.output_kinds, answer.autoscaling
        )
        for name, text in texts.items():
            if name != SECRETS_FILE or not _has_secrets(out):
                yield name, text
    if first and answer.measure_files:
        texts = render_artifacts(first.prediction, *limits, BENCHMARK_ARTIFACTS)
        for name in answer.measure_files:
            yield name, texts[name.removeprefix(BENCHMARK_DIR)]
    yield "plan.json", json.dumps(serialize_plan_file(answer), indent=2, allow_nan=False) + "\n"


def check_plan_folder(scenario: Scenario, out: Path, *, force: bool) -> None:
    """Raise `PlannerError` if a plan in `out` would replace files of the user, unless by `force`.

    Those that the scenario reads are never replaced. `out` has to be a folder that can be made.
    """
    check_output_folder(out)
    paths = [out / name for name in (*ALL_ARTIFACT_FILES, "plan.json")]
    check_not_overwriting(scenario.files, paths)
    kept = {SECRETS_FILE, *_list_previous_files(out)}
    own = [path.name for path in paths if path.is_file() and path.name not in kept]
    if own and not force:
        raise PlannerError(
            f"{out} has {', '.join(own[:5])}, which no plan wrote: --force replaces them, or name"
            " another folder"
        )


def _list_previous_files(out: Path) -> set[str]:
    """Return the files of the plan in `out`, by its `plan.json`; any others are the user's own."""
    names = {"plan.json", *ALL_ARTIFACT_FILES}
    names |= {BENCHMARK_DIR + name for name in ALL_ARTIFACT_FILES}
    if half := list_unfinished(out):  # what its killed writer replaced or removed, or would have
        measured = list_unfinished(out / BENCHMARK_DIR)
        return names & {*half, *(BENCHMARK_DIR + name for name in measured)}
    try:
        return names & {
            "plan.json", *parse_json(read_text(out / "plan.json"), "plan.json")["files"]
        }  # fmt: skip
    except (PlannerError, LookupError, TypeError):
        return set()
