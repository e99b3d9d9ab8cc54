"""The answer to a scenario: a dozen lines for a person, `plan.json`, and the files that start and watch the plan."""

import json
import math
import os
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from planner.core.catalog import parse_json, read_text
from planner.core.files import folder, replacing, spare
from planner.core.quantities import PlannerError, aligned, one_line
from planner.facts.prices import price_per_hour
from planner.latency.performance import LATENCIES, POINTS, Performance
from planner.latency.start_up import start_up
from planner.memory.budget import unusual_share
from planner.models.registry import model
from planner.operations.launch import FILES, IN_POOLS, documents, file_names, launches
from planner.operations.rendering import render
from planner.planning.candidate import Candidate, asked_rps, energy, free_share, held, milliseconds, run_hours
from planner.planning.confidence import DRAWS, confidence
from planner.planning.disaggregated import handover
from planner.planning.passed_over import passed_over
from planner.planning.pools import left_out
from planner.planning.prediction import Prediction
from planner.planning.renting import Renting
from planner.planning.scaling import Scaling
from planner.planning.scenario import Scenario, Target
from planner.planning.scenario_entries import FileKind
from planner.planning.search import Plan
from planner.studies.phrases import BASES
from planner.studies.risks import growth

EXIT = {"holds": 0, "at_risk": 3, "nothing_meets": 4}
"""What `planner plan` ends with."""
SECRETS = "serve.env"
"""Its owner fills it in with keys: it is readable to them alone, and not written over once it holds any."""
MEASURE = "measure/"
"""Where the scripts lie that measure another deployment than the plan's."""
TO_RUN: tuple[FileKind, ...] = ("script", "benchmark")
"""What it takes to measure one."""


def answer(plan: Plan) -> dict[str, Any]:
    """`plan.json`: times in ms, null where there is none; a figure is [middle, low, high] with its 80% interval.

    Where nothing meets the service level the figures are those of the plan that comes nearest.
    """
    best, scenario = plan.best, plan.scenario
    found: dict[str, Any] = {"scenario": scenario.name, "verdict": plan.verdict, "reasons": list(plan.reasons)}
    found |= figures(scenario, best) if best else {"model": scenario.model}
    found |= {"binding": {"constraint": plan.binding.constraint, "sentence": plan.binding.sentence}}
    found |= {"runner_up": figures(scenario, plan.runner_up) if plan.runner_up else None}
    found |= {"why_not": {other.what: other.why for other in passed_over(plan)}}
    found |= {"confidence": _confidence(plan)}
    found |= {"rejected": dict(Counter(rejection.bottleneck for rejection in plan.rejected))}
    found |= {"day": _day(plan.scaling, plan.renting) if plan.scaling and plan.renting else None}
    found |= {"assumptions": list(scenario.assumptions), "notes": list(plan.notes)}
    started = launches(plan.chosen.prediction) if plan.chosen else ()
    found |= {"command": started[0].command if len(started) == 1 else None}
    found |= {"commands": {one.role: one.command for one in started} if len(started) > 1 else None}
    beside = file_names(plan.chosen.prediction, scenario.wanted) if plan.chosen else []
    return found | {"files": [*beside, *(name for name in to_measure(plan) if name.startswith(MEASURE))]}


def not_written(plan: Plan) -> list[str]:
    """The kinds of files that the scenario asks for, and that there are none of for pools."""
    return [kind for kind in plan.scenario.wanted if kind not in IN_POOLS] if plan.in_pools else []


def _confidence(plan: Plan) -> dict[str, Any] | None:
    """How sure the choice is, in shares of all draws, and what to measure first; null where nothing was chosen."""
    sure = confidence(plan)
    if sure is None:
        return None
    parts = {name: getattr(sure, name) for name in ("stays", "cheaper", "alike", "dearer", "broken")}
    others = [
        {"deployment": rival.what, "usd_per_hour": rival.usd_per_hour, "share": share} for rival, share in sure.rivals
    ]
    first = sure.first and {
        "deployment": sure.first[0].what, "changes_the_choice": sure.first[1],
        "commands": [one.command for one in launches(sure.first[0].prediction)], "files": list(to_measure(plan)),
    }  # fmt: skip
    return {"draws": DRAWS, **parts, "instead": others, "measure_first": first}


def to_measure(plan: Plan) -> tuple[str, ...]:
    """The files that start and benchmark what should be measured first; none where no result changes the choice."""
    sure = confidence(plan)
    if sure is None or sure.first is None or not {*TO_RUN} <= {*plan.scenario.wanted}:
        return ()
    measured = sure.first[0]
    folder_of = "" if measured is plan.chosen else MEASURE
    return tuple(folder_of + name for name in file_names(measured.prediction, TO_RUN) if name != SECRETS)


def _measured(plan: Plan) -> dict[str, str]:
    """Name and text of the files of what should be measured first, where they are others than the plan's own."""
    names, sure = to_measure(plan), confidence(plan)
    if not (sure and sure.first and names and names[0].startswith(MEASURE)):
        return {}
    texts = documents(sure.first[0].prediction, plan.scenario.service_level, plan.scenario.storage, TO_RUN)
    return {name: texts[name.removeprefix(MEASURE)] for name in names}


def figures(scenario: Scenario, candidate: Candidate) -> dict[str, Any]:
    """What one candidate is and does, as `plan.json` has it."""
    deployment, prediction = candidate.deployment, candidate.prediction
    layout, args, price = deployment.layout, deployment.args, price_per_hour(deployment.gpu, scenario.prices)
    drafting, performance, month = deployment.speculation, prediction.performance, prediction.usd_per_month
    machines = Counter(size for pool in prediction.pools for size in pool.machines)
    shown: dict[str, Any] = {
        "model": scenario.model, "checkpoint": deployment.model.name,
        "quantization": deployment.model.quantization.method, "kv_cache_dtype": args.kv_cache_dtype or "auto",
        "engine": deployment.engine.name, "engine_version": deployment.engine.version,
        "gpu": deployment.gpu.name, "gpus": sum(pool.gpus for pool in prediction.pools),
        "gpus_rented": prediction.gpus_rented, "machines": {f"{size} GPUs": many for size, many in machines.items()},
        "spare_replicas": deployment.spare_replicas,
        "layout": dict(vars(layout)), "pools": _pools(prediction),
        "engine_args": {name: value for name, value in vars(args).items() if value is not None},
        "speculation": drafting and {
            **{field: getattr(drafting, field) for field in ("method", "num_speculative_tokens", "acceptance_rate")},
            "draft_model": drafting.draft and drafting.draft.name, "head": drafting.head,
        },
        "usd_per_hour": prediction.usd and prediction.usd.triple,
        "usd_per_month": month.triple if month and not scenario.offline else None,
        "price_tier": None if price is None else "own" if price.own else price.tier,
        "price_source": str(price) if price else None,
        "usd_per_mtok_output": prediction.usd_per_mtok_output and prediction.usd_per_mtok_output.triple,
        "power_w": prediction.watts and prediction.watts.triple,
        "joules_per_output_token": prediction.joules and prediction.joules.triple,
        "start_up_s": begins.total.triple if (begins := start_up(deployment, scenario.storage)) else None,
    }  # fmt: skip
    return shown | (_loaded(scenario, prediction, performance) if performance else {"predicted": None})


def _pools(prediction: Prediction) -> dict[str, Any] | None:
    """Both pools and what lies between them; null where every replica does both."""
    first, workload = prediction.prefill, prediction.workload
    if first is None or workload is None:
        return None
    link, each = handover(first, prediction.deployment)
    pools = {
        role: {
            "workers": pool.layout.replicas, "spare_workers": pool.spare_replicas, "gpus": pool.gpus,
            "layout": dict(vars(pool.with_replicas(1).layout)),
            "engine_args": {name: value for name, value in vars(pool.args).items() if value is not None},
        }
        for role, pool in zip(("prefill", "decode"), prediction.pools, strict=True)
    }  # fmt: skip
    return {**pools, "link_gb_per_s": link / 1e9, "kv_transfer_ms_mean": each * workload.prompt.mean * 1e3}


def _loaded(scenario: Scenario, prediction: Prediction, performance: Performance) -> dict[str, Any]:
    """The part under load."""
    return {
        "predicted": {
            **{f"{name}_ms": {at: (performance.at(name, at) * 1e3).triple for at in POINTS} for name in LATENCIES},
            "output_tps": performance.output_tps.triple, "request_tps": performance.request_tps.triple,
            "kv_usage": performance.kv_usage, "kv_usage_p99": performance.kv_usage_p99,
            "preemptions_per_request": performance.preemptions, "decode_batch_mean": performance.decode_batch,
            "requests_replayed": performance.requests,
        },
        "service_level": [
            {
                "metric": target.metric, "percentile": target.percentile, "limit_ms": target.seconds * 1e3,
                "predicted_ms": ((value := performance.at(target.metric, target.percentile)) * 1e3).triple,
                "holds": not value.mid > target.seconds,
            }
            for target in scenario.service_level
        ],
        "waits_grow": performance.waits_grow, "refused_share": prediction.refused,
        "capacity_rps": performance.capacity and performance.capacity.triple,
        "planned_rps": asked_rps(scenario, prediction),
        "headroom": free_share(scenario, prediction),
    }  # fmt: skip


def _day(scaling: Scaling, renting: Renting) -> dict[str, Any]:
    """The part of a day of traffic; its costs are those of 24 hours."""
    return {
        "rps": list(scaling.rates), "replicas": list(scaling.replicas), "share_of_limit": list(scaling.largest),
        "hours_missed": list(scaling.misses), "requests_replayed": scaling.requests,
        "gpu_hours": scaling.gpu_hours, "gpu_hours_fixed": scaling.fixed_gpu_hours, "saved": scaling.saved,
        "threshold": scaling.threshold, "lead_s": scaling.lead_s, "stabilization_s": scaling.stable_s,
        "drain_s": scaling.drain_s, "starts": scaling.starts, "usd_per_day": dict(renting.usd),
        "cheaper_up_to": [
            {"what": first, "than": second, "requests_per_day": most if math.isfinite(most) else None}
            for (first, second), most in renting.up_to.items()
        ],
    }  # fmt: skip


def told(plan: Plan) -> str:
    """The answer in a dozen lines."""
    scenario, best, found = plan.scenario, plan.best, plan.performance
    values: dict[str, Any] = {"plan": plan, "asked": scenario, "best": best, "found": found}
    if best and found:
        values |= {"launches": launches, "hours": run_hours(scenario, best)}
        drawn = [f"{value:,.{2 if value.mid < 10 else 0}f} {what}" for what, value in energy(scenario, best)]
        values |= {"price": price_per_hour(best.deployment.gpu, scenario.prices)}
        values |= {"power": drawn, "promises": [_promise(target, found) for target in scenario.service_level]}
        values |= {"pools_left_out": left_out(scenario), "not_written": not_written(plan), "handover": handover}
        values["promises"] += _not_promised(scenario, found)
        values |= {"sure": confidence(plan), "scripts": [name for name in to_measure(plan) if name.endswith(".sh")]}
        values |= {"passed_over": passed_over(plan), "bases": BASES}
        values |= {"spare": free_share(scenario, best.prediction) or 0.0}
        values |= {"planned": asked_rps(scenario, best.prediction)}
        values |= {"start_up": start_up(best.deployment, scenario.storage)}
        values |= {"growth": growth(plan), "share_why": unusual_share(best.deployment)}
    return aligned(parted("plan", **values))


def understood(scenario: Scenario) -> str:
    """What a scenario asks, line by line."""
    head = one_line(f"{scenario.name}: {scenario.question}")
    return f"{head}\n{aligned(parted('check', asked=scenario, served=model(scenario.model), price_of=price_per_hour))}"


def parted(template: str, **values: Any) -> list[list[str]]:
    """What a template says, its lines parted at their first bar."""
    return [line.split(" | ", 1) for line in render(template, **values).splitlines() if line]


def _promise(target: Target, found: Performance) -> tuple[str, str]:
    """What becomes of a promise, with its name."""
    value, limit = found.told(target.metric, target.percentile), milliseconds(target.seconds)
    if math.isnan(value.mid):
        return target.name, f"none, as answers have one token; promised {limit}"
    if math.isinf(value.mid):
        return target.name, f"grows for as long as it runs, promised {limit}: broken"
    state = held(target, value)
    shown = f"{value * 1e3:,.0f} ms" if state != "broken" else milliseconds(value.mid, target.seconds)
    return target.name, f"{shown}, promised {limit}: {state}"


def _not_promised(scenario: Scenario, found: Performance) -> list[tuple[str, str]]:
    """The p95 of TTFT, TPOT and E2E where users wait and nothing is promised of it."""
    said = LATENCIES if scenario.offline else {"itl", *(target.metric for target in scenario.service_level)}
    beside = {name: found.told(name, "p95") for name in LATENCIES if name not in said}
    return [
        (f"p95 {name.upper()}", f"{value * 1e3:,.0f} ms, not promised")
        for name, value in beside.items()
        if not math.isnan(value.mid)
    ]


def write(plan: Plan, out: Path, report: Path | None = None) -> tuple[str, ...]:
    """Write `plan.json`, the plan's files and a finished `report` into `out`, together or not at all; their names.

    Those of an earlier plan that this one has not are removed. Raises `PlannerError` where `out` cannot be written.
    """
    chosen, asked = plan.chosen, plan.scenario
    texts = (
        documents(chosen.prediction, asked.service_level, asked.storage, asked.wanted, plan.scaling) if chosen else {}
    )
    kept = {SECRETS} if _filled_in(out / SECRETS) else set()
    texts = {name: text for name, text in texts.items() if name not in kept} | _measured(plan)
    texts["plan.json"] = json.dumps(answer(plan), indent=2, allow_nan=False) + "\n"
    paths = [out / name for name in (*texts, *([report.name] if report else []))]
    spare(asked.files, paths)
    for place in {out, *(path.parent for path in paths)}:
        folder(place)
    stale = [out / name for name in _earlier(out) if name not in {*texts, *kept}]
    with replacing(*paths, stale=stale) as parts:
        for part, path, text in zip(parts, paths, texts.values(), strict=False):
            part.write_text(text, encoding="utf-8")
            if path.name == SECRETS:
                part.chmod(0o600)
        if report:
            shutil.copyfile(report, parts[-1])
    for place in {path.parent for path in stale} - {out}:
        with suppress(OSError):  # something else lies there
            place.rmdir()
    return tuple(texts)


def _filled_in(path: Path) -> bool:
    """Whether a file of variables sets any."""
    return os.path.exists(path) and any(line.strip() and line[0] != "#" for line in read_text(path).splitlines())


def _earlier(out: Path) -> set[str]:
    """The files that the `plan.json` of `out` came with: others of such names are its owner's."""
    try:
        return {*FILES, *(MEASURE + name for name in FILES)} & set(
            parse_json(read_text(out / "plan.json"), "plan.json")["files"]
        )
    except (PlannerError, LookupError, TypeError):
        return set()
