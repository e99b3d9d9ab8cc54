"""What a terminal shows: bars that lie where the numbers are, lines that fit, colours where they are wanted."""

import io
import math
import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from shipped import answer_of, plan_of, plan_once, sampled, small_plan

from planner.answers.limits import Limit
from planner.answers.words import explain_limit
from planner.core.intervals import Interval
from planner.core.number_format import (
    format_distinct,
    format_number,
    format_probability,
    format_seconds,
    format_seconds_range,
)
from planner.planning.plan import Plan
from planner.planning.scenario import list_scenarios, load_scenario
from planner.planning.scenario_schema import ApiEntry, ServerlessEntry
from planner.ui.plan_text import format_answer
from planner.ui.terminal import TerminalStyle, detect_style

ANSI = re.compile(r"\033\[[\d;]*m")
PLAIN = TerminalStyle()


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    encoding = "UTF-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def overloaded() -> Plan:
    return plan_once(load_scenario("edge-8b-24gb", {"workload.rate": 400}))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (5.53, "5.53"), (50.0, "50"), (12.81, "12.8"), (1174, "1,170"), (9.996, "10"),
        (686_688, "687k"), (2_240_000, "2.24M"), (1054.9, "1,050"), (0.386, "0.386"), (0, "0"),
        (math.inf, "unbounded"), (99_990, "100k"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits_and_no_exponent(value: float, shown: str) -> None:
    assert format_number(value) == shown


def test_a_number_beyond_a_limit_never_reads_as_the_limit() -> None:
    assert format_distinct(60.08, 60) == "60.1" and format_seconds(0.06008, 0.06) == "60.1 ms"
    assert format_seconds(1.141, 1.0) == "1.1 s" and format_seconds(1.004, 1.0) == "1.004 s"
    assert format_seconds_range(Interval(0.016, 0.025, 0.042)) == "25 ms (16-42)"
    assert format_seconds_range(Interval(1.2, 2, math.inf)) == "2 s (1.2-unbounded)"


def test_no_prediction_is_certain() -> None:
    assert [format_probability(p) for p in (0, 0.86, 0.9987, 1)] == [
        "under 1%", "86%", "over 99%", "over 99%",
    ]  # fmt: skip


@pytest.mark.parametrize("columns", [12, 20, 26])
@pytest.mark.parametrize("mid", [0.0, 0.3, 0.999, 1.0, 1.001, 30.0, math.inf])
def test_the_dot_is_beyond_the_limit_exactly_if_the_value_is(mid: float, columns: int) -> None:
    for has_unicode, dot, edge in ((True, "●", "▏"), (False, "o", "|")):
        bar = replace(PLAIN, has_unicode=has_unicode).draw_bar(
            Interval(mid / 2, mid, mid * 2), columns
        )
        assert len(bar) == columns
        assert (bar.index(dot) > bar.rindex(edge)) == (mid > 1)
    assert bar.isascii()


ANSWERS = [*product([*list_scenarios(), "overloaded"], (60, 80, 100))]
SLOW_TO_FIX = (("overloaded", 60), ("overloaded", 100))
"""What would fix it is searched for each time."""


@pytest.mark.parametrize(("name", "width"), sampled(ANSWERS, {*ANSWERS} - {*SLOW_TO_FIX}))
def test_the_answer_fits_the_terminal(name: str, width: int) -> None:
    plan = overloaded() if name == "overloaded" else plan_of(name)
    style = TerminalStyle(width, has_unicode=False, wraps=True)
    lines = format_answer(answer_of(plan), style, command=f"headroom plan {name}").splitlines()
    assert max(map(len, lines)) <= width
    assert all(line.isascii() for line in lines)
    if width >= 80:
        assert len(lines) <= 24
    assert not re.search(r"\bnan\b|\binf\b|None|-\d{3,}%|e\+\d", "\n".join(lines))
    rows = [line for line in lines if line.count("|") >= 2]
    assert len(rows) + 1 >= len(
        [row for row in answer_of(plan).best.limit_rows if row.use.mid < math.inf]
    )


def test_an_overloaded_plan_says_so_and_draws_no_wait() -> None:
    text = format_answer(answer_of(overloaded()))
    assert text.startswith("✘ NO PLAN MEETS THE TARGETS")
    assert re.search(r"overloaded: 400 requests/s, capacity \d+", text)
    (wait,) = [line for line in text.splitlines() if "TTFT" in line]
    assert "unbounded" in wait and "●" not in wait and wait.endswith("missed")
    assert "Fix" in text, "less load, or more GPUs"


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert detect_style(Terminal()).has_colour
    assert not detect_style(io.StringIO()).has_colour
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert not detect_style(Terminal()).has_colour
    plan = plan_of("chat-70b")
    coloured = format_answer(answer_of(plan), replace(PLAIN, has_colour=True))
    assert ANSI.sub("", coloured) == format_answer(answer_of(plan))
    painted = [line for line in coloured.splitlines() if ANSI.search(line)]
    assert len(painted) == 1 + len(answer_of(plan).best.limit_rows), (
        "the verdict and the status words"
    )


def test_a_plan_at_risk_names_what_may_be_missed() -> None:
    changes: dict[str, Any] = {"service_level.tpot.p95": 29, "gpus.0.at_most": 4}
    plan = plan_once(load_scenario("chat-70b", changes))
    assert plan.verdict == "at_risk"
    text = format_answer(answer_of(plan))
    assert f"{plan.probability:.0%} likely to meet every target, 80% required" in text
    (reach, limit) = re.findall(r"Risk +p95 TPOT may reach (\d+) ms, limit (\d+) ms", text)[0]
    assert int(reach) > int(limit) == 29


def test_a_load_that_is_less_than_any_is_told_in_words() -> None:
    """A token on one L4 takes the time of reading 8 B parameters from 300 GB/s, 27 ms in FP8 at least."""
    asked = {
        "model": "Qwen/Qwen3-8B", "gpus": [{"gpu": "L4", "at_most": 1}], "workload.rate": "max",
        "service_level": {"tpot": {"p95": 44}},
    }  # fmt: skip
    answer = answer_of(plan_once(load_scenario("chat-70b", asked)))
    assert answer.verdict == "at_risk" and answer.chosen and not answer.chosen.token_price
    text = " ".join(format_answer(answer, detailed=True).split())
    assert "AT RISK even with one request at a time" in text and "0.001" not in text
    assert re.search(r"Risk p95 TPOT may reach \d+ ms, limit 44", text)
    assert answer.even_odds and answer.even_odds.load > 0.01
    assert f"at {format_number(answer.even_odds.load)}: " in text


def test_office_hours_have_their_bill_in_the_line_of_the_cost() -> None:
    """45 hours of 168 have traffic; what starts before them and stops after them is paid, too."""
    workload = {
        "prompt_tokens": {"mean": 300}, "output_tokens": {"mean": 100}, "rate": 0.5,
        "office_hours": [9, 18], "office_days": 5,
    }  # fmt: skip
    asked = {
        "model": "Qwen/Qwen3-8B",
        "workload": workload,
        "service_level": {"ttft": {"p95": 2000}},
    }
    plan = plan_once(load_scenario("chat-70b", asked))
    answer = answer_of(plan)
    text = " ".join(format_answer(answer, detailed=True).split())
    always, off = re.findall(
        r"Cost \$([\d,]+)/month always on.*?, \$([\d,]+) if it stops in hours without traffic", text
    )[0]
    share = float(off.replace(",", "")) / float(always.replace(",", ""))
    assert 45 / 168 < share < 50 / 168
    paid = ServerlessEntry(usd_per_gpu_second=0.01)  # $36 an hour, for one that costs $4
    bills = answer.scenario.billing_alternatives.model_copy(update={"serverless": paid})
    dear = answer_of(replace(plan, scenario=replace(answer.scenario, billing_alternatives=bills)))
    told = " ".join(format_answer(dear, detailed=True).split())
    assert "on these GPUs if it stops in hours without traffic" in told
    assert "these GPUs save" in told
    # options stop in the same hours
    chosen = answer.chosen
    assert chosen
    shares = {round(each.least_bill.usd / each.bill, 2) for each in answer.candidates if each.bill}
    assert shares == {round(share, 2)}
    # an API between both bills is undercut by the plan itself, if it stops
    per_request = 2 * chosen.least_bill.usd / (0.5 * 3600 * 730.5 * 45 / 168)
    api = ApiEntry(usd_per_mtok_input=0, usd_per_mtok_output=per_request / 100 * 1e6)
    bills = answer.scenario.billing_alternatives.model_copy(update={"api": api})
    between = answer_of(
        replace(plan, scenario=replace(answer.scenario, billing_alternatives=bills))
    )
    assert between.cheaper_than_api is between.chosen
    assert "costs less than the API: $" in format_answer(between).replace("\n           ", "")


def test_a_load_and_its_limit_that_round_alike_show_a_digit_more() -> None:
    value, limit = 1.2502, 1.2478
    shares = Interval.from_value(value / limit), value / limit
    row = Limit("load", "load", "requests/s", value, limit, limit, *shares, "missed", 0.0)
    told = re.findall(r"is ([\d.]+), limit ([\d.]+) requests/s", explain_limit(row))[0]
    assert float(told[0]) > float(told[1])


def test_a_pinned_layout_and_a_tuned_number_of_drafts_are_told() -> None:
    pinned = answer_of(plan_once(load_scenario("chat-70b", {"layout.tp": 4})))
    assert "pinned by layout" in format_answer(pinned, detailed=True)
    drafting = answer_of(plan_once(load_scenario("chat-70b", {"speculation.allowed": True})))
    assert drafting.chosen and drafting.chosen.deployment.speculation
    k = drafting.chosen.deployment.num_draft_tokens
    told = f"names num_speculative_tokens 3; {k} is proposed"
    assert (told in " ".join(format_answer(drafting, detailed=True).split())) == (k != 3)


def test_what_an_api_costs_comes_before_the_gpus_and_says_where_it_turns() -> None:
    prices = {"usd_per_mtok_input": 0.5, "usd_per_mtok_output": 0.9}
    scenario = replace(
        plan_of("chat-70b").scenario,
        billing_alternatives=load_scenario(
            "chat-70b", {"instead.api": prices}
        ).billing_alternatives,
    )
    plan = replace(plan_of("chat-70b"), scenario=scenario)
    text = format_answer(answer_of(plan))
    assert text.index("API ") < text.index("Rent ")
    seconds = 3600 * 24 * 365.25 / 12
    api = 5.53 * seconds * (1154.7 * 0.5 + 211.1 * 0.9) / 1e6
    text = " ".join(text.split())
    (shown,) = re.findall(r"API around the clock .*?: \$([\d,]+)/month", text)
    assert int(shown.replace(",", "")) == pytest.approx(api, rel=0.01)
    (turn,) = re.findall(r"(?:above|below|equal at) ([\d.]+) requests/s", text)
    assert float(turn) == pytest.approx(5.53 * 15.78 * 730.5 / api, rel=0.01)


def test_serverless_without_a_day_is_not_compared() -> None:
    plan, paid = plan_of("chat-70b"), ServerlessEntry(usd_per_gpu_second=0.001)
    bills = plan.scenario.billing_alternatives.model_copy(update={"serverless": paid})
    asked = replace(plan, scenario=replace(plan.scenario, billing_alternatives=bills))
    told = " ".join(format_answer(answer_of(asked)).split())
    assert "not compared: give workload.day or workload.office_hours" in told


def plan_with_one_slot(rate: float) -> Plan:
    """One request at a time, of about 6 s each: at 0.13 a second four in five of them find it busy."""
    lengths = {"prompt_tokens": {"mean": 500}, "output_tokens": {"mean": 250}}
    return small_plan({
        "gpus.0.at_most": 1, "workload": {**lengths, "rate": rate}, "headroom": 0.0,
        "service_level": {"tpot": {"p95": 200}}, "engine_args": {"max_num_seqs": 1},
    })  # fmt: skip


def test_a_wait_that_is_longer_than_the_answer_is_told() -> None:
    """Behind one server that is busy four fifths of the time, the mean wait exceeds the mean service."""
    busy = plan_with_one_slot(0.13)
    assert busy.chosen and busy.performance
    wait, end = busy.performance.get("ttft", "mean").mid, busy.performance.get("e2e", "mean").mid
    assert wait > end - wait
    line = next(row for row in format_answer(answer_of(busy)).splitlines() if "  Queue " in row)
    assert f"takes {format_seconds(wait)} on average" in line
    assert "  Queue " not in format_answer(answer_of(plan_with_one_slot(0.01)))
