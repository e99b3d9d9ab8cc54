"""A wait shows how far it is, ends in time or at Ctrl-C, keeps what it has, and says what it left out."""

import io
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from shipped import answer_of, plan_of

from planner.answers import answer as told
from planner.answers import build_answer, serialize_answer
from planner.core.progress import (
    UNWATCHED,
    Step,
    advance,
    get_progress_watch,
    is_out_of_time,
    show_step,
    try_each,
    watch_progress,
)
from planner.planning.plan import Plan
from planner.planning.scenario import Scenario, load_scenario
from planner.planning.search import search_deployments
from planner.planning.what_if import propose_changes, run_what_ifs
from planner.ui import notebook_session, progress_line
from planner.ui.cli import main
from planner.ui.commands.options import watch_command
from planner.ui.decision_memo import build_memo
from planner.ui.plan_text import format_answer

SMALL = "edge-8b-24gb"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def wait_for(text: str, read: Callable[[], str]) -> None:
    """Wait until what is read has the text: the line is drawn from another thread."""
    while text not in read():
        time.sleep(0.001)


def watch_late() -> AbstractContextManager[Any]:
    """Watch work whose time is up, by a clock that the test has."""
    ticks = count()
    return watch_progress(0.5, clock=lambda: float(next(ticks)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_line, "REFRESH_S", 0.001)


@pytest.mark.usefixtures("quick")
def test_a_terminal_shows_one_line_that_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", "70")

    def attempt(item: int) -> int:
        with show_step("searching"):
            advance()
            if item == 2:
                wait_for("what-ifs 1/2: half the traffic, searching 1", stream.getvalue)
        return item

    with watch_progress(draw=progress_line.draw_on_terminal) as watch:
        tried = dict(try_each(attempt, {"twice": 1, "half the traffic": 2}, "what-ifs"))
    assert tried == {"twice": 1, "half the traffic": 2} and not watch.steps
    *shown, last = stream.getvalue().split(progress_line.CLEAR_LINE)
    assert last == "" and "\n" not in stream.getvalue()
    assert all(len(line) < 70 for line in shown) and "[00:00" in shown[1]


@pytest.mark.usefixtures("quick")
def test_a_notebook_shows_a_line_in_the_cell_and_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append(data["text/plain"])

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        shown.append(data["text/plain"])
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    with watch_progress(draw=progress_line.draw_in_notebook):
        with show_step("too short to be seen"):
            pass
        assert shown == []
        with show_step("searching"):
            wait_for("searching", lambda: " ".join(shown))
    assert shown[-1] == ""


def test_steps_are_drawn_once_whatever_is_in_them() -> None:
    drawn: list[str] = []

    @contextmanager
    def draw(steps: Sequence[Step]) -> Iterator[None]:
        drawn.append("begins")
        yield
        drawn.append("ends")

    @show_step("the inner")
    def work() -> list[str]:
        return [step.name for step in get_progress_watch().steps]

    with watch_progress(draw=draw), show_step("the outer"):
        assert [work(), work()] == [["the outer", "the inner"]] * 2
    assert drawn == ["begins", "ends"]
    assert work() == ["the inner"]


def test_what_has_no_time_is_left_out_and_named() -> None:
    now = [100.0]

    def attempt(item: str) -> str | None:
        now[0] += 6
        return None if item == "refused" else item.upper()

    items = {name: name for name in ("a", "refused", "b", "c")}
    with watch_progress(13, clock=lambda: now[0]) as watch:
        tried = list(try_each(attempt, items, "what-ifs"))
        assert is_out_of_time()
    assert tried == [("a", "A"), ("refused", None), ("b", "B"), ("c", None)]
    assert watch.describe_left_out() == "stopped after 13 s; not tried: what-ifs (refused, c)"


def test_an_interruption_keeps_what_was_found() -> None:
    def attempt(item: int) -> int:
        if item == 2:
            raise KeyboardInterrupt
        return item

    items = {"a": 1, "b": 2, "c": 3}
    with watch_progress() as watch:
        assert list(try_each(attempt, items, "parts")) == [("a", 1), ("b", None), ("c", None)]
        assert list(try_each(attempt, {"d": 4}, "more")) == [("d", None)]
    assert watch.describe_left_out() == "interrupted; not tried: parts (b, c), more (d)"
    with pytest.raises(KeyboardInterrupt):  # nobody would learn of it
        list(try_each(attempt, items, "parts"))
    assert not UNWATCHED.is_interrupted and not UNWATCHED.steps


def test_an_interrupted_what_if_leaves_those_before_it_and_the_memo_says_so() -> None:
    plan = plan_of("chat-70b")
    first, *others = [change for change, _ in propose_changes(plan)]

    def search(scenario: Scenario) -> Plan:
        if len(searched) == 1:
            raise KeyboardInterrupt
        searched.append(scenario)
        return plan

    searched: list[Scenario] = []
    with watch_progress() as watch:
        changes = run_what_ifs(plan, search)
    assert [each.change for each in changes] == [first] and len(others) > 1
    left_out = f"interrupted; not tried: what-ifs ({', '.join(others)})"
    assert watch.describe_left_out() == left_out
    answer = build_answer(plan)
    memo = build_memo(answer.with_changes(changes, [left_out])).fields
    assert dict(memo["basis"])["Left out"] == f"I{left_out[1:]}."
    assert "Left out" not in dict(build_memo(answer.with_changes(changes, [])).fields["basis"])


def test_a_search_without_time_has_an_answer_that_names_what_was_left_out() -> None:
    whole, scenario = plan_of("chat-70b"), load_scenario("chat-70b")
    with watch_late():
        plan = search_deployments(scenario)
    assert plan.chosen and plan.verdict in ("holds", "at_risk") and not whole.left_out
    assert plan.chosen.probability >= 0.5
    (said,) = plan.left_out
    assert said.startswith("stopped after 0.5 s with ") and " of " in said and "H100-SXM" in said
    assert said in serialize_answer(answer_of(plan))["basis"]["notes"]
    assert "Left out  stopped after 0.5 s with" in format_answer(answer_of(plan))
    assert "Left out" not in format_answer(answer_of(whole))
    assert dict(build_memo(answer_of(plan)).fields["basis"])["Left out"] == f"S{said[1:]}."


def test_a_load_that_was_not_searched_to_its_end_is_said() -> None:
    scenario = load_scenario(SMALL, {"workload.rate": "max"})
    with watch_late():
        plan = search_deployments(scenario)
    assert plan.chosen and plan.scenario.workload.rate
    assert "stopped after 0.5 s; not tried: a larger rate" in plan.left_out


def test_a_plan_that_was_cut_short_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with watch_late():
        assert notebook_session.search_cached(load_scenario(SMALL)).left_out
    assert not list(tmp_path.rglob("*.pickle"))
    assert not notebook_session.search_cached(load_scenario(SMALL)).left_out
    assert len(list(tmp_path.rglob("*.pickle"))) == 1


@pytest.mark.parametrize(
    ("module", "name", "step"),
    [
        (told, "find_unlisted_gpu", "options outside the scenario (GPUs)"),
    ],
)
def test_ctrl_c_after_the_search_leaves_the_answer(
    module: ModuleType, name: str, step: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    codes: list[int] = []
    monkeypatch.setattr(module, name, interrupt)
    monkeypatch.setattr(os, "_exit", codes.append)
    main(["plan", "chat-70b", "--all"])
    shown = capsys.readouterr()
    assert codes == [130] and shown.err.endswith("headroom: interrupted\n")
    assert "MEETS TARGETS" in shown.out and "Power  " in shown.out
    assert f"Left out  interrupted; not tried: {step}" in shown.out


def test_compiling_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba import njit

    def compile_kernel(_: Namespace) -> int:
        watch = get_progress_watch()
        watch.clock, watch.started = (lambda: 1000.0), 0.0
        assert is_out_of_time()
        njit(lambda x: x + 1)(1)
        return int(is_out_of_time())

    assert watch_command(compile_kernel)(Namespace(time_limit=60.0)) == 0
