"""The cockpit: the question beside its answer, as one widget.

The page (`web/cockpit.js`) draws what the traits hold and sends what the reader changes. The answer
is an analytical estimate at first, and simulated soon after; other GPUs and changes follow.
Everything on the screen depends only on one immutable `Scenario`; see `plan_panel.build_page`.
"""

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from planner.answers import Answer, build_answer, words
from planner.answers.answer import PHRASES, sweep_costs, sweep_latency
from planner.core.errors import PlannerError
from planner.core.progress import watch_progress
from planner.engines.engine import list_engines
from planner.engines.engine_args import LORA_RANKS
from planner.hardware.gpus import get_gpu, list_gpus
from planner.hardware.prices import list_sellers
from planner.models.registry import list_model_names
from planner.planning.plan import Plan
from planner.planning.scenario import (
    CandidateGpu,
    Scenario,
    list_scenarios,
    load_scenario,
    parse_scenario,
)
from planner.planning.search import search_analytically
from planner.planning.what_if import FALLBACK_MAX_GPUS, SUGGESTED_GPUS, propose_changes
from planner.ui import scenario_form
from planner.ui.notebook_files import list_chapter_notebooks
from planner.ui.notebook_session import (
    CURRENT_SCENARIO_FILE,
    DEFAULT_SCENARIO,
    save_changes,
    search_cached,
)
from planner.ui.pdf_report import write_report
from planner.ui.plan_panel import (
    Page,
    build_other_row,
    build_page,
    draw_charts,
    find_curve_target,
)
from planner.ui.progress_line import draw_steps
from planner.workload.daily_profile import load_daily_profiles

WEB_FOLDER = Path(__file__).with_name("web")
DEBOUNCE_S = 0.25
"""Seconds without another change after which the simulation starts."""
MAX_UNDO_STEPS = 50
COMPUTING: Page = {
    "state": "computing",
    "tone": "calm",
    "word": "Computing",
    "meta": "",
    "say": [],
}
NO_ANSWER: Page = {"state": "failed", "tone": "bad", "word": "No answer", "say": []}
NUMBERS = (
    "rate", "concurrency", "requests", "within_hours", "prompt", "output", "reuse", "headroom",
    "confidence", "at_most", "adapters", "zipf", "own_price", "budget", "spare_replicas",
)  # fmt: skip
"""Controls that take a number, as people type it; none where it may be left out."""
CONTROLS_OF_CHANGES = (
    "rate",
    "concurrency",
    "quantization",
    "kv_cache_dtype",
    "speculation",
    "at_most",
    "gpus",
)
"""Controls that a what-if may set, beside the targets."""


class Cockpit(anywidget.AnyWidget):
    """The question beside its answer; `plan` is that of `scenario` and shown."""

    _esm = WEB_FOLDER / "cockpit.js"
    _css = WEB_FOLDER / "cockpit.css"
    choices = traitlets.Dict().tag(sync=True)
    controls = traitlets.Dict().tag(sync=True)
    answer = traitlets.Dict().tag(sync=True)
    charts = traitlets.Dict().tag(sync=True)
    others = traitlets.Dict().tag(sync=True)
    message = traitlets.Dict().tag(sync=True)
    handled = traitlets.Int().tag(sync=True)
    """The last message of the page that has been handled."""
    view = traitlets.Dict({"width": 480, "target": ""}).tag(sync=True)
    """What the page says: the width of a chart (px), and the target whose chart is shown."""

    scenario: Scenario
    plan: Plan | None = None
    _told: Answer | None = None

    def __init__(self, start: str = "", searches: Executor | None = None) -> None:
        # two: a search that nobody waits for any more delays no other
        self._searches = searches or ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
        self._lock, self._searching = threading.RLock(), threading.Lock()
        self._timer: threading.Timer | None = None
        self._asked: Scenario | None = None
        self._past: list[Scenario] = []
        first = start or (
            CURRENT_SCENARIO_FILE.name if CURRENT_SCENARIO_FILE.is_file() else DEFAULT_SCENARIO
        )
        files = sorted(str(path) for path in Path().glob("*.yaml") if path.name != "changes.yaml")
        super().__init__(
            answer=COMPUTING,
            choices={
                "scenarios": list(dict.fromkeys([first, *files, *list_scenarios()])),
                "models": list(list_model_names()),
                "gpus": [gpu.name for gpu in list_gpus()],
                "offered_gpus": list(SUGGESTED_GPUS),
                "engines": {name: list(versions) for name, versions in list_engines().items()},
                "formats": list(scenario_form.FORMAT_CHOICES),
                "kv_formats": list(scenario_form.KV_CACHE_CHOICES),
                "metrics": PHRASES["metrics"],
                "statistics": list(scenario_form.STATISTIC_CHOICES),
                "days": list(load_daily_profiles()),
                "ranks": list(LORA_RANKS),
            },
        )
        self.on_msg(self._handle_message)
        self.observe(self._redraw, names="view")
        # the page shows the controls while the first estimate is computed
        self._first = threading.Thread(target=self._open_first, args=[first], daemon=True)
        self._first.start()

    def _open_first(self, name: str) -> None:
        """Load the first scenario; whatever fails is shown, as the page would wait forever."""
        try:
            self.load_scenario(name)
        except Exception as error:
            self.answer = {**NO_ANSWER, "failure": str(error)[:300]}

    def _handle_message(
        self, _widget: object, content: Mapping[str, Any], _buffers: object
    ) -> None:
        """Do what the page asks for."""
        actions: dict[str, Callable[[], None]] = {
            "set": lambda: self.set_controls(content["changes"]),
            "load": lambda: self.load_scenario(content["name"]),
            "undo": self.undo,
            "save": lambda: self._run_guarded(
                "save", lambda: self.save(content["name"], content.get("title", ""))
            ),
            "report": lambda: self._run_guarded("save", lambda: self.make_report(content["name"])),
            # the same question again, after a simulation that failed
            "retry": lambda: self._run_guarded("start", lambda: self._ask(self.scenario)),
        }
        try:
            actions[content["do"]]()
        finally:
            self.handled = int(content.get("ticket", 0))

    def load_scenario(self, name: str) -> None:
        """Load a shipped scenario, or a file."""

        def load() -> None:
            scenario = load_scenario(name)
            if self._asked is None:  # the question can be read before there is an estimate
                self.scenario = scenario
                self._show_controls()
            self._ask(scenario)

        self._run_guarded("start", load)

    def set_controls(self, changes: Mapping[str, Any]) -> None:
        """Set controls to new values, by name, and ask the question that they make."""
        first = next(iter(changes))

        def apply_changes() -> None:
            scenario = self.scenario
            for name, value in changes.items():
                scenario = self._apply_change(scenario, name, value)
            self._past = [*self._past[-MAX_UNDO_STEPS:], self.scenario]
            self._ask(scenario)

        self._run_guarded(first, apply_changes)

    def _apply_change(self, scenario: Scenario, name: str, value: Any) -> Scenario:
        """Return the scenario with one control set."""
        if name in NUMBERS:
            units, told = scenario_form.COUNT_UNITS, name.replace("_", " ")
            number = scenario_form.parse_quantity(value, units, told) if value != "" else 0.0
            value = int(number) if number.is_integer() else number
        fields, values = {**scenario.fields, "question": ""}, self._read_values(scenario)
        changed = scenario_form.apply_control(fields, name, value, values)
        return parse_scenario(changed, scenario.name)

    def _read_values(self, scenario: Scenario) -> dict[str, Any]:
        """Return the values of all controls, those that only the page has included."""
        values = scenario_form.read_control_values(scenario)
        kind, found = scenario.open_figure, self.plan.scenario if self.plan else None
        if kind in ("rate", "concurrency") and found and found.found_figure == kind:
            values[kind] = getattr(found.workload, kind)
        return values

    def undo(self) -> None:
        """Return to the question before the last change."""
        if self._past:
            scenario = self._past.pop()
            self._run_guarded("start", lambda: self._ask(scenario))

    def _ask(self, scenario: Scenario) -> None:
        """Show the scenario's controls and its estimate, and start the simulation."""
        with self._lock:
            if self._timer:
                self._timer.cancel()
            asked = replace(scenario)  # told apart from the same question before
            # a figure to find takes many estimates: only its simulation is shown
            plan = None if scenario.open_figure else search_analytically(scenario)
            shown = COMPUTING if plan is None else self._build_page(plan)
            self._asked = asked
            self.scenario, self.plan = scenario, plan
            with self.hold_sync():
                self._show_controls()
                self._show_plan(shown)
                self.others = {}
            # the simulation runs on another core meanwhile
            self._timer = threading.Timer(DEBOUNCE_S, self._simulate_scenario, [asked])
            self._timer.daemon = True
            self._timer.start()

    def _build_page(self, plan: Plan) -> Page:
        """Build what is shown of a plan, and keep its answer for the charts and for comparisons."""
        self._told = build_answer(plan)
        return build_page(self._told)

    def _show_controls(self) -> None:
        values = self._read_values(self.scenario)
        gpus = [get_gpu(name) for name in values["gpus"]]
        sellers = [set(list_sellers(gpu, values["tier"])) for gpu in gpus]
        self.controls = {
            **values,
            "sellers": sorted(set.intersection(*sellers) if sellers else (), key=str.casefold),
            "targets": [f"{t.metric} {t.percentile}" for t in self.scenario.slo_targets],
            "name": self.scenario.name,
            "can_speculate": self.scenario.speculation is not None,
            "can_undo": bool(self._past),
        }

    def _show_plan(self, shown: Page) -> None:
        self.answer = shown
        self._redraw()

    def _redraw(self, _change: object = None) -> None:
        """Draw the charts for the page's width and target."""
        with self._lock:
            if self.plan is None or self._told is None:
                return
            limit = find_curve_target(self._told, str(self.view["target"]))
            latency = sweep_latency(self.plan, limit.target) if limit and limit.target else None
            costs = (
                sweep_costs(self.plan) if limit and self.answer.get("state") == "final" else None
            )
            self.charts = draw_charts(self._told, latency, costs, int(str(self.view["width"])))

    def _simulate_scenario(self, asked: Scenario) -> None:
        """Search with simulations, and show the plan if the scenario is still the same."""
        with self._searching:
            if asked is not self._asked:
                return
            try:
                plan = self._search(asked)
            except Exception as error:  # otherwise the screen would wait forever
                with self._lock:
                    if asked is self._asked:
                        failure = f"The simulation failed: {error}"[:300]
                        self.answer = {**self.answer, "state": "failed", "failure": failure}
                return
        with self._lock:
            if asked is not self._asked:
                return
            self.plan = plan
            with self.hold_sync():
                if plan.scenario.found_figure:
                    self._show_controls()
                wrong = {name: v for name, v in self.answer.items() if name == "error"}
                self._show_plan({**self._build_page(plan), **wrong})
        if not plan.scenario.found_figure:
            self._search_others(asked, plan)

    def _search(self, scenario: Scenario) -> Plan:
        """Return the simulated plan, from a process of its own if there can be one."""
        try:
            return self._searches.submit(search_cached, scenario).result()
        except (BrokenExecutor, AttributeError, OSError):
            # no process can be started here, or it was killed
            self._searches = ThreadPoolExecutor(1)
            return self._searches.submit(search_cached, scenario).result()

    def _search_others(self, asked: Scenario, plan: Plan) -> None:
        """Search other GPUs and changes one by one, and show each until another question comes."""
        rows: dict[str, list[Page]] = {"gpus": [], "changes": []}
        answer = build_answer(plan)
        for kind, label, changes, scenario in self._list_others(plan):
            if asked is not self._asked:
                return
            other = None
            with suppress(
                PlannerError, RuntimeError
            ):  # such as a format that the model cannot take
                other = self._search(scenario)
            found = build_answer(other) if other else None
            row = build_other_row(answer, found, label, changes)
            if kind == "gpus" or (other and other.chosen):
                rows[kind].append(row)
            names_format = answer.verdict == "at_risk" and label.endswith("allowed")
            if found and found.best and names_format and found.verdict == "holds":
                line = f"With {label}: {words.format_odds(found.best)} likely."
                self.answer = {**self.answer, "say": [*self.answer["say"], line]}
            with self._lock:
                if asked is not self._asked:
                    return
                self.others = {
                    name: sorted(each, key=lambda row: row["order"]) for name, each in rows.items()
                }
        with self._lock:
            if asked is self._asked:
                self.others = {**self.others, "done": True}

    def _list_others(self, plan: Plan) -> Iterator[tuple[str, str, dict[str, Any], Scenario]]:
        """Yield kind, label, changed controls and scenario of what else is searched."""
        scenario = plan.scenario
        named = [option.gpu.name for option in scenario.gpus]
        most = max(option.max_gpus for option in scenario.gpus)
        more = {} if plan.chosen else {"at_most": max(FALLBACK_MAX_GPUS, most)}
        for change, changed in propose_changes(plan):
            if [option.gpu.name for option in changed.gpus] == named:
                yield "changes", change, self._list_changes(scenario, changed), changed
        for name in SUGGESTED_GPUS:
            if name not in named:
                gpu = CandidateGpu(get_gpu(name), more.get("at_most", most))
                yield "gpus", name, {"gpus": [name], **more}, replace(scenario, gpus=(gpu,))

    def _list_changes(self, before: Scenario, after: Scenario) -> dict[str, Any]:
        """Return the controls whose values differ between two scenarios; smaller stocks do not count."""
        old, new = (scenario_form.read_control_values(s) for s in (before, after))
        names = [*CONTROLS_OF_CHANGES, *(name for name in new if " " in name)]
        return {
            name: new[name]
            for name in names
            if old.get(name) != new.get(name) and (name != "at_most" or new[name] > old[name])
        }

    def close(self) -> None:
        """Stop simulating, and remove the widget from the page."""
        self._asked = None
        if self._timer:
            self._timer.cancel()
        self._searches.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _run_guarded(self, field: str, action: Callable[[], None]) -> None:
        """Run `action`; its error is shown beside `field`, and the last answer stays."""
        with self._lock:  # JupyterLab may handle messages in parallel
            try:
                action()
            except PlannerError as error:
                wrong = {"field": field, "text": str(error), "stale": field != "save"}
                shown = self.answer if self._asked else {**NO_ANSWER, "failure": str(error)}
                self.answer = {**shown, "error": wrong}
                return
            if "error" in self.answer:
                self.answer = {name: v for name, v in self.answer.items() if name != "error"}

    def save(self, name: str, title: str = "") -> None:
        """Write the question to a file of this name, and to the one that chapters open.

        `title` is its own title; without one it keeps that on the screen.
        """
        fields = {**self.scenario.fields, "question": title.strip() or self.scenario.question}
        path = scenario_form.save_scenario(fields, name)
        scenario_form.save_scenario(fields, CURRENT_SCENARIO_FILE.stem)
        save_changes({})
        self.message = {
            "text": f"Saved as {path}. Every chapter opens with this question:",
            "links": [[chapter.name, chapter.stem] for chapter in list_chapter_notebooks()],
        }

    def make_report(self, name: str) -> None:
        """Write the PDF in the background, and show the progress."""
        path = scenario_form.save_scenario(self.scenario.fields, name)
        threading.Thread(target=self._write_report, args=[path], daemon=True).start()

    def _write_report(self, path: Path) -> None:

        def show(text: str) -> None:
            self.message = {"text": f"Report: {text}"}

        try:
            with watch_progress(draw=lambda steps: draw_steps(steps, show)):
                report = write_report(path, Path("reports") / path.stem, show_answer=str)
            where = Path("reports") / path.stem / report.name
            self.message = {"text": "Report:", "files": [[f"../../files/{where}", str(where)]]}
        except PlannerError as error:
            self.message = {"text": f"Report: {error}"}

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Show the answer in words where no widget can be shown."""
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        answer = self.answer
        words = [answer["word"], answer.get("head", ""), answer.get("month", ""), *answer["say"]]
        html = f"<p>{escape('. '.join(filter(None, words)))}</p>"
        return {**data, "text/html": html, "text/plain": "Cockpit()"}, metadata
