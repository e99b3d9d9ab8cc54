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

from planner.core.errors import PlannerError

STATISTICS = ("mean", "p50", "p95", "p99")
MAX_SPREAD_REQUESTS = 2000
"""Requests whose lengths are drawn from the percentiles that a form states."""
MAX_TOKENS = 2**31
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


def _derive_tpot(run: object) -> object:
    """Return a run with the mean time per output token that its form leaves out, as SGLang's does.

    By definition it is what is left of a request's time after the first token, over its other tokens.
    """
    if not isinstance(run, Mapping) or "mean_tpot_ms" in run:
        return run
    whole, first, gap = (run.get(f"mean_{name}_ms") for name in ("e2el", "ttft", "itl"))
    tokens, count = run.get("total_output_tokens"), run.get("completed")
    numbers = (whole, first, tokens, count)
    if None not in numbers and count and tokens > count:  # else of no number, which is told later
        tpot = ((whole or 0.0) - (first or 0.0)) / (tokens / count - 1)
        return {**run, "mean_tpot_ms": tpot, "derived": "E2E and TTFT"}
    return {**run, "mean_tpot_ms": gap, "derived": "ITL"} if gap else run


def convert_to_vllm_runs(data: object, location: str) -> list[object]:
    """Return the runs of a result file in vLLM's form; what is of no known form stays as it is.

    Raises `PlannerError` that names `location` and the field of what a known form lacks.
    """
    if not isinstance(data, Mapping):
        return [data]
    try:
        if isinstance(data.get("benchmarks"), list):
            return [_convert_guidellm(run) for run in data["benchmarks"]]
        for key, convert in _CONVERTERS.items():
            if key in data:
                return [_derive_tpot(convert(data))]
        return [_derive_tpot(data)]
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise PlannerError(
            f"{location}, as a result of a load generator: {type(error).__name__} at {error}"
        ) from None


def _convert_guidellm(run: Mapping[str, Any]) -> Fields:
    """Convert a benchmark of GuideLLM.

    Its time per output token counts the first one too; its inter-token latency is that of requests,
    weighted by their tokens.
    """
    metrics = run["metrics"]

    def read(name: str) -> Fields:
        summary = metrics[name].get("successful") or {}
        return {**(summary.get("percentiles") or {}), **summary}

    settings = run.get("config") or run.get("args") or {}
    strategy = settings.get("strategy") or {}
    kind = strategy.get("type_")
    totals = metrics.get("request_totals") or run["run_stats"]["requests_made"]
    load: Fields = {"max_concurrency": 1 if kind == "synchronous" else strategy.get("streams")}
    if rate := strategy.get("rate"):
        load = {"request_rate": rate, "burstiness": 1.0 if kind == "poisson" else 1e6}
    lengths = read("prompt_token_count"), read("output_token_count")
    count = int(totals["successful"])
    return {
        **_convert_latencies(
            {
                "ttft": (read("time_to_first_token_ms"), 1.0),
                "tpot": (read("inter_token_latency_ms"), 1.0),
                "e2el": (read("request_latency"), 1e3),
            }
        ),
        **_describe_requests(count, *lengths),
        "failed": int(totals.get("errored") or 0),
        "request_throughput": read("requests_per_second").get("mean"),
        "output_throughput": read("output_tokens_per_second").get("mean"),
        **load,
    }


def _convert_aiperf(data: Mapping[str, Any]) -> Fields:
    """Convert a result of AIPerf or genai-perf, whose inter-token latency is per request."""
    latencies = {
        "ttft": (_add_mean(data["time_to_first_token"]), 1.0),
        "tpot": (_add_mean(data.get("inter_token_latency") or {}), 1.0),
        "itl": (_add_mean(data.get("inter_chunk_latency") or {}), 1.0),
        "e2el": (_add_mean(data["request_latency"]), 1.0),
    }
    lengths = (_add_mean(data[f"{side}_sequence_length"]) for side in ("input", "output"))
    count = (data.get("request_count") or {}).get("avg") or data["request_latency"].get("count")
    throughput = data["request_throughput"]["avg"]
    settings = data.get("input_config") or {}
    phase = next(
        (each for each in settings.get("phases") or [] if not each.get("exclude_from_results")),
        settings.get("loadgen") or {},
    )
    rate, concurrency = phase.get("rate") or phase.get("request_rate"), phase.get("concurrency")
    if rate is None and concurrency is None:  # genai-perf: by Little's law
        concurrency = max(round(throughput * data["request_latency"]["avg"] / 1e3), 1)
    if count is None:
        count = 10 * (concurrency or 10)
    poisson = phase.get("type", "poisson") == "poisson"
    return {
        **_convert_latencies(latencies),
        **_describe_requests(int(count), *lengths),
        "request_throughput": throughput,
        "output_throughput": (data.get("output_token_throughput") or {}).get("avg"),
        **({"request_rate": rate, "burstiness": 1.0 if poisson else 1e6} if rate else {}),
        "max_concurrency": concurrency,
    }


def _convert_inference_perf(data: Mapping[str, Any]) -> Fields:
    good, load = data["successes"], data.get("load_summary") or {}
    times = {
        "ttft": "time_to_first_token",
        "tpot": "time_per_output_token",
        "itl": "inter_token_latency",
        "e2el": "request_latency",
    }
    latencies = {name: (good["latency"].get(key) or {}, 1e3) for name, key in times.items()}
    served = good["throughput"]["requests_per_sec"]
    concurrency = load.get("concurrency")
    return {
        **_convert_latencies(latencies),
        **_describe_requests(int(good["count"]), good["prompt_len"], good["output_len"]),
        "failed": int((data.get("failures") or {}).get("count") or 0),
        "request_throughput": served,
        "output_throughput": good["throughput"].get("output_tokens_per_sec"),
        **(
            {"max_concurrency": concurrency}
            if concurrency
            else {"request_rate": load.get("achieved_rate") or load.get("requested_rate") or served}
        ),
    }


_CONVERTERS: Mapping[str, Callable[[Mapping[str, Any]], Fields]] = {
    "mean_e2e_latency_ms": lambda data: {
        key.replace("_e2e_latency_ms", "_e2el_ms"): value for key, value in data.items()
    },
    "request_latency": _convert_aiperf,
    "successes": _convert_inference_perf,
}
"""What converts an object that has this key."""


def _add_mean(summary: Mapping[str, Any]) -> Fields:
    return {**summary, "mean": summary.get("avg")}


def _convert_latencies(read: Mapping[str, tuple[Mapping[str, Any], float]]) -> Fields:
    """Return vLLM's fields of latencies, each a summary and the ms of its unit."""
    fields: Fields = {}
    for name, (summary, ms) in read.items():
        known = {**summary, "p50": summary.get("p50", summary.get("median"))}
        for statistic in STATISTICS:
            if known.get(statistic) is not None:
                fields[f"{statistic}_{name}_ms"] = known[statistic] * ms
    return fields


def _describe_requests(count: int, prompt: Mapping[str, Any], output: Mapping[str, Any]) -> Fields:
    """Return vLLM's fields of so many requests by the summaries of their lengths."""
    fields: Fields = {"completed": count}
    for seed, (side, summary) in enumerate({"input": prompt, "output": output}.items()):
        fields[f"total_{side}_tokens"] = round(summary["mean"] * count)
        fields[f"{side}_lens"] = _spread_lengths(summary, min(count, MAX_SPREAD_REQUESTS), seed)
    if not (fields["input_lens"] and fields["output_lens"]):
        del fields["input_lens"], fields["output_lens"]
    return fields


def _spread_lengths(summary: Mapping[str, Any], count: int, seed: int) -> list[int]:
    """Return lengths with these percentiles and mean, in random order; none without percentiles."""
    known = {0.0: summary.get("min"), 50.0: summary.get("median"), 100.0: summary.get("max")}
    for key, value in summary.items():
        digits = key[1:] if key[:1] == "p" else ""
        if digits.replace(".", "", 1).isdecimal():  # p5, p99.9; GuideLLM's p05 and p999
            known[float(digits) / (10 if len(digits) == 3 and "." not in digits else 1)] = value
    places = np.array(sorted((q, value) for q, value in known.items() if value is not None))
    if len(places) < 3:
        return []
    lengths = [*places[:, 1], summary["mean"]]
    if count < 1 or not all(0 <= length < MAX_TOKENS for length in lengths):
        raise ValueError(f"lengths of {count} requests: {summary}"[:200])
    tokens = np.interp(100 * (np.arange(count) + 0.5) / count, places[:, 0], places[:, 1])
    tokens = np.maximum(np.rint(tokens * summary["mean"] / tokens.mean()), 1).astype(int)
    return [int(each) for each in np.random.default_rng(seed).permutation(tokens)]
