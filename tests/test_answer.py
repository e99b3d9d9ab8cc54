"""Every figure on any surface is a field of the answer, over twelve kinds of question."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import pytest
from shipped import answer_of, plan_of, plan_once, sampled, small_plan

from planner.answers import Answer, build_answer, serialize_answer
from planner.answers.words import tell_measure_first
from planner.core.intervals import Interval
from planner.core.number_format import format_probability, format_usd
from planner.planning.scenario import load_scenario
from planner.planning.search import GAMBLE_PROBABILITY, Plan
from planner.ui import plan_tables as tables
from planner.ui.decision_memo import build_memo
from planner.ui.plan_panel import build_page
from planner.ui.plan_text import format_answer

POOLS = {
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "gpus": [{"gpu": "H100-SXM", "at_most": 8}],
    "workload": {
        "prompt_tokens": {"exactly": 6000},
        "output_tokens": {"exactly": 150},
        "rate": 6,
    },
    "service_level": {"ttft": {"p95": 4000}, "itl": {"p99": 25}},
    "pools": True,
}
HOURS = [3, 2, 1, 1, 1, 2, 4, 8, 14, 19, 20, 19, 17, 19, 20, 19, 17, 15, 13, 11, 9, 8, 6, 4]
EMBEDDING = {
    "model": "Qwen/Qwen3-Embedding-8B",
    "workload.output_tokens": {"exactly": 1},
    "service_level": {"ttft": {"p95": 2000}},
}
SPECULATION = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance_rate": 0.62}
QUESTIONS: Mapping[str, Callable[[], Plan]] = {
    "a day": lambda: small_plan({"workload.day": HOURS, "workload.rate": 18}),
    "hours off": lambda: small_plan(
        {
            "workload.office_hours": [9, 18],
            "workload.rate": None,
            "workload.requests_per_day": 90_000,
        }
    ),
    "a fleet member": lambda: small_plan({"spare_replicas": 1, "gpus.0.at_most": 3}),
    "pools": lambda: plan_once(load_scenario("edge-8b-24gb", {**POOLS, "quantization": None})),
    "drafts": lambda: small_plan({"speculation": SPECULATION}),
    "adapters": lambda: small_plan({"adapters": {"count": 1, "ranks": [8, 16]}}),
    "sessions": lambda: plan_of("coding-agents"),
    "an embedding model": lambda: small_plan(EMBEDDING),
    "an API question": lambda: small_plan(
        {"instead.api": {"usd_per_mtok_input": 0.02, "usd_per_mtok_output": 0.04}}
    ),
    "max": lambda: small_plan({"workload.rate": "max", "gpus.0.at_most": 1}),
    "at risk": lambda: small_plan({"confidence": 0.98, "service_level.ttft.p95": 250}),
    "nothing meets": lambda: small_plan({"service_level.ttft.p95": 8, "workload.rate": 2}),
}


@cache
def get_answer(name: str) -> Answer:
    return answer_of(QUESTIONS[name]())


@pytest.fixture(
    params=sampled(QUESTIONS, ("a fleet member", "an API question", "max", "nothing meets"))
)
def answer(request: pytest.FixtureRequest) -> Answer:
    return get_answer(request.param)


def walk(value: Any, path: str = "answer") -> Iterator[tuple[str, float]]:
    """Every number in the answer, with the place where it is."""
    if isinstance(value, bool | str | None):
        return
    if isinstance(value, int | float):
        yield path, float(value)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from walk(each, f"{path}.{name}")
    elif is_dataclass(value):
        for field in fields(value):
            yield from walk(getattr(value, field.name), f"{path}.{field.name}")
        for name, each in vars(type(value)).items():  # such as the total of a start-up's parts
            if isinstance(value, Interval) or not isinstance(each, property):
                continue
            if isinstance(found := getattr(value, name), int | float | Interval):
                yield from walk(found, f"{path}.{name}")
    elif isinstance(value, list | tuple | frozenset):
        for k, each in enumerate(value):
            yield from walk(each, f"{path}[{k}]")


def flatten(value: Any) -> Iterator[str]:
    """Every text of a page or memo; drawings are not text."""
    if isinstance(value, str):
        if not value.startswith("<svg"):
            yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if name not in ("figures", "ms", "chart"):
                yield from flatten(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from flatten(each)


def show_everywhere(answer: Answer) -> dict[str, str]:
    """What a reader sees on each surface."""
    memo = build_memo(answer)
    best = answer.best
    assert best
    chapter = [
        *tables.build_rental_table(answer)["value"].astype(str),
        *tables.build_candidate_table(answer).astype(str).to_numpy().ravel(),
        *tables.build_relaxation_table(answer).astype(str).to_numpy().ravel(),
        tables.explain_choice(answer),
        tell_measure_first(answer),
    ]
    return {
        "terminal": " ".join(format_answer(answer, detailed=True).split()),
        "memo": " ".join(flatten(vars(memo) | {"tiles": [vars(tile) for tile in memo.tiles]}
                                 | {"options": [vars(option) for option in memo.options]}
                                 | {"bars": [vars(bar) for bar in memo.bars]})),
        "cockpit": " ".join(flatten(build_page(answer))),
        "chapter": " ".join(map(str, chapter)),
    }  # fmt: skip


def is_near(shown: str, value: float) -> bool:
    """Whether `value` rounds to the number `shown`."""
    digits = shown.replace(",", "").rstrip("kM")
    factor = {"k": 1e3, "M": 1e6}.get(shown[-1], 1.0)
    decimals = len(digits.partition(".")[2])
    significant = len(digits.replace(".", "").lstrip("0").rstrip("0") or "0")
    step = 10.0**-decimals * factor
    if "." not in digits:  # 11,500 has three digits
        step = max(step, 10.0 ** (len(digits) - max(significant, 2)) * factor)
    return abs(value - float(digits) * factor) <= 0.5001 * step + 1e-9


MONEY, PERIODS = r"\$(\d[\d,]*(?:\.\d+)?[kM]?)", (1.0, 730.5, 24.0, 730.5 / 24)


def test_every_amount_of_money_is_a_field(answer: Answer) -> None:
    """An hour, a day or a month of a price is the same field; a difference is of two bills."""
    figures = [(path, value) for path, value in walk(answer) if value > 0 and "usd" in path]
    bills = [value for path, value in figures if ".bills" in path or path.endswith("_usd")]
    gpus = {offer.num_gpus_billed for offer in (*answer.candidates, *answer.options.values())}
    for surface, text in show_everywhere(answer).items():
        for shown in re.findall(MONEY, text):
            fits = any(is_near(shown, value * period) for _, value in figures for period in PERIODS)
            differs = any(is_near(shown, abs(a - b)) for a in bills for b in bills)
            shared = any(
                is_near(shown, value * period * count)
                for path, value in figures if "quotes" in path or "price" in path
                for period in PERIODS for count in gpus
            )  # fmt: skip
            assert fits or differs or shared, (surface, f"${shown}")


def test_every_probability_is_a_field(answer: Answer) -> None:
    """Likely, sure and at risk: each is stated of some deployment, or asked for."""
    figures = {
        value for path, value in walk(answer) if "probability" in path or "confidence" in path
    }
    figures.add(GAMBLE_PROBABILITY)  # that a plan at risk has at least
    known = {format_probability(p, c) for p in figures for c in (None, answer.scenario.confidence)}
    known |= {format_probability(1 - p) for p in figures}
    known |= {
        f"under {format_probability(answer.scenario.confidence)}"
    }  # of a load that may not grow
    for surface, text in show_everywhere(answer).items():
        shown = re.findall(r"((?:over |under )?[\d.]+%) (?:likely|sure|required|risk)", text)
        shown += re.findall(r"probability (?:of|is already below the) ((?:over )?[\d.]+%)", text)
        assert not {*shown} - known, (surface, {*shown} - known)


def test_every_latency_and_rate_is_a_field(answer: Answer) -> None:
    figures = {value for _, value in walk(answer) if math.isfinite(value) and value > 0}
    for surface, text in show_everywhere(answer).items():
        for shown, unit in re.findall(r"(?<![\d.$])(\d[\d,]*(?:\.\d+)?) (ms|s|h)\b", text):
            factor = {"ms": 1e3, "s": 1.0, "h": 1 / 3600}[unit]
            near = (is_near(shown, value * factor) or (unit == "h" and is_near(shown, value))
                    for value in figures)  # fmt: skip
            assert any(near), (surface, shown, unit)
        for shown in re.findall(r"(?<![\d.$])(\d[\d,]*(?:\.\d+)?) requests/s", text):
            assert any(is_near(shown, value) for value in figures), (surface, shown, "requests/s")


def test_what_a_reader_signs_is_on_every_surface(answer: Answer) -> None:
    """The GPUs, the headline bill and the probability; all bills where there are several."""
    best = answer.best
    assert best
    shown = show_everywhere(answer)
    amounts = [format_usd(bill.usd) for bill in best.bills] if answer.chosen else []
    for surface in ("terminal", "memo", "cockpit"):
        text = shown[surface].replace("\N{MULTIPLICATION SIGN}", "x")
        assert f"{best.num_gpus_billed} x {best.gpu}" in text or best.placement in text, surface
        for amount in amounts:
            assert amount in text, (surface, amount)
        if answer.chosen:
            assert format_probability(best.probability, best.confidence) in text, surface


def test_plan_json_is_the_answer(answer: Answer) -> None:
    found, best = serialize_answer(answer), answer.best
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert best and best.performance
    assert found["verdict"] == answer.verdict
    assert found["probability"] == pytest.approx(answer.probability, abs=1e-4)
    assert [bill["usd"] for bill in found["bills"]] == [bill.usd for bill in best.bills]
    assert found["capacity_rps"] == (best.capacity_rps and best.capacity_rps.as_json_list)
    for limit, entry in zip(best.limits, found["limits"], strict=True):
        assert (entry["name"], entry["status"]) == (limit.name, limit.status)
        assert entry["expected"] == (limit.value if math.isfinite(limit.value) else None)
        if limit.target and math.isfinite(limit.value):
            predicted = found["predicted"][f"{limit.target.metric}_ms"][limit.target.percentile]
            assert predicted[0] == pytest.approx(limit.value * 1e3)
    for name, option in answer.options.items():
        assert found["options"][name]["probability"] == pytest.approx(option.probability, abs=1e-4)


def test_one_deployment_is_one_offer(answer: Answer) -> None:
    """The same deployment has the same figures wherever it appears, alone or beside others."""
    told: dict[str, set[tuple[float, float | None]]] = {}
    places = [*answer.options.values(), *answer.candidates, answer.runner_up, answer.binding.offer]
    places += [answer.measure_first.offer] if answer.measure_first else []
    for offer in places:
        if offer and offer.is_simulated:
            key = repr((offer.deployment, offer.pools))
            told.setdefault(key, set()).add((round(offer.probability, 4), offer.bill))
    assert all(len(figures) == 1 for figures in told.values()), told.values()


def test_a_wrong_figure_on_a_surface_is_noticed() -> None:
    """The walk itself: a bill that is on no field is found."""
    answer = get_answer("a fleet member")
    best = answer.best
    assert best and best.bills
    wrong = replace(best.bills[0], usd=best.bills[0].usd * 1.17)
    text = format_answer(replace(answer, best=replace(best, bills=(wrong, *best.bills[1:]))))
    (shown,) = re.findall(r"Cost +" + MONEY, text)
    assert not any(
        is_near(shown, value * period) for path, value in walk(answer) if "usd" in path
        for period in PERIODS
    )  # fmt: skip


def test_an_answer_that_is_added_to_keeps_its_offers() -> None:
    plan = small_plan()
    first = build_answer(plan, ["surge"])
    more = build_answer(plan, ["growth"], known=first)
    assert more.surge is first.surge and more.chosen is first.chosen and more.growth
