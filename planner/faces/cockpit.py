"""The cockpit: a question in controls, answered at once in closed form and soon after by the replay.

What is asked is one immutable `Scenario`; everything on the screen is worked out of it alone (`figures`).
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

from planner.core.quantities import PlannerError
from planner.faces import question
from planner.faces.chapter import DEFAULT, QUESTION, change, kept_plan
from planner.faces.glance import badge, figures
from planner.faces.question import METRICS, PERCENTILES
from planner.faces.report import report, walk
from planner.faces.widgets import Several, escape, note, table, text
from planner.facts.days import profiles
from planner.facts.engines import LORA_RANKS, engines
from planner.facts.gpus import gpus
from planner.models.registry import names
from planner.planning.scenario import Scenario, scenario, scenarios
from planner.planning.search import Plan, ranked
from planner.studies.comparison import MOST, comparison

_LINE: dict[str, Any] = {"style": {"description_width": "104px"}, "layout": {"width": "98%"}}
_ROW = ui.Layout(flex_flow="row wrap", grid_gap="0 24px", width="100%")
_STYLE = """<style>
.headroom h4 {margin: .7em 0 .2em; border-bottom: 1px solid #8a8f9866; font-size: 1em}
.headroom table {border-collapse: collapse; font-size: .95em}
.headroom.headroom.headroom :focus-visible {outline: 2px solid #3b7dd8 !important; outline-offset: 1px}
.headroom p {line-height: 1.4; margin: .5em 0}
.headroom svg {max-width: 100%; height: auto}
</style>"""
_BESIDE = {"left": "0 0 330px", "right": "1 1 330px"}
"""Controls and answer stand side by side from some 680 px of page on; charts shrink to that."""
_HARDWARE = ("gpus", "at_most", "engine", "engine_version")
_TRAFFIC = ("load", "rate", "concurrency", "requests", "within_hours", "trace", "preset", "prompt", "output", "reuse")
_LORA = ("rank", "zipf")
PLACES = ("badge", "said", "answer", "day", "compared", "memory", "latency", "cost", "why")
FIGURES = ("answer", "day", "memory", "latency", "cost", "why")
PAUSE = 0.25
"""Seconds without another change after which the replay begins."""


def replayed(asked: Scenario) -> tuple[Plan, dict[str, str]]:
    """The answer by replay and what is shown of it; in a process of its own, so that controls stay quick."""
    plan = kept_plan(asked)
    return plan, figures(plan)


def _controls() -> dict[str, ui.Widget]:
    """A control for each part of a question, by its name."""
    late: dict[str, Any] = {**_LINE, "continuous_update": False}
    kinds = [("lengths of your own", ""), *((f"{name}: {p.about}", name) for name, p in question.presets().items())]
    small: dict[str, Any] = {"continuous_update": False, "layout": {"width": "4.4em"}}
    return {
        "model": ui.Combobox(
            options=names(), placeholder="a part of its name, or any Hub id", description="model", **late
        ),
        "config": ui.Textarea(placeholder='{"architectures": ...}', rows=6, **late),
        "gpus": Several([card.name for card in gpus()], "GPUs", "add one: type a part of its name"),
        "at_most": ui.BoundedIntText(min=1, max=16384, description="at most", **late),
        "engine": ui.Dropdown(options=list(engines()), description="engine", **_LINE),
        "engine_version": ui.Combobox(description="version", **late),
        "quantization": Several(question.FORMATS, "weights", "add a format that you accept"),
        "kv_cache_dtype": Several(question.CACHES, "KV cache", "add a format that you accept"),
        "load": ui.Dropdown(options=list(question.LOADS.items()), description="load", **_LINE),
        "rate": _steps(-2, 3, "requests/s"),
        "concurrency": _steps(0, 4, "users"),
        "requests": ui.BoundedIntText(min=1, max=10**9, description="requests", **late),
        "within_hours": ui.BoundedFloatText(min=0.01, max=1e4, description="within hours", **late),
        "trace": ui.Text(placeholder="a file: CSV or JSON lines", description="or a trace", **late),
        "preset": ui.Dropdown(options=kinds, description="kind of work", **_LINE),
        "prompt": _steps(1, 5, "prompt tokens"),
        "output": _steps(1, 5, "output tokens"),
        "reuse": ui.SelectionSlider(options=_labelled(range(0, 96)), description="cached, %", **_LINE),
        "day": ui.Combobox(
            options=tuple(profiles()), placeholder="a profile, a trace's file, 24 figures", description="a day", **late
        ),
        "adapters": ui.BoundedIntText(min=0, max=10_000, description="LoRA adapters", **late),
        "rank": ui.Dropdown(options=LORA_RANKS, description="largest rank", **_LINE),
        "zipf": ui.BoundedFloatText(min=0, max=10, step=0.1, description="skew (Zipf)", **late),
        "headroom": ui.SelectionSlider(options=_labelled(range(0, 61)), description="headroom, %", **_LINE),
        **{
            f"{metric} {percentile}": ui.Text(tooltip=f"{percentile} {metric.upper()}, ms", **small)
            for metric in METRICS
            for percentile in PERCENTILES
        },
    }


E24 = (10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30, 33, 36, 39, 43, 47, 51, 56, 62, 68, 75, 82, 91)
"""Steps of a decade (IEC 60063)."""


def _steps(low: int, high: int, label: str) -> ui.Widget:
    """A slider over decades from 10^low to 10^high; whatever else a question holds becomes a step of its own."""
    values = [float(f"{each * 10.0 ** (decade - 1):.6g}") for decade in range(low, high) for each in E24]
    return ui.SelectionSlider(options=_labelled([*values, 10.0**high]), description=label, **_LINE)


def _labelled(values: Iterable[float]) -> list[tuple[str, float]]:
    """Steps of a slider, each written as people read it."""
    return [(text(value), float(value)) for value in sorted(set(values))]


def _set(control: ui.Widget, value: Any) -> None:
    """Have a control show `value`, exactly."""
    if isinstance(control, ui.SelectionSlider):
        known = [step for _, step in control.options]
        if value not in known:
            control.options = _labelled([*known, value])
    control.value = value


def _folded(title: str, *inside: ui.Widget) -> ui.Widget:
    """Controls that are asked for less often."""
    box = ui.VBox(inside, layout={"display": "none"})
    # an Accordion takes no Tab
    head = ui.ToggleButton(description=title, tooltip=title, icon="caret-down", layout={"width": "98%"})
    head.observe(lambda moved: setattr(box.layout, "display", None if moved["new"] else "none"), names="value")
    return ui.VBox([head, box])


class Cockpit(ui.VBox):
    """Controls beside the answer; `scenario` is what is asked, `plan` what is shown of it."""

    scenario: Scenario
    plan: Plan | None

    def __init__(self, start: str = "", replays: Executor | None = None) -> None:
        super().__init__()
        self._replays = replays or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._lock, self._searching = threading.RLock(), threading.Lock()
        self._timer: threading.Timer | None = None
        self._asked: Scenario | None = None
        self._quiet, self._pinned, self._waiting = False, list[Scenario](), Counter[str]()
        self.controls = _controls()
        self.places = {name: ui.HTML() for name in PLACES}
        for name, control in self.controls.items():
            control.observe(partial(self._moved, name), names="value")
        self._progress = ui.IntProgress(0, 0, 1, layout=ui.Layout(display="none", width="98%"))
        first = start or ("current.yaml" if QUESTION.is_file() else DEFAULT)
        files = sorted(str(path) for path in Path().glob("*.yaml") if path.name != "changes.yaml")
        known = list(dict.fromkeys([first, *files, *scenarios()]))
        self._from = ui.Dropdown(options=known, value=first, **_LINE, description="start from")
        self._from.observe(lambda moved: self.start_from(moved["new"]), names="value")
        self._name = ui.Text("my-question", description="name", **_LINE)
        self.start_from(first)
        badge, said, *rest = self.places.values()
        shown = ui.VBox([badge, said, self._progress, *rest], layout=ui.Layout(flex=_BESIDE["right"], min_width="0"))
        self.children = (ui.HTML(_STYLE), ui.Box([self._left(), shown], layout=_ROW))
        self.add_class("headroom")

    def _left(self) -> ui.Widget:
        """The controls, in groups that can be reached by keyboard from top to bottom."""
        c = self.controls
        promises = ui.GridBox(
            [ui.Label(""), *(ui.Label(p) for p in PERCENTILES)]
            + [each for m in METRICS for each in (ui.Label(m.upper()), *(c[f"{m} {p}"] for p in PERCENTILES))],
            layout=ui.Layout(grid_template_columns="3.2em repeat(4, 4.6em)"),
        )
        rare = _folded(
            "weight and KV-cache formats",
            ui.Label("weights: type to add"),
            c["quantization"],
            ui.Label("KV cache: type to add"),
            c["kv_cache_dtype"],
        )
        also = _folded("a day, LoRA adapters", *(c[name] for name in ("day", "adapters", *_LORA)))
        groups = [
            ("What", [self._from, c["model"], _folded("or paste a config.json", c["config"])]),
            ("On what", [*(c[name] for name in _HARDWARE), rare]),
            ("Traffic", [*(c[name] for name in _TRAFFIC), also]),
            ("Promises (ms; empty: none)", [promises, c["headroom"]]),
            ("Then", [self._name, *self._buttons()]),
        ]
        parts = [each for title, widgets in groups for each in (ui.HTML(f"<h4>{escape(title)}</h4>"), *widgets)]
        return ui.VBox(parts, layout=ui.Layout(flex=_BESIDE["left"]))

    def _buttons(self) -> list[ui.Widget]:
        told = {
            "Save as scenario": self.save,
            "Make the report": self.make_report,
            "Open the walk": self.open_walk,
            "Compare: hold this beside the next": self.pin,
            "Stop comparing": self.unpin,
        }
        made = []
        for label, do in told.items():
            button = ui.Button(description=label, layout=ui.Layout(width="98%"))
            button.on_click(lambda _, do=do: self._try(do))
            made.append(button)
        return made

    def start_from(self, name: str) -> None:
        """Go on with a shipped scenario, or a file."""
        self._try(lambda: self._ask(question.fields_of(name), Path(name).stem), asking=True)

    def _moved(self, name: str, moved: dict[str, Any]) -> None:
        """A control has another value."""
        self._waiting[name] += 1
        with self._lock:  # JupyterLab's messages may be handled side by side
            self._waiting[name] -= 1
            if self._quiet or self._waiting[name] or moved["new"] == moved["old"]:
                return

            def ask() -> None:
                what, value = ("model", question.pasted(moved["new"])) if name == "config" else (name, moved["new"])
                now = question.values_of(self.fields, self.scenario)
                self._ask(question.with_control(self.fields, what, value, now), self.scenario.name)

            self._try(ask, asking=True)

    def _ask(self, fields: question.Fields, name: str) -> None:
        """Make `fields` the question, and show its answer in closed form."""
        asked = scenario(fields, name)
        with self._lock:
            self._asked = asked
            if self._timer:
                self._timer.cancel()
            self._timer = threading.Timer(PAUSE, self._replay, [asked])  # another core searches meanwhile
            self._timer.daemon = True
            self._timer.start()
            plan = ranked(asked)
            shown = figures(plan)
            self.fields, self.scenario, self.plan = fields, asked, plan
            self._sync()
            self._show(plan, shown, busy=True)

    def _replay(self, asked: Scenario) -> None:
        """Search with replays, and show that if it is still asked."""
        with self._searching:
            if asked is not self._asked:
                return
            try:
                try:
                    plan, shown = self._replays.submit(replayed, asked).result()
                except (BrokenExecutor, AttributeError, OSError):  # no process can be started here, or it was killed
                    self._replays = ThreadPoolExecutor(1)
                    plan, shown = self._replays.submit(replayed, asked).result()
            except Exception as error:  # else the screen would wait for ever
                plan, shown = None, {"answer": note(f"The replay failed: {error}").html}
        with self._lock:
            if asked is self.scenario:
                self.plan = plan
                self._show(plan, shown)

    def stop(self) -> None:
        """Replay nothing more."""
        if self._timer:
            self._timer.cancel()
        self._replays.shutdown(wait=False, cancel_futures=True)

    def settle(self) -> None:
        """Wait until what is shown is replayed."""
        if self._timer:
            self._timer.join()

    def _show(self, plan: Plan | None, shown: dict[str, str], busy: bool = False) -> None:
        self.places["badge"].value = badge(plan, busy) if plan else ""
        for name in FIGURES:
            self.places[name].value = shown.get(name, "")
        held = [*map(kept_plan, self._pinned), plan] if self._pinned and plan and not busy else []
        beside = table(comparison(held), "Questions side by side; in brackets: against the first.").html if held else ""
        waits = note("Held beside this one as soon as it is replayed.").html if self._pinned and busy else ""
        self.places["compared"].value = beside or waits

    def _sync(self) -> None:
        """Every control shows what is asked; those that say nothing of such traffic are hidden."""
        values = question.values_of(self.fields, self.scenario)
        self._quiet = True
        try:
            for name, control in self.controls.items():
                if name == "engine_version":
                    control.options = engines()[self.scenario.engine.name]
                if self._waiting[name]:  # it has been moved again
                    continue
                if name in values or " " in name or name in ("preset", "config"):
                    _set(control, values.get(name, ""))
            for name in ("rate", "concurrency", "requests", "within_hours", "trace"):
                kind = "requests" if name == "within_hours" else name
                self.controls[name].layout.display = None if values["load"] in (kind, "") or name == "trace" else "none"
            for name, says in (("day", values["load"] in ("rate", "trace")), *((n, values["adapters"]) for n in _LORA)):
                self.controls[name].layout.display = None if says else "none"
        finally:
            self._quiet = False

    def _try(self, do: Callable[[], None], asking: bool = False) -> None:
        """`do`; what is wrong with it is said in the place of the figures, which would be of another question."""
        self.places["said"].value = ""
        try:
            do()
        except PlannerError as error:
            self.places["said"].value = note(str(error)).html
            if asking:
                with self._lock:
                    self._show(None, {})

    def save(self) -> None:
        """Write the question to a file of its name, and to the one that the walk opens."""
        path = question.save(self.fields, question.named_file(self._name.value))
        self.open_walk()
        self.places["said"].value = f"<p>Saved as {escape(path)}.</p>{self.places['said'].value}"

    def open_walk(self) -> None:
        """Write the question where every chapter finds it."""
        question.save(self.fields, QUESTION)
        change({})
        links = " ".join(f'<a href="{path.name}">{path.stem}</a>' for path in walk())
        self.places["said"].value = f"<p>Every chapter opens with this question now: {links}</p>"

    def make_report(self) -> None:
        """The PDF, in the background; what is done of it is shown."""
        path = question.save(self.fields, question.named_file(self._name.value))
        threading.Thread(target=self._report, args=[path], daemon=True).start()

    def _report(self, path: Path) -> None:
        many, done, said = len(walk()), iter(range(1, 1000)), self.places["said"]
        self._progress.max, self._progress.value, self._progress.layout.display = many + 2, 1, None

        def told(line: str) -> None:
            self._progress.value = next(done)
            said.value = f"<p>Report: {escape(line.splitlines()[-1])}</p>"

        try:
            said.value = "<p>Report: searching</p>"
            made = report(path, Path("reports") / path.stem, progress=told)
            where = Path("reports") / path.stem / made.name
            said.value = f'<p>Report: <a href="../../files/{where}" target="_blank">{escape(where)}</a></p>'
        except PlannerError as error:
            said.value = note(str(error)).html
        finally:
            self._progress.layout.display = "none"

    def pin(self) -> None:
        """Hold the answer to this question beside those that follow."""
        if len(self._pinned) + 1 >= MOST:
            raise PlannerError(f"{MOST} questions are compared at most")
        self._pinned.append(self.scenario)
        self.places["compared"].value = note("Now change something: the answers are held side by side.").html

    def unpin(self) -> None:
        """Compare no longer."""
        self._pinned.clear()
        self.places["compared"].value = ""

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        still = "".join(self.places[name].value for name in ("badge", *FIGURES))
        return {**super()._repr_mimebundle_(**kwargs), "text/html": still}
