"""Read the results of other load generators as what `vllm bench serve --save-result` writes.

Forms, each with what was read (2026-11):

- SGLang's bench_serving, JSON lines: vLLM's names, except `e2e_latency` (docs/developer_guide).
- GuideLLM, `benchmarks.json`: benchmark/schemas/generative of 0.5, config.strategy or args.strategy.
- AIPerf, `profile_export_aiperf.json` of 0.10, and genai-perf's `profile_export_genai_perf.json`.
- The table that vLLM and SGLang print at the end ("Serving Benchmark Result"); SGLang's has no TPOT since 2025.
- What trtllm-bench prints ("PERFORMANCE OVERVIEW"): docs/source/performance/perf-benchmarking of 1.2.
- inference-perf, `stage_N_lifecycle_metrics.json` and its summary: docs/reports.md, in seconds.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from planner.core.errors import PlannerError, add_error_context
from planner.core.redaction import quote_value

STATISTICS = ("mean", "p50", "p95", "p99")
MAX_SPREAD_REQUESTS = 2000
"""Requests whose lengths are drawn from the percentiles that a form states."""
MAX_TOKENS = 2**31
MAX_NUMBER = 1e15
"""Below what every number of a result is: counts of tokens, milliseconds."""
Fields = dict[str, Any]
TABLE_HEAD = "Serving Benchmark Result"
_TABLE_LABELS = {
    "Successful requests": "completed",
    "Failed requests": "failed",
    "Maximum request concurrency": "max_concurrency",
    "Max request concurrency": "max_concurrency",
    "Request rate configured (RPS)": "request_rate",
    "Traffic request rate": "request_rate",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Request throughput (req/s)": "request_throughput",
    "Output token throughput (tok/s)": "output_throughput",
    **{
        f"{statistic} {metric} (ms)": f"{statistic.lower()}_{field}_ms"
        for statistic in ("Mean", "Median", "P50", "P95", "P99")
        for metric, field in (
            ("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2EL", "e2el"),
            ("E2E Latency", "e2el"),
        )
    },
}  # fmt: skip
"""vLLM's names of fields by the labels that it and SGLang print."""
_TABLE_LINE = re.compile(
    rf"^[#>\s]{{0,9}}({'|'.join(map(re.escape, _TABLE_LABELS))}):[ \t]+(inf|\d[\d.]{{0,20}})", re.M
)


_TRTLLM_HEAD = "= PERFORMANCE OVERVIEW"
_TRTLLM_LABELS = {
    "Number of requests": "completed",
    "Number of concurrent requests": "max_concurrency",
    "Average Input Length (tokens)": "mean_input_tokens",
    "Average Output Length (tokens)": "mean_output_tokens",
    "Request Throughput (req/sec)": "request_throughput",
    "Total Output Throughput (tokens/sec)": "output_throughput",
    "Average request latency (ms)": "mean_e2el_ms",
    "Average time-to-first-token [TTFT] (ms)": "mean_ttft_ms",
    "Average time-per-output-token [TPOT] (ms)": "mean_tpot_ms",
    **{
        f"[{metric}] {statistic.upper()}": f"{statistic}_{field}_ms"
        for statistic in ("p50", "p95", "p99")
        for metric, field in (("TTFT", "ttft"), ("TPOT", "tpot"), ("Latency", "e2el"))
    },
}  # fmt: skip
"""vLLM's names of fields by the labels that trtllm-bench prints."""
_TRTLLM_LINE = re.compile(
    rf"^[#>\s]{{0,9}}({'|'.join(map(re.escape, _TRTLLM_LABELS))})\s*:[ \t]+(\d[\d.E+]{{0,20}})",
    re.M,
)
_COUNTS = ("completed", "failed", "max_concurrency", "total_input_tokens", "total_output_tokens")


def read_printed_tables(text: str) -> list[Fields]:
    """Return the runs whose tables a text has, as they are printed; none without a table.

    Older releases print rate and concurrency above the table.
    """
    runs, above = list[Fields](), text.partition(TABLE_HEAD)[0]
    for part in text.split(TABLE_HEAD)[1:]:
        table, _, below = part.partition("\n=====")
        pairs = _TABLE_LINE.findall(f"{above}\n{table}")
        runs.append({_TABLE_LABELS[label]: float(value) for label, value in pairs})
        above = below
    before, *parts = text.split(_TRTLLM_HEAD)
    for part in parts:
        pairs = _TRTLLM_LINE.findall(f"{before}\n{part}")
        run: Fields = {_TRTLLM_LABELS[label]: float(value) for label, value in pairs}
        before = part
        for side in ("input", "output"):
            if mean := run.pop(f"mean_{side}_tokens", 0.0):
                run[f"total_{side}_tokens"] = mean * run.get("completed", 0.0)
        runs.append(run)
    return [
        {name: round(value) if name in _COUNTS else value for name, value in run.items()}
        for run in runs
    ]


class _Part:
    """An object of a result file, with the names of the fields that lead to it."""

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self.data, self.path = data, path

    def get_part(self, *names: str) -> "_Part":
        """Return the object in the field `names`; an empty one where there is none."""
        found, path = self.data, self.path
        for name in names:
            value, path = found.get(name), f"{path}.{name}" if path else name
            if not isinstance(found := {} if value is None else value, Mapping):
                raise PlannerError(f"field {path} takes an object, got {quote_value(value)}")
        return _Part(found, path)

    def get_number(self, name: str) -> float | None:
        """Return the number in the field `name`; None where there is none."""
        if (value := self.data.get(name)) is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < MAX_NUMBER:
            path = f"{self.path}.{name}" if self.path else name
            raise PlannerError(
                f"field {path} takes a number from 0 to 1e15, got {quote_value(value)}"
            )
        return float(value)

    def read_number(self, name: str) -> float:
        """Return the number in the field `name`, which has to be there."""
        if (value := self.get_number(name)) is None:
            raise PlannerError(f"field {f'{self.path}.' * bool(self.path)}{name} is missing")
        return value

    def list_parts(self, name: str) -> list["_Part"]:
        """List the objects of the list in the field `name`; none where there is no list."""
        found = self.data.get(name)
        named = {
            f"{name}[{n}]": each for n, each in enumerate(found if isinstance(found, list) else ())
        }
        return [_Part(named, self.path).get_part(each) for each in named]


def _derive_tpot(run: object) -> object:
    """Return a run with the mean time per output token that its form leaves out, as SGLang's does.

    By definition it is what is left of a request's time after the first token, over its other tokens.
    """
    if not isinstance(run, Mapping) or "mean_tpot_ms" in run:
        return run
    names = ("mean_e2el_ms", "mean_ttft_ms", "mean_itl_ms", "total_output_tokens", "completed")
    whole, first, gap, tokens, count = map(_Part(run).get_number, names)
    if None not in (whole, first, tokens) and count and (tokens or 0.0) > count:
        tpot = ((whole or 0.0) - (first or 0.0)) / ((tokens or 0.0) / count - 1)
        return {**run, "mean_tpot_ms": tpot, "derived": "E2E and TTFT"}
    return {**run, "mean_tpot_ms": gap, "derived": "ITL"} if gap else run


def convert_to_vllm_runs(data: object, location: str) -> list[object]:
    """Return the runs of a result file in vLLM's form; what is of no known form stays as it is.

    Raises `PlannerError` that names `location` and the field of what a known form lacks.
    """
    if not isinstance(data, Mapping):
        return [data]
    with add_error_context(f"{location}, as a result of a load generator"):
        if isinstance(data.get("benchmarks"), list):
            return [_convert_guidellm(run) for run in _Part(data).list_parts("benchmarks")]
        for key, convert in _CONVERTERS.items():
            if key in data:
                return [_derive_tpot(convert(_Part(data)))]
        return [_derive_tpot(data)]


def _convert_guidellm(run: _Part) -> Fields:
    """Convert a benchmark of GuideLLM.

    Its time per output token counts the first one too; its inter-token latency is that of requests,
    weighted by their tokens.
    """
    metrics = run.get_part("metrics")

    def read(name: str) -> _Part:
        summary = metrics.get_part(name, "successful")
        percentiles = summary.get_part("percentiles").data
        return _Part({**percentiles, **summary.data}, summary.path)

    settings = "config" if run.data.get("config") else "args"
    strategy = run.get_part(settings, "strategy")
    kind = strategy.data.get("type_")
    old, new = run.get_part("run_stats", "requests_made"), metrics.get_part("request_totals")
    totals = new if new.data else old
    load: Fields = {"max_concurrency": 1 if kind == "synchronous" else strategy.data.get("streams")}
    if rate := strategy.get_number("rate"):
        load = {"request_rate": rate, "burstiness": 1.0 if kind == "poisson" else 1e6}
    lengths = read("prompt_token_count"), read("output_token_count")
    return {
        **_convert_latencies(
            {
                "ttft": (read("time_to_first_token_ms"), 1.0),
                "tpot": (read("inter_token_latency_ms"), 1.0),
                "e2el": (read("request_latency"), 1e3),
            }
        ),
        **_describe_requests(int(totals.read_number("successful")), *lengths),
        "failed": int(totals.get_number("errored") or 0),
        "request_throughput": read("requests_per_second").get_number("mean"),
        "output_throughput": read("output_tokens_per_second").get_number("mean"),
        **load,
    }


def _convert_aiperf(data: _Part) -> Fields:
    """Convert a result of AIPerf or genai-perf, whose inter-token latency is per request."""
    times = {
        "ttft": "time_to_first_token",
        "tpot": "inter_token_latency",
        "itl": "inter_chunk_latency",
        "e2el": "request_latency",
    }
    latencies = {name: (_add_mean(data.get_part(key)), 1.0) for name, key in times.items()}
    lengths = (_add_mean(data.get_part(f"{side}_sequence_length")) for side in ("input", "output"))
    whole = data.get_part("request_latency")
    count = data.get_part("request_count").get_number("avg") or whole.get_number("count")
    throughput = data.get_part("request_throughput").read_number("avg")
    settings = data.get_part("input_config")
    phases = (p for p in settings.list_parts("phases") if not p.data.get("exclude_from_results"))
    phase = next(phases, settings.get_part("loadgen"))
    rate = phase.get_number("rate") or phase.get_number("request_rate")
    concurrency = phase.get_number("concurrency")
    if rate is None and concurrency is None:  # genai-perf: by Little's law
        concurrency = max(round(throughput * whole.read_number("avg") / 1e3), 1)
    if count is None:
        count = 10 * (concurrency or 10)
    poisson = phase.data.get("type", "poisson") == "poisson"
    return {
        **_convert_latencies(latencies),
        **_describe_requests(int(count), *lengths),
        "request_throughput": throughput,
        "output_throughput": data.get_part("output_token_throughput").get_number("avg"),
        **({"request_rate": rate, "burstiness": 1.0 if poisson else 1e6} if rate else {}),
        "max_concurrency": concurrency,
    }


def _convert_inference_perf(data: _Part) -> Fields:
    good, load = data.get_part("successes"), data.get_part("load_summary")
    times = {
        "ttft": "time_to_first_token",
        "tpot": "time_per_output_token",
        "itl": "inter_token_latency",
        "e2el": "request_latency",
    }
    latencies = {name: (good.get_part("latency", key), 1e3) for name, key in times.items()}
    served = good.get_part("throughput").read_number("requests_per_sec")
    rate = load.get_number("achieved_rate") or load.get_number("requested_rate") or served
    concurrency = load.get_number("concurrency")
    lengths = (good.get_part("prompt_len"), good.get_part("output_len"))
    return {
        **_convert_latencies(latencies),
        **_describe_requests(int(good.read_number("count")), *lengths),
        "failed": int(data.get_part("failures").get_number("count") or 0),
        "request_throughput": served,
        "output_throughput": good.get_part("throughput").get_number("output_tokens_per_sec"),
        **({"max_concurrency": concurrency} if concurrency else {"request_rate": rate}),
    }


_CONVERTERS: Mapping[str, Callable[[_Part], Fields]] = {
    "mean_e2e_latency_ms": lambda part: {
        key.replace("_e2e_latency_ms", "_e2el_ms"): value for key, value in part.data.items()
    },
    "request_latency": _convert_aiperf,
    "successes": _convert_inference_perf,
}
"""What converts an object that has this key."""


def _add_mean(summary: _Part) -> _Part:
    return _Part({**summary.data, "mean": summary.data.get("avg")}, summary.path)


def _convert_latencies(read: Mapping[str, tuple[_Part, float]]) -> Fields:
    """Return vLLM's fields of latencies, each a summary and the ms of its unit."""
    fields: Fields = {}
    for name, (summary, ms) in read.items():
        for statistic in STATISTICS:
            named = "median" if statistic not in summary.data and statistic == "p50" else statistic
            if (value := summary.get_number(named)) is not None:
                fields[f"{statistic}_{name}_ms"] = value * ms
    return fields


def _describe_requests(count: int, prompt: _Part, output: _Part) -> Fields:
    """Return vLLM's fields of so many requests by the summaries of their lengths."""
    fields: Fields = {"completed": count}
    for seed, (side, summary) in enumerate({"input": prompt, "output": output}.items()):
        fields[f"total_{side}_tokens"] = round(summary.read_number("mean") * count)
        fields[f"{side}_lens"] = _spread_lengths(summary, min(count, MAX_SPREAD_REQUESTS), seed)
    if not (fields["input_lens"] and fields["output_lens"]):
        del fields["input_lens"], fields["output_lens"]
    return fields


def _spread_lengths(summary: _Part, count: int, seed: int) -> list[int]:
    """Return lengths with these percentiles and mean, in random order; none without percentiles."""
    places = {0.0: "min", 50.0: "median", 100.0: "max"}
    for key in summary.data:
        digits = key[1:] if key[:1] == "p" else ""
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", digits):  # p5, p99.9; GuideLLM's p05 and p999
            places[float(digits) / (10 if len(digits) == 3 and "." not in digits else 1)] = key
    read = {q: summary.get_number(name) for q, name in places.items()}
    known = {q: value for q, value in sorted(read.items()) if value is not None}
    if len(known) < 3 or count < 1:
        return []
    mean = summary.read_number("mean")
    if max(mean, *known.values()) >= MAX_TOKENS:
        raise PlannerError(f"field {summary.path}: expected lengths below 2^31 tokens")
    tokens = np.interp(100 * (np.arange(count) + 0.5) / count, [*known], [*known.values()])
    tokens = np.maximum(np.rint(tokens * mean / max(tokens.mean(), 1e-9)), 1).astype(int)
    return [int(each) for each in np.random.default_rng(seed).permutation(tokens)]
