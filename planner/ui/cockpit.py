"""The cockpit: controls of a scenario beside its plan.

The plan is an analytical estimate at first, and simulated soon after. Everything on the screen
depends only on one immutable `Scenario`; see `render_figures`.
"""

import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets as ui

from planner.analysis.plan_comparison import MAX_COMPARED_PLANS, build_plan_comparison
from planner.core.errors import PlannerError
from planner.engines.engine import list_engines
from planner.engines.engine_args import LORA_RANKS
from planner.hardware.gpus import list_gpus
from planner.models.registry import list_model_names
from planner.planning.scenario import Scenario, list_scenarios, parse_scenario
from planner.planning.search import Plan, search_analytically
from planner.ui import scenario_form
from planner.ui.notebook_files import list_chapter_notebooks
from planner.ui.notebook_session import (
    CURRENT_SCENARIO_FILE,
    DEFAULT_SCENARIO,
    save_changes,
    search_cached,
)
from planner.ui.notebook_widgets import (
    MultiSelect,
    escape_html,
    format_value,
    show_note,
    show_table,
)
from planner.ui.pdf_report import write_report
from planner.ui.plan_panel import render_badge, render_figures
from planner.ui.scenario_form import METRIC_CHOICES, STATISTIC_CHOICES
from planner.workload.daily_profile import load_daily_profiles

_CONTROL_STYLE: dict[str, Any] = {
    "style": {"description_width": "104px"},
    "layout": {"width": "98%"},
}
_FLEX_ROW = ui.Layout(flex_flow="row wrap", grid_gap="0 24px", width="100%")
_STYLE_SHEET = """<style>
.headroom h4 {margin: .7em 0 .2em; border-bottom: 1px solid #8a8f9866; font-size: 1em}
.headroom table {border-collapse: collapse; font-size: .95em}
.headroom.headroom.headroom :focus-visible {outline: 2px solid #3b7dd8 !important; outline-offset: 1px}
.headroom p {line-height: 1.4; margin: .5em 0}
.headroom svg {max-width: 100%; height: auto}
</style>"""
_COLUMN_FLEX = {"left": "0 0 330px", "right": "1 1 330px"}
"""Controls and plan are side by side on pages wider than 680 px; charts shrink to fit."""
_HARDWARE_CONTROLS = ("gpus", "at_most", "engine", "engine_version")
_TRAFFIC_CONTROLS = (
    "load",
    "rate",
    "concurrency",
    "requests",
    "within_hours",
    "trace",
    "preset",
    "prompt",
    "output",
    "reuse",
)
_LORA_CONTROLS = ("rank", "zipf")
PANEL_NAMES = ("badge", "said", "answer", "day", "compared", "memory", "latency", "cost", "why")
FIGURE_NAMES = ("answer", "day", "memory", "latency", "cost", "why")
DEBOUNCE_S = 0.25
"""Seconds without another change after which the simulation starts."""


def search_and_render(scenario: Scenario) -> tuple[Plan, dict[str, str]]:
    """Return the simulated plan and its HTML, in a process of its own."""
    plan = search_cached(scenario)
    return plan, render_figures(plan)


def _build_controls() -> dict[str, ui.Widget]:
    """Return the controls by name."""
    late: dict[str, Any] = {**_CONTROL_STYLE, "continuous_update": False}
    presets = [
        ("lengths of your own", ""),
        *((f"{name}: {p.about}", name) for name, p in scenario_form.load_presets().items()),
    ]
    small: dict[str, Any] = {"continuous_update": False, "layout": {"width": "4.4em"}}
    return {
        "model": ui.Combobox(
            options=list_model_names(),
            placeholder="a part of its name, or any Hub id",
            description="model",
            **late,
        ),
        "config": ui.Textarea(placeholder='{"architectures": ...}', rows=6, **late),
        "gpus": MultiSelect(
            [gpu.name for gpu in list_gpus()], "GPUs", "add one: type a part of its name"
        ),
        "at_most": ui.BoundedIntText(min=1, max=16384, description="at most", **late),
        "engine": ui.Dropdown(options=list(list_engines()), description="engine", **_CONTROL_STYLE),
        "engine_version": ui.Combobox(description="version", **late),
        "quantization": MultiSelect(
            scenario_form.FORMAT_CHOICES, "weights", "add a format that you accept"
        ),
        "kv_cache_dtype": MultiSelect(
            scenario_form.KV_CACHE_CHOICES, "KV cache", "add a format that you accept"
        ),
        "load": ui.Dropdown(
            options=list(scenario_form.LOAD_CHOICES.items()), description="load", **_CONTROL_STYLE
        ),
        "rate": _build_log_slider(-2, 3, "requests/s"),
        "concurrency": _build_log_slider(0, 4, "users"),
        "requests": ui.BoundedIntText(min=1, max=10**9, description="requests", **late),
        "within_hours": ui.BoundedFloatText(min=0.01, max=1e4, description="within hours", **late),
        "trace": ui.Text(placeholder="a file: CSV or JSON lines", description="or a trace", **late),
        "preset": ui.Dropdown(options=presets, description="kind of work", **_CONTROL_STYLE),
        "prompt": _build_log_slider(1, 5, "prompt tokens"),
        "output": _build_log_slider(1, 5, "output tokens"),
        "reuse": ui.SelectionSlider(
            options=_label_steps(range(0, 96)), description="cached, %", **_CONTROL_STYLE
        ),
        "day": ui.Combobox(
            options=tuple(load_daily_profiles()),
            placeholder="a profile, a trace's file, 24 figures",
            description="a day",
            **late,
        ),
        "adapters": ui.BoundedIntText(min=0, max=10_000, description="LoRA adapters", **late),
        "rank": ui.Dropdown(options=LORA_RANKS, description="largest rank", **_CONTROL_STYLE),
        "zipf": ui.BoundedFloatText(min=0, max=10, step=0.1, description="skew (Zipf)", **late),
        "headroom": ui.SelectionSlider(
            options=_label_steps(range(0, 61)), description="headroom, %", **_CONTROL_STYLE
        ),
        **{
            f"{metric} {percentile}": ui.Text(tooltip=f"{percentile} {metric.upper()}, ms", **small)
            for metric in METRIC_CHOICES
            for percentile in STATISTIC_CHOICES
        },
    }


# fmt: off
E24_STEPS = (10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30,
             33, 36, 39, 43, 47, 51, 56, 62, 68, 75, 82, 91)
# fmt: on
"""Steps of a decade (IEC 60063)."""


def _build_log_slider(low: int, high: int, label: str) -> ui.Widget:
    """Return a slider from 10^low to 10^high, to which other values are added as steps."""
    values = [
        float(f"{step * 10.0 ** (decade - 1):.6g}")
        for decade in range(low, high)
        for step in E24_STEPS
    ]
    return ui.SelectionSlider(
        options=_label_steps([*values, 10.0**high]), description=label, **_CONTROL_STYLE
    )


def _label_steps(values: Iterable[float]) -> list[tuple[str, float]]:
    """Return the sorted steps of a slider with their labels."""
    return [(format_value(value), float(value)) for value in sorted(set(values))]


def _set_control(control: ui.Widget, value: Any) -> None:
    """Set a control to exactly `value`."""
    if isinstance(control, ui.SelectionSlider):
        known = [step for _, step in control.options]
        if value not in known:
            control.options = _label_steps([*known, value])
    control.value = value


def _fold_controls(title: str, *inside: ui.Widget) -> ui.Widget:
    """Return rarely used controls behind a button."""
    box = ui.VBox(inside, layout={"display": "none"})
    # an Accordion cannot be reached with the Tab key
    head = ui.ToggleButton(
        description=title, tooltip=title, icon="caret-down", layout={"width": "98%"}
    )
    head.observe(
        lambda change: setattr(box.layout, "display", None if change["new"] else "none"),
        names="value",
    )
    return ui.VBox([head, box])


class Cockpit(ui.VBox):
    """Controls beside the plan; `plan` is that of `scenario` and shown."""

    scenario: Scenario
    plan: Plan | None

    def __init__(self, start: str = "", replays: Executor | None = None) -> None:
        super().__init__()
        self._replays = replays or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._lock, self._searching = threading.RLock(), threading.Lock()
        self._timer: threading.Timer | None = None
        self._asked: Scenario | None = None
        self._quiet, self._pinned, self._waiting = False, list[Scenario](), Counter[str]()
        self.controls = _build_controls()
        self.places = {name: ui.HTML() for name in PANEL_NAMES}
        for name, control in self.controls.items():
            control.observe(partial(self._handle_change, name), names="value")
        self._progress = ui.IntProgress(0, 0, 1, layout=ui.Layout(display="none", width="98%"))
        first = start or ("current.yaml" if CURRENT_SCENARIO_FILE.is_file() else DEFAULT_SCENARIO)
        files = sorted(str(path) for path in Path().glob("*.yaml") if path.name != "changes.yaml")
        known = list(dict.fromkeys([first, *files, *list_scenarios()]))
        self._from = ui.Dropdown(
            options=known, value=first, **_CONTROL_STYLE, description="start from"
        )
        self._from.observe(lambda change: self.load_scenario(change["new"]), names="value")
        self._name = ui.Text("my-question", description="name", **_CONTROL_STYLE)
        self.load_scenario(first)
        badge, html, *rest = self.places.values()
        shown = ui.VBox(
            [badge, html, self._progress, *rest],
            layout=ui.Layout(flex=_COLUMN_FLEX["right"], min_width="0"),
        )
        self.children = (
            ui.HTML(_STYLE_SHEET),
            ui.Box([self._arrange_controls(), shown], layout=_FLEX_ROW),
        )
        self.add_class("headroom")

    def _arrange_controls(self) -> ui.Widget:
        """Return the controls in groups, in the order of the Tab key."""
        c = self.controls
        promises = ui.GridBox(
            [ui.Label(""), *(ui.Label(p) for p in STATISTIC_CHOICES)]
            + [
                widget
                for m in METRIC_CHOICES
                for widget in (ui.Label(m.upper()), *(c[f"{m} {p}"] for p in STATISTIC_CHOICES))
            ],
            layout=ui.Layout(grid_template_columns="3.2em repeat(4, 4.6em)"),
        )
        rare = _fold_controls(
            "weight and KV-cache formats",
            ui.Label("weights: type to add"),
            c["quantization"],
            ui.Label("KV cache: type to add"),
            c["kv_cache_dtype"],
        )
        also = _fold_controls(
            "a day, LoRA adapters", *(c[name] for name in ("day", "adapters", *_LORA_CONTROLS))
        )
        groups = [
            (
                "What",
                [self._from, c["model"], _fold_controls("or paste a config.json", c["config"])],
            ),
            ("On what", [*(c[name] for name in _HARDWARE_CONTROLS), rare]),
            ("Traffic", [*(c[name] for name in _TRAFFIC_CONTROLS), also]),
            ("Promises (ms; empty: none)", [promises, c["headroom"]]),
            ("Then", [self._name, *self._build_buttons()]),
        ]
        parts = [
            widget
            for title, widgets in groups
            for widget in (ui.HTML(f"<h4>{escape_html(title)}</h4>"), *widgets)
        ]
        return ui.VBox(parts, layout=ui.Layout(flex=_COLUMN_FLEX["left"]))

    def _build_buttons(self) -> list[ui.Widget]:
        actions = {
            "Save as scenario": self.save,
            "Make the report": self.make_report,
            "Open the walk": self.open_walk,
            "Compare: hold this beside the next": self.pin,
            "Stop comparing": self.unpin,
        }
        buttons = []
        for label, action in actions.items():
            button = ui.Button(description=label, layout=ui.Layout(width="98%"))
            button.on_click(lambda _, action=action: self._run_guarded(action))
            buttons.append(button)
        return buttons

    def load_scenario(self, name: str) -> None:
        """Load a shipped scenario, or a file."""
        self._run_guarded(
            lambda: self._update_scenario(
                scenario_form.read_scenario_fields(name), Path(name).stem
            ),
            asking=True,
        )

    def _handle_change(self, name: str, change: dict[str, Any]) -> None:
        """Apply the new value of a control."""
        self._waiting[name] += 1
        with self._lock:  # JupyterLab may handle messages in parallel
            self._waiting[name] -= 1
            if self._quiet or self._waiting[name] or change["new"] == change["old"]:
                return

            def apply_change() -> None:
                field, value = (
                    ("model", scenario_form.store_pasted_config(change["new"]))
                    if name == "config"
                    else (name, change["new"])
                )
                values = scenario_form.read_control_values(self.fields, self.scenario)
                fields = scenario_form.apply_control(self.fields, field, value, values)
                self._update_scenario(fields, self.scenario.name)

            self._run_guarded(apply_change, asking=True)

    def _update_scenario(self, fields: scenario_form.ScenarioFields, name: str) -> None:
        """Set the fields of the scenario, and show its analytical plan."""
        scenario = parse_scenario(fields, name)
        with self._lock:
            self._asked = scenario
            if self._timer:
                self._timer.cancel()
            # the simulation runs on another core meanwhile
            self._timer = threading.Timer(DEBOUNCE_S, self._simulate_scenario, [scenario])
            self._timer.daemon = True
            self._timer.start()
            plan = search_analytically(scenario)
            shown = render_figures(plan)
            self.fields, self.scenario, self.plan = fields, scenario, plan
            self._sync_controls()
            self._show_plan(plan, shown, busy=True)

    def _simulate_scenario(self, scenario: Scenario) -> None:
        """Search with simulations, and show the plan if the scenario is still the same."""
        with self._searching:
            if scenario is not self._asked:
                return
            try:
                try:
                    plan, shown = self._replays.submit(search_and_render, scenario).result()
                except (BrokenExecutor, AttributeError, OSError):
                    # no process can be started here, or it was killed
                    self._replays = ThreadPoolExecutor(1)
                    plan, shown = self._replays.submit(search_and_render, scenario).result()
            except Exception as error:  # otherwise the screen would wait forever
                plan, shown = None, {"answer": show_note(f"The replay failed: {error}").html}
        with self._lock:
            if scenario is self.scenario:
                self.plan = plan
                self._show_plan(plan, shown)

    def stop(self) -> None:
        """Stop simulating."""
        if self._timer:
            self._timer.cancel()
        self._replays.shutdown(wait=False, cancel_futures=True)

    def wait_for_simulation(self) -> None:
        """Wait until the shown plan is simulated."""
        if self._timer:
            self._timer.join()

    def _show_plan(self, plan: Plan | None, shown: dict[str, str], busy: bool = False) -> None:
        self.places["badge"].value = render_badge(plan, busy) if plan else ""
        for name in FIGURE_NAMES:
            self.places[name].value = shown.get(name, "")
        comparison = ""
        if self._pinned and busy:
            comparison = show_note("Held beside this one as soon as it is replayed.").html
        elif self._pinned and plan:
            comparison = show_table(
                build_plan_comparison([*map(search_cached, self._pinned), plan]),
                "Questions side by side; in brackets: against the first.",
            ).html
        self.places["compared"].value = comparison

    def _sync_controls(self) -> None:
        """Set every control to the scenario's value, and hide those that do not apply."""
        values = scenario_form.read_control_values(self.fields, self.scenario)
        self._quiet = True
        try:
            for name, control in self.controls.items():
                if name == "engine_version":
                    control.options = list_engines()[self.scenario.engine.name]
                if self._waiting[name]:  # it has changed again
                    continue
                if name in values or " " in name or name in ("preset", "config"):
                    _set_control(control, values.get(name, ""))
            for name in ("rate", "concurrency", "requests", "within_hours", "trace"):
                kind = "requests" if name == "within_hours" else name
                self.controls[name].layout.display = (
                    None if values["load"] in (kind, "") or name == "trace" else "none"
                )
            for name, applies in (
                ("day", values["load"] in ("rate", "trace")),
                *((n, values["adapters"]) for n in _LORA_CONTROLS),
            ):
                self.controls[name].layout.display = None if applies else "none"
        finally:
            self._quiet = False

    def _run_guarded(self, action: Callable[[], None], asking: bool = False) -> None:
        """Run `action` and show its error.

        If it was to change the scenario (`asking`), the figures of the old one are cleared.
        """
        self.places["said"].value = ""
        try:
            action()
        except PlannerError as error:
            self.places["said"].value = show_note(str(error)).html
            if asking:
                with self._lock:
                    self._show_plan(None, {})

    def save(self) -> None:
        """Write the scenario to a file of its name, and to the one that chapters open."""
        path = scenario_form.save_scenario(
            self.fields, scenario_form.get_scenario_file(self._name.value)
        )
        self.open_walk()
        self.places[
            "said"
        ].value = f"<p>Saved as {escape_html(path)}.</p>{self.places['said'].value}"

    def open_walk(self) -> None:
        """Write the scenario to the file that chapters open."""
        scenario_form.save_scenario(self.fields, CURRENT_SCENARIO_FILE)
        save_changes({})
        links = " ".join(
            f'<a href="{path.name}">{path.stem}</a>' for path in list_chapter_notebooks()
        )
        self.places["said"].value = f"<p>Every chapter opens with this question now: {links}</p>"

    def make_report(self) -> None:
        """Write the PDF in the background, and show the progress."""
        path = scenario_form.save_scenario(
            self.fields, scenario_form.get_scenario_file(self._name.value)
        )
        threading.Thread(target=self._write_report, args=[path], daemon=True).start()

    def _write_report(self, path: Path) -> None:
        html, steps = self.places["said"], iter(range(1, 1000))
        self._progress.max, self._progress.value = len(list_chapter_notebooks()) + 2, 1
        self._progress.layout.display = None

        def show_progress(line: str) -> None:
            self._progress.value = next(steps)
            html.value = f"<p>Report: {escape_html(line.splitlines()[-1])}</p>"

        try:
            html.value = "<p>Report: searching</p>"
            report = write_report(path, Path("reports") / path.stem, progress=show_progress)
            where = Path("reports") / path.stem / report.name
            html.value = (
                f'<p>Report: <a href="../../files/{where}"'
                f' target="_blank">{escape_html(where)}</a></p>'
            )
        except PlannerError as error:
            html.value = show_note(str(error)).html
        finally:
            self._progress.layout.display = "none"

    def pin(self) -> None:
        """Compare the plan with those that follow."""
        if len(self._pinned) + 1 >= MAX_COMPARED_PLANS:
            raise PlannerError(f"{MAX_COMPARED_PLANS} questions are compared at most")
        self._pinned.append(self.scenario)
        self.places["compared"].value = show_note(
            "Now change something: the answers are held side by side."
        ).html

    def unpin(self) -> None:
        """Stop comparing."""
        self._pinned.clear()
        self.places["compared"].value = ""

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        html = "".join(self.places[name].value for name in ("badge", *FIGURE_NAMES))
        return {**super()._repr_mimebundle_(**kwargs), "text/html": html}
