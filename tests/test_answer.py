"""Fourteen kinds of answer: what each surface says, as a whole, and that every figure of it is a field.

`WRITE_ANSWERS=1 pytest tests/test_answer.py` writes the texts again; read what changed.
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
from shipped import answer_of, plan_of, plan_once, sampled, small_plan, small_scenario

from planner.answers import Answer, Offer, build_answer, serialize_answer
from planner.core.intervals import Interval
from planner.core.number_format import format_probability, format_usd
from planner.hardware.prices import GpuPrice
from planner.latency.startup_time import StartupTime
from planner.planning.plan import GAMBLE_PROBABILITY, Plan
from planner.planning.scenario import load_scenario
from planner.ui.decision_memo import build_memo
from planner.ui.plan_panel import build_page
from planner.ui.plan_text import format_answer
from planner.ui.terminal import TerminalStyle

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
OWNED = {"L40S": {"purchase_usd": 9000, "years": 3, "usd_per_kwh": 0.3}}
QUESTIONS: Mapping[str, Callable[[], Plan]] = {
    "holds": lambda: small_plan({"workload.rate": 4}),
    "owned": lambda: small_plan({"owned": OWNED, "workload.rate": 4}),
    "a config.json": lambda: plan_of_config(),
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


TEXTS = Path(__file__).parent / "data/answers"


def plan_of_config() -> Plan:
    """The plan of a model that is a file in a folder of its own, as a user has it."""
    folder = Path(tempfile.mkdtemp(prefix="config-")) / "my-8b"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
        "architectures": ["LlamaForCausalLM"]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return plan_once(
        small_scenario({"model": "my-8b/config.json", "workload.rate": 4}, folder.parent)
    )


@cache
def get_answer(name: str) -> Answer:
    return answer_of(QUESTIONS[name]()).work_out()


@pytest.fixture(
    params=sampled(
        QUESTIONS, ("holds", "a fleet member", "an API question", "max", "nothing meets")
    )
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
            if field.name != "scenario" or not isinstance(value, Offer):
                yield from walk(getattr(value, field.name), f"{path}.{field.name}")
        named = {n: e for kind in type(value).__mro__ for n, e in vars(kind).items()}
        for name, each in named.items():  # such as the total of a start-up's parts
            if isinstance(value, Interval) or not isinstance(each, property | cached_property):
                continue
            if name == "newest_quote":  # a date, which the scenario's own price does not have
                continue
            kinds = NUMBERS if isinstance(value, Offer) else int | float | Interval
            found = getattr(value, name)
            if isinstance(found, kinds | GpuPrice | StartupTime):
                yield from walk(found, f"{path}.{name}")
    elif isinstance(value, list | tuple | frozenset):
        for k, each in enumerate(value):
            yield from walk(each, f"{path}[{k}]")


NUMBERS = int | float | Interval | tuple | list | Mapping


def list_figures(answer: Answer) -> list[tuple[str, float]]:
    """The figures of an answer, of its offers, and of what hangs on its plan."""
    parts: dict[str, Any] = {
        name: getattr(answer, name)
        for name in ("scenario", "autoscaling", "billing", "api_comparison", "even_odds", "growth",
                     "ramp", "curve", "ways_out", "saved_usd", "latency_spread")
    }  # fmt: skip
    kinds = [answer.offer(each.candidate) for each in answer.by_gpu if each.candidate]
    near = answer.offer(answer.binding_constraint.candidate)
    ways = answer.ways_out.change if answer.ways_out else None
    parts["offers"] = [
        *answer.candidates[:12], *answer.named_options.values(), *answer.other_options.values(),
        answer.runner_up, answer.measure_first, *kinds, near,
        answer.offer(ways[2], ways[1]) if ways else None, answer.best_disaggregated,
    ]  # fmt: skip
    parts["with one lost"] = [
        offer.capacity_rps.mid * (1 - 1 / offer.deployment.layout.replicas)
        for offer in parts["offers"] if offer and offer.capacity_rps
    ]  # fmt: skip
    return list(walk(parts))


def flatten(value: Any) -> Iterator[str]:
    """Every text of a page or memo; drawings are not text."""
    if isinstance(value, str):
        if not value.startswith("<svg"):
            yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if name not in ("figures", "ms", "chart", "date", "version"):
                yield from flatten(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from flatten(each)


def show_everywhere(answer: Answer) -> dict[str, str]:
    """What a reader sees on each surface."""
    return {
        "terminal": " ".join(format_answer(answer, detailed=True).split()),
        "memo": " ".join(flatten(build_memo(answer).fields)),
        "cockpit": " ".join(flatten(build_page(answer))),
    }


@pytest.mark.parametrize("name", sampled(QUESTIONS, ("holds", "owned", "at risk", "nothing meets")))
def test_an_answer_reads_as_it_did(name: str) -> None:
    """Terminal, memo and cockpit as a whole, of every kind of answer."""
    answer, style = get_answer(name), TerminalStyle(width=100)
    memo, page = build_memo(answer).fields, build_page(answer)
    said = [format_answer(answer, style, command="headroom plan mine.yaml", detailed=True)]
    for title, shown, parts in (("MEMO", memo, MEMO_PARTS), ("COCKPIT", page, PAGE_PARTS)):
        values = [
            each
            for key in parts
            for each in (shown[key] if isinstance(shown[key], list) else [shown[key]])
        ]
        said += ["", title, *(" | ".join(flatten(each)) for each in values if each)]
    text, path = "\n".join([*said, ""]), TEXTS / f"{name.replace(' ', '-')}.txt"
    text = re.sub(r"/tmp/\S+/(?=my-8b)", "", text)
    if os.environ.get("WRITE_ANSWERS"):
        path.write_text(text, encoding="utf-8")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()


MEMO_PARTS = ("title", "deployment", "sentences", "tiles", "api", "asked", "options",
              "capacity_note", "risks", "next_step", "finding", "bars", "basis")  # fmt: skip
PAGE_PARTS = ("word", "head", "sub", "say", "month", "period", "hour", "tiles", "why")


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
    figures = [(path, value) for path, value in list_figures(answer) if value > 0 and "usd" in path]
    bills = [value for path, value in figures if ".bills" in path or path.endswith("_usd")]
    gpus = {offer.num_gpus_billed for offer in (*answer.candidates, *answer.named_options.values())}
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
        value
        for path, value in list_figures(answer)
        if "probability" in path or "confidence" in path
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
    figures = {value for _, value in list_figures(answer) if math.isfinite(value) and value > 0}
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
    assert [bill["usd"] for bill in found["cost"]["bills"]] == [bill.usd for bill in best.bills]
    assert found["capacity_rps"] == (best.capacity_rps and best.capacity_rps.as_json_list)
    for limit, entry in zip(best.limit_rows, found["limits"], strict=True):
        assert (entry["name"], entry["status"]) == (limit.name, limit.status)
        assert 0 <= entry["probability"] <= 1
        assert entry["expected"] == (limit.value if math.isfinite(limit.value) else None)
        if limit.target and math.isfinite(limit.value):
            predicted = found["predicted"][f"{limit.target.metric}_ms"][limit.target.percentile]
            assert predicted[0] == pytest.approx(limit.value * 1e3)
    options = {each["name"]: each["probability"] for each in found["options"]}
    odds = {name: each.probability for name, each in answer.named_options.items()}
    assert options == pytest.approx(odds, abs=1e-4)


def test_what_is_left_of_a_budget_is_said_with_what_keeps_it() -> None:
    """One L40S of $1.86 takes 19% of $10 an hour, and a second one is more than the scenario has."""
    plan = small_plan({"budget": {"usd_per_hour": 10}, "gpus.0.at_most": 1, "workload.rate": 1})
    told = serialize_answer(build_answer(plan))
    assert told["cost"]["budget"] == {
        "usd_per_hour": 10,
        "spent_fraction": pytest.approx(told["usd_per_hour"][0] / 10),
        "is_bound_by_at_most": True,
    }
