"""Read the results of other load generators as what `vllm bench serve --save-result` writes.

The forms are in `benchmark_forms.yaml`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.core.errors import PlannerError, add_error_context
from planner.core.readers import read_yaml
from planner.core.redaction import quote_value

STATISTICS = ("mean", "p50", "p95", "p99")
MAX_NUMBER = 1e15
"""Below what every number of a result is: counts of tokens, milliseconds."""
Fields = dict[str, Any]
_FORMS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("benchmark_forms.yaml"))
_COUNTS = ("completed", "failed", "max_concurrency", "total_input_tokens", "total_output_tokens")
_REQUIRED = ("completed", "mean_input_tokens", "mean_output_tokens")
_NO_BURSTS = 1e6
"""Burstiness of arrivals at equal distances."""


def read_printed_tables(text: str) -> list[object]:
    """Return the runs whose tables a text has, as they are printed; none without a table."""
    runs = list[object]()
    for form in _FORMS["tables"]:
        labels = "|".join(map(re.escape, form["labels"]))
        line = re.compile(rf"^[#>\s]{{0,9}}({labels})\s*:[ \t]+(inf|\d[\d.E+]{{0,20}})", re.M)
        above, *parts = text.split(form["begins"])
        for part in parts:
            table, _, below = part.partition(form["ends"])
            pairs = line.findall(f"{above}\n{table}")
            run = {form["labels"][label]: float(value) for label, value in pairs}
            runs.append(_complete(run))
            above = below or part
    return runs


def convert_to_vllm_runs(data: object, location: str) -> list[object]:
    """Return the runs of a result file in vLLM's form; what is of no known form stays as it is.

    Raises `PlannerError` that names `location` and the field of what a known form lacks.
    """
    if not isinstance(data, Mapping):
        return [data]
    form = next((form for form in _FORMS["json"] if form["has"] in data), None)
    if form is None and {"mean_tpot_ms", "mean_e2e_latency_ms"} & {*data} == {"mean_tpot_ms"}:
        return [data]
    with add_error_context(f"{location}, as a result of a load generator"):
        if form is None:  # SGLang's has vLLM's names but for this one
            return [_complete({k.replace("_e2e_latency_", "_e2el_"): v for k, v in data.items()})]
        runs = data[form["runs"]] if "runs" in form else [data]
        if not isinstance(runs, list):
            raise PlannerError(f"field {form['has']} takes a list, got {quote_value(runs)}")
        return [_convert(run, form) for run in runs]


def _convert(data: object, form: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a run of a form."""
    run: Fields = {name: _find_number(data, paths) for name, paths in form["fields"].items()}
    for name in _REQUIRED:
        if run[name] is None:
            raise PlannerError(f"field {' or '.join(form['fields'][name])} is missing")
    for name, (path, ms) in form["latencies"].items():
        for statistic in STATISTICS:
            also = {"mean": "avg", "p50": "median"}.get(statistic, statistic)
            places = [f"{path}.{statistic}", f"{path}.percentiles.{statistic}", f"{path}.{also}"]
            if (value := _find_number(data, places)) is not None:
                run[f"{statistic}_{name}_ms"] = value * ms
    paced, throughput = run.pop("paced", None), run["request_throughput"]
    arrivals = next(filter(None, (_find(data, path) for path in form.get("arrivals", ()))), "")
    if arrivals == "synchronous":
        run["max_concurrency"] = 1
    if run["max_concurrency"] is run.get("request_rate") is None:  # by Little's law, if not paced
        run["request_rate"] = paced
        in_flight = (throughput or 0.0) * run.get("mean_e2el_ms", 0.0) / 1e3
        run["max_concurrency"] = None if paced else max(in_flight, 1.0)
    if run.get("request_rate") and arrivals not in ("", "poisson"):
        run["burstiness"] = _NO_BURSTS
    return _complete({name: value for name, value in run.items() if value is not None})


def _find(data: Any, path: str) -> Any:
    """Return what is in the field `path`; None where there is none."""
    for name in path.split("."):
        data = data[-1] if isinstance(data, list) and data else data
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def _find_number(data: object, paths: Sequence[str]) -> float | None:
    """Return the number in the first of these fields that is there; None without one."""
    found = ((path, _find(data, path)) for path in paths)
    path, value = next((one for one in found if one[1] is not None), ("", None))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value < MAX_NUMBER):
        raise PlannerError(f"field {path} takes a number from 0 to 1e15, got {quote_value(value)}")
    return None if value is None else float(value)


def _complete(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a run with totals of tokens by their means, and the TPOT that its form leaves out.

    By definition it is what is left of a request's time after the first token, over its other tokens.
    """
    fields = dict(run)
    numbers = {name: _find_number(run, [name]) for name in (*_COUNTS, *_REQUIRED)}
    count = numbers["completed"]
    for side in ("input", "output"):
        if count and (mean := numbers[f"mean_{side}_tokens"]):
            fields[f"total_{side}_tokens"] = mean * count
    fields |= {k: round(v) for k, v in fields.items() if k in _COUNTS and isinstance(v, float)}
    if "mean_tpot_ms" in run:
        return fields
    names = ("mean_e2el_ms", "mean_ttft_ms", "mean_itl_ms", "total_output_tokens")
    whole, first, gap, tokens = (_find_number(fields, [name]) for name in names)
    if whole is not None and first is not None and tokens and count and tokens > count:
        tpot = (whole - first) / (tokens / count - 1)
        return {**fields, "mean_tpot_ms": tpot, "derived": "E2E and TTFT"}
    return {**fields, "mean_tpot_ms": gap, "derived": "ITL"} if gap else fields
