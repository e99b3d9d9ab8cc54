"""Read SGLang's results and printed tables as what `vllm bench serve --save-result` writes."""

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
_TABLES: Sequence[Mapping[str, Any]] = read_yaml(Path(__file__).with_name("benchmark_forms.yaml"))
_COUNTS = ("completed", "failed", "max_concurrency", "total_input_tokens", "total_output_tokens")


def read_printed_tables(text: str) -> list[object]:
    """Return the runs whose tables a text has, as they are printed; none without a table."""
    runs = list[object]()
    for form in _TABLES:
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


def convert_to_vllm_run(data: object, location: str) -> object:
    """Return a run in vLLM's form: SGLang's has its names but for one; what is of no form stays.

    Raises `PlannerError` that names `location` and the field of what is no number.
    """
    if not isinstance(data, Mapping) or {"mean_tpot_ms", "mean_e2e_latency_ms"} & {*data} == {
        "mean_tpot_ms"
    }:
        return data
    with add_error_context(f"{location}, as a result of a load generator"):
        return _complete({k.replace("_e2e_latency_", "_e2el_"): v for k, v in data.items()})


def _find_number(run: Mapping[str, Any], name: str) -> float | None:
    """Return the number in a field; None without one."""
    value = run.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value < MAX_NUMBER):
        raise PlannerError(f"field {name} takes a number from 0 to 1e15, got {quote_value(value)}")
    return None if value is None else float(value)


def _complete(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a run with totals of tokens by their means, and the TPOT that its form leaves out.

    By definition it is what is left of a request's time after the first token, over its other tokens.
    """
    fields = dict(run)
    numbers = {
        name: _find_number(run, name)
        for name in (*_COUNTS, "mean_input_tokens", "mean_output_tokens")
    }
    count = numbers["completed"]
    for side in ("input", "output"):
        if count and (mean := numbers[f"mean_{side}_tokens"]):
            fields[f"total_{side}_tokens"] = mean * count
    fields |= {k: round(v) for k, v in fields.items() if k in _COUNTS and isinstance(v, float)}
    if "mean_tpot_ms" in run:
        return fields
    names = ("mean_e2el_ms", "mean_ttft_ms", "mean_itl_ms", "total_output_tokens")
    whole, first, gap, tokens = (_find_number(fields, name) for name in names)
    if whole is not None and first is not None and tokens and count and tokens > count:
        tpot = (whole - first) / (tokens / count - 1)
        return {**fields, "mean_tpot_ms": tpot, "derived": "E2E and TTFT"}
    return {**fields, "mean_tpot_ms": gap, "derived": "ITL"} if gap else fields
