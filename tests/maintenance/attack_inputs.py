"""Attacks on what comes in: hostile files, rows and flags, given to the doors that users have.

`python tests/maintenance/attack_inputs.py --count 100000 --jobs 2` makes so many inputs, always the same of a
`--seed`, and prints one line per violation: an exception that is no `PlannerError`, a refusal that
is no single sentence, a planted secret that is shown, a figure of an answer that is NaN, negative or
infinite, over 10 s or 1 GB.
"""

import argparse
import contextlib
import copy
import csv
import io
import json
import math
import os
import random
import re
import resource
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # which the suite replaces

from metrics_pages import Server
from scenario_generator import generate
from shipped import small_plan
from test_output_files import MEASURED
from test_plan_command import QUESTION
from test_shown_secrets import FORMS, PLANTED, find_planted

from planner.calibration.benchmark_results import read_benchmark_results
from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment, deploy_on
from planner.memory.memory_plan import plan_memory
from planner.models.registry import _merge_entry_config, list_models, load_model
from planner.planning.scenario import apply_overrides, load_scenario
from planner.simulator.schedule_cases import run_schedule_case
from planner.tools.batch import answer_point, predict_row
from planner.tools.diagnostics import diagnose
from planner.tools.diagnostics.log_comparison import EXAMPLE_LOG, explain_log_file
from planner.tools.diagnostics.metrics_pages import build_traffic_profile
from planner.tools.fleet.allocation import FleetOption, plan_fleet
from planner.tools.fleet.tables import format_fleet_plan
from planner.tools.lint.report import lint
from planner.tools.sweep_points import read_sweep
from planner.ui import cli
from planner.workload.length_distribution import LengthDistribution
from planner.workload.traces import AZURE_COLUMNS, MOONCAKE_FIELDS, PLAIN_COLUMNS, read_trace
from planner.workload.workload import Workload

SECONDS, BYTES = 10.0, 10**9
"""Of one input: on its processor, and at once."""
SIGNED = re.compile(r"_lo$|^error|^warnings|^id$|kv_available")
"""Figures that may be negative: the low ends of what does not fit."""
JUNK: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**53 + 1, -(2**63), 10**30, 10**400, 1e-300, 1e300,
    math.nan, math.inf, -0.0,
    "", " ", "nan", "inf", "-1", "1e400", "9" * 5000, "1:30", "yes", "off", "0x10", "١٢", "²",
    "a" * 100_000, "../..",
    "/", ".", "/dev/zero", "/dev/stdin", "\x00", "\ud800", "a\nb", "\x1b[31m", "$(id)", "`id`",
    "{{x}}", "%s", "**",
    "[a", "!!python/object:os.system x", "*a", "&a", "<<", [], {}, [[]], {"": None}, [1, "x", None],
    {"a": {"b": [1]}},
]  # fmt: skip
TEXT = ["[" * 30_000, "- " * 20_000, '{"a":' * 30_000, "\x00", "\ufeff", "\r", "\n\n", '"', "'", ",", ";", "\t", ":",
        "}", "9" * 6000, "a" * 100_000, "nan", "-1", "inf", "1e999", "&a [*a]", "<<: *a", "\u2028", "# "]  # fmt: skip
Door = Callable[[random.Random, Path], Any]


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of nested mappings and lists."""
    if isinstance(data, dict | list):
        for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
            yield data, key
            yield from places(value)


def scaled(number: float, by: float) -> float:
    return number * by if abs(number) < 1e300 else number


def spoilt(data: Any, rng: random.Random) -> Any:
    """A copy with a few values dropped, scaled, or replaced by junk or by one another; half the time just scaled."""
    data, mild = copy.deepcopy(data), rng.random() < 0.5
    for _ in range(rng.choice((1, 1, 2, 4))):
        known = [(at, key) for at, key in places(data) if not mild or type(at[key]) in (int, float)]
        if not known:
            break
        at, key = rng.choice(known)
        kind = rng.random()
        if mild:
            at[key] = scaled(at[key], rng.choice((0, 0.25, 0.5, 2, 3, 16, 1000)))
        elif kind < 0.15:
            del at[key]
        elif kind < 0.4 and type(at[key]) in (int, float):
            at[key] = scaled(
                at[key], rng.choice((-1, 0, 0.5, 1e-9, 10, 1000, 10**6, 10**12, 10**20))
            )
        elif kind < 0.5:
            other, name = rng.choice(known)
            at[key] = copy.deepcopy(
                other.get(name) if isinstance(other, dict) else other[name : name + 1]
            )
        else:
            at[key] = copy.deepcopy(rng.choice(JUNK))
    return data


def torn(text: str, rng: random.Random) -> bytes:
    """Now and then with text cut, doubled or put in, or bytes that are no UTF-8."""
    if rng.random() < 0.85:
        return text.encode("utf-8", "surrogatepass" if rng.random() < 0.5 else "replace")
    start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    middle = rng.choice(
        ("", 2 * text[start:end], rng.choice(TEXT), rng.choice(TEXT) + text[start:end])
    )
    raw = (text[:start] + middle + text[end:]).encode("utf-8", "replace")
    return (
        bytes(byte ^ (rng.random() < 1e-3) * rng.randrange(256) for byte in raw[:50_000])
        if rng.random() < 0.2
        else raw
    )


def written(path: Path, text: str, rng: random.Random) -> Path:
    path.write_bytes(torn(text, rng))
    return path


ATOMS = ("a", "e", ".", "*", "+", "?", "(", ")", "|", "[a-z]", r"\d", "{2,}", "^", "$", "(?=", "(?!", r"\1", "layers",
         "[", r"\.", "(?i)", "(?P<a>", "mixer", ".*", "(a|e)", "\\")  # fmt: skip


def configuration(rng: random.Random, folder: Path) -> Any:
    config = spoilt(_merge_entry_config(rng.choice(list_models())), rng)
    if rng.random() < 0.3:
        patterns = [
            "re:" * (rng.random() < 0.8) + "".join(rng.choices(ATOMS, k=rng.choice((3, 9, 30))))
            for _ in range(3)
        ]
        groups = {"a": {"weights": {"num_bits": 8}, "targets": patterns}}
        config["quantization_config"] = {"quant_method": "fp8", "config_groups": rng.choice((None, groups)),
                                         "ignore": patterns}  # fmt: skip
    path = written(folder / "config.json", json.dumps(config), rng)
    return plan_memory(
        deploy_on(load_model(path), rng.choice(("H100", "L4", "B200")), tp=rng.choice((1, 2, 8)))
    )


ASKED: dict[str, Any] = {
    "other_tenants_gib": 6144, "replicas_at_least": 2, "pools": True, "spare_replicas": 1,
    "workload.day": [320, 107, 66, 25, 20, 22, 35, 108, 231, 311, 445, 453] * 2,
    "adapters": {"count": 20, "ranks": [8, 64], "zipf": 1.1, "max_loras": 4, "max_cpu_loras": 20},
    "instead": {"serverless": {"usd_per_gpu_second": 0.001, "cold_start": 30, "idle_seconds": 60, "warm_replicas": 1},
                "api": {"usd_per_mtok_input": 0.5, "usd_per_mtok_output": 1.5}},
    "engine_args.revision": "main", "engine_args.limit_mm_per_prompt": "image=2,video=0",
}  # fmt: skip
"""What few scenarios ask."""


def question(rng: random.Random, folder: Path) -> Any:
    written(
        folder / "day.csv", "arrival,prompt_tokens,output_tokens\n0,9,9\n5,9,9\n86400,9,9\n", rng
    )
    asked = {**ASKED, "workload.day": rng.choice((ASKED["workload.day"], "campus-rag", "day.csv"))}
    few = {name: asked[name] for name in rng.sample(sorted(ASKED), rng.choice((0, 1, 1, 4)))}
    data = apply_overrides(generate(rng.randrange(300), folder)[1], few, "mine")
    data = (
        spoilt(
            {name: data[name] for name in few if name in data} if rng.random() < 0.3 else data, rng
        )
        or data
    )
    whole = {**apply_overrides(QUESTION, few, "mine"), **data}
    with contextlib.suppress(yaml.YAMLError):
        asked = load_scenario(written(folder / "mine.yaml", yaml.safe_dump(whole), rng))
        return f"{asked} {asked.daily_profile or ''}"


def trace(rng: random.Random, folder: Path) -> Any:
    fields = rng.choice((AZURE_COLUMNS, PLAIN_COLUMNS, MOONCAKE_FIELDS, ("time_ms", "isl", "osl")))
    rows = [dict(zip(fields, (i, 100 + i, 20), strict=True)) for i in range(20)]
    if rng.random() < 0.5:
        rows = spoilt([row | {"hash_ids": [1, 2, i]} for i, row in enumerate(rows)], rng)
        found = read_trace(
            written(folder / "t.jsonl", "\n".join(json.dumps(row) for row in rows), rng)
        )
    else:
        cells = spoilt([list(fields), *(list(row.values()) for row in rows)], rng)
        lines = [
            ",".join(map(str, row if isinstance(row, list) else [row]))[:200_000] for row in cells
        ]
        found = read_trace(
            written(folder / "t.csv", "\n".join(lines) + "\n" * rng.choice((0, 1, 3000)), rng)
        )
    workload = Workload.from_trace(found)
    return {
        "rate": found.rate,
        "burst": found.burstiness,
        "hits": found.prefix_hit_rate,
        "context": workload.mean_decode_context,
    }


def log(rng: random.Random, folder: Path) -> Any:
    text = EXAMPLE_LOG.read_text(encoding="utf-8")
    for _ in range(rng.randrange(4)):
        if hits := list(re.finditer(r"(?<=[=: (])[\w.',-]{1,40}", text)):
            hit = rng.choice(hits)
            text = text[: hit.start()] + str(rng.choice(JUNK))[:200_000] + text[hit.end() :]
    return explain_log_file(
        written(folder / "vllm.log", text, rng), rng.choice(("H100", "H100", None, "L4"))
    )


ROW = {"id": "1", "model": "meta-llama/Llama-3.1-8B-Instruct", "gpu": "H100", "tp": "1", "isl": "1000", "osl": "200",
       "concurrency": "8"}  # fmt: skip
MORE = {"request_rate": "2", "isl_p95": "2000", "max_model_len": "8192", "block_size": "16",
        "engine_version": "0.19.0", "gpu_memory_utilization": "0.9", "max_num_seqs": "64",
        "quantization": "fp8",
        "burstiness": "1", "replicas": "2",
        "prefix_tokens": "100", "max_num_batched_tokens": "2048", "speculative_method": "ngram",
        "dtype": "auto",
        "num_speculative_tokens": "3", "other_tenants_gib": "2", "gpu_total_gib": "79",
        "weight_bits": "8", "pp": "1",
        "prefill_tp": "1", "decode_tp": "2", "trace": "t.csv", "model_config": "config.json",
        "engine": "sglang",
        "num_prompts": "50", "kv_cache_dtype": "fp8", "prefix_hit_rate": "0.5", "interconnect": "pcie"}  # fmt: skip


def cells(rng: random.Random) -> dict[str, str]:
    row = ROW | {name: MORE[name] for name in rng.sample(sorted(MORE), rng.randrange(5))}
    return {str(key): str(value) for key, value in spoilt(row, rng).items()}


def row(rng: random.Random, folder: Path) -> Any:
    return predict_row(cells(rng), folder)


BENCH = {"model_id": "meta-llama/Llama-3.1-8B-Instruct", "completed": 4, "total_input_tokens": 400, "failed": 0,
         "total_output_tokens": 80, "request_rate": 2.0, "burstiness": 1.0, "max_concurrency": 4,
         "mean_ttft_ms": 50.0,
         "mean_tpot_ms": 8.0, "input_lens": [100] * 4, "output_lens": [20] * 4,
         "start_times": [0, 1, 2, 3]}  # fmt: skip


def benchmark(rng: random.Random, folder: Path) -> Any:
    if rng.random() < 0.4:
        measured = cells(rng) | {
            "measured_ttft_ms": str(rng.choice([50, *JUNK])),
            "measured_tpot_ms": "9",
        }
        file = io.StringIO(newline="")
        csv.writer(file).writerows([measured, measured.values()])
        found = read_benchmark_results([written(folder / "b.csv", file.getvalue(), rng)])
    else:
        text = json.dumps(spoilt(rng.choice((BENCH, [BENCH, BENCH])), rng))
        found = read_benchmark_results([written(folder / "b.json", text, rng)], _deployment())
    return [
        {
            "rate": p.workload.rate or 0,
            "tokens": p.workload.mean_decode_context,
            "ttft": p.ttft or 0,
        }
        for p in found.points
    ]


def _deployment() -> Deployment:
    return deploy_on("meta-llama/Llama-3.1-8B-Instruct", "H100")


REQUESTS = [
    {"id": f"r{i}", "arrival_step": i, "output_len": 9, "prompt_len": 30 + i} for i in range(6)
]
REQUESTS.append(
    {"id": "n", "arrival_step": 9, "output_len": 4, "prompt": [["sys", 32], ["out:r1", 5]]}
)
CASE = {"config": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 40, "block_size": 16,
                   "max_model_len": 400, "groups": [{"type": "full"}]}, "requests": REQUESTS}  # fmt: skip


def case(rng: random.Random, folder: Path, spoil: Callable[..., Any] = spoilt) -> Any:
    cached = CASE["config"] | {"enable_prefix_caching": rng.random() < 0.5}
    data = spoil({"config": cached, "requests": REQUESTS}, rng)
    return run_schedule_case(
        written(folder / "case.json", json.dumps(data), rng), folder / "steps.csv"
    )


DOCUMENTED_EXITS = (0, 1, 3, 4)
"""Exit codes of an answer; 2 is a refusal, 70 a failure of the planner."""
COMMANDS = {
    name: {(action.option_strings or [action.dest])[0]: action for action in parser._actions[1:]}
    for name, parser in cli.build_parser()._subparsers._group_actions[0].choices.items()
}
"""Of every command its arguments, by their names, without --help."""
FILES = {
    "mine.yaml": yaml.safe_dump(QUESTION),
    "runs.csv": MEASURED,
    "vllm.log": EXAMPLE_LOG.read_text(encoding="utf-8"),
    "bench.json": json.dumps(BENCH),
    "case.json": json.dumps(CASE),
    "own.yaml": "H100-SXM: {coefficients: {}}",
    "scenario.yaml": "mine",
    "rows.csv": "id,model,gpu,isl,osl,tp\n1,meta-llama/Llama-3.1-8B-Instruct,H100,9,9,1\n",
}
LIKELY = {"rows": "rows.csv", "log": "vllm.log", "case": "case.json", "results": "runs.csv",
          "--calibration": "own.yaml", "--fixed-step-time": "0.1", "--gpu": "H100"}  # fmt: skip
FIELDS = ("workload.rate", "gpus.0.at_most", "model", "engine_args", "a" + ".b" * 5000, "question", "engine_version",
          "gpus.0.gpu", "workload.prompt_tokens", "service_level.ttft.p95", "headroom")  # fmt: skip


def command(rng: random.Random, folder: Path) -> Any:
    """A command with hostile arguments, in a folder of hostile files, none of which may change."""

    def any_text() -> str:
        raw = (
            str(rng.choice(JUNK + TEXT))
            .replace("\x00", "0")[:120_000]
            .encode("utf-8", "surrogatepass")
        )
        return (
            os.fsdecode(raw)
            if rng.random() < 0.5
            else os.fsdecode(torn(rng.choice((*FIELDS, "H100", "8")), rng)[:99])
        )

    def value(argument: str) -> str:
        if argument == "--set":
            return f"{rng.choice((*FIELDS, any_text()))}={any_text()}"
        if argument in ("--out", "--step-log", "--requests", "file"):
            return rng.choice(
                ("o.yaml", "out", "o.csv", "o" + any_text(), *line[1:2])
            )  # no name may be nan
        known = "chat-70b" if argument == "scenario" else rng.choice(list(FILES))
        likely = LIKELY.get(argument, "mine.yaml")
        return (
            any_text()
            if line[0] == "report"
            else rng.choice((likely, likely, known, str(folder), any_text()))
        )

    before = {name: written(folder / name, text, rng).read_bytes() for name, text in FILES.items()}
    line = [rng.choice(list(COMMANDS))]
    for argument, action in COMMANDS[line[0]].items():
        if rng.random() < {"file": 0.3, "--out": 0}.get(argument, 0.6 * argument.startswith("--")):
            continue
        given = value(argument) if action.nargs != 0 else ""
        line.append(
            given if not argument.startswith("--") else f"{argument}={given}" if given else argument
        )
    told, said = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    try:
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(told),
            contextlib.redirect_stderr(said),
        ):
            status = cli.main([part.replace("\x00", "0") for part in line])
    except SystemExit:  # argparse, which has its own sentence
        return None
    finally:
        for name, text in before.items():
            assert (folder / name).read_bytes() == text, f"{line} changed {name}"
    if status == 2:
        raise PlannerError(said.getvalue().removeprefix("headroom: ").rstrip("\n"))
    assert status in DOCUMENTED_EXITS, f"{line} ended with {status}: {said.getvalue()!r:.300}"
    told.seek(0)
    return told.read()


GUIDES = yaml.safe_load(
    (Path(__file__).parents[1] / "data" / "commands.yaml").read_text(encoding="utf-8")
)
TRTLLM = {"kv_cache_config": {"free_gpu_memory_fraction": 0.9, "dtype": "fp8", "enable_block_reuse": True},
          "cuda_graph_config": {"max_batch_size": 64, "enable_padding": True}, "max_batch_size": 64,
          "speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 3},
          "max_num_tokens": 8192,
          "enable_attention_dp": True, "enable_chunked_prefill": False}  # fmt: skip
KINDS = ("serve.txt", "vllm.service", "compose.yaml", "pod.yaml", "serve.sh")
COMPOSED = "services:\n  vllm:\n    image: vllm/vllm-openai:v0.11.0\n    command: {}\n"


def served(rng: random.Random, folder: Path) -> Any:
    """A command of a guide with words swapped, doubled, dropped or hostile, as text or in a file."""
    words = rng.choice([*GUIDES["guides"], *GUIDES["current"]])["command"].split()
    for _ in range(rng.choice((0, 1, 3))):
        at, other = (
            rng.randrange(len(words)),
            rng.choice((rng.choice(words), str(rng.choice(JUNK))[:50_000])),
        )
        words[at : at + 1] = rng.choice(
            ([], [other], [words[at], other], [f"{words[at]}={other}"], 2 * [words[at]])
        )
    text, kind = " ".join(words or ["vllm"]), rng.choice((None, None, *KINDS))
    if kind == "vllm.service":
        text = f"[Service]\nExecStart={text}\n"
    elif kind and kind.endswith("yaml"):
        text = COMPOSED.format(json.dumps(words))
    elif kind is None and rng.random() < 0.2:
        settings = rng.choice(
            (yaml.safe_dump(spoilt(TRTLLM, rng)), json.dumps(spoilt(TRTLLM, rng)))
        )
        text = (
            "trtllm-serve nvidia/Llama-3.1-8B-Instruct-FP8 --tp_size 2 --extra_llm_api_options"
            f" {folder}/t.yaml"
        )
        if rng.random() < 0.5:
            text = (
                "cat <<EOF"
                f" >{folder}/t.yaml\n{settings}\n{rng.choice(('EOF', 'EOF', 'EO', ''))}\n{text}"
            )
        else:
            written(folder / "t.yaml", settings, rng)
    what = str(written(folder / kind, text, rng)) if kind else text
    version, to = (
        rng.choice((None, None, "0.8.5", "0.33.0", "nightly", f"nightly{rng.choice(JUNK)}"[:99])),
        rng.choice((None, None, "0.33.0", "0.6.0", "nightly")),
    )
    return lint(
        what,
        version,
        gpu=rng.choice((*4 * [None], "H100", "4xH100", f"{rng.choice(JUNK)}xH100")),
        to=to,
    ).to_json()


@cache
def _pages() -> list[str]:
    """Of a healthy server."""
    with tempfile.TemporaryDirectory() as folder:
        load = Workload(
            LengthDistribution.from_public_traces(500, "prompt"),
            LengthDistribution.from_public_traces(100, "output"),
            rate=4.0,
        )
        return [
            path.read_text()
            for path in Server(_deployment(), load, requests=100).pages(Path(folder))[0]
        ]


def _metrics(rng: random.Random, folder: Path) -> list[Path]:
    """One or two pages with figures and names spoilt."""
    found = []
    for n, page in enumerate(_pages()[: rng.choice((1, 2, 2))]):
        lines = page.splitlines()
        for _ in range(rng.choice((0, 1, 5, 50))):
            at = rng.randrange(len(lines))
            given = (
                str(rng.choice(JUNK))[:1000]
                if rng.random() < 0.05
                else str(rng.random() * 10 ** rng.randrange(9))
            )
            other = f"{lines[at].rpartition(' ')[0]} {given}"
            twice, earlier = f"{lines[at]}\n{lines[at]}", lines[rng.randrange(at + 1)]
            lines[at] = rng.choice(
                ("", other, twice, earlier, lines[at].replace('le="', 'le="' + given[:9]))
            )
        found.append(written(folder / f"{n}.txt", "\n".join(lines) + "\n", rng))
    return found


def metrics(rng: random.Random, folder: Path) -> Any:
    """What is wrong with a server, by its pages and sometimes its log."""
    saved = (
        written(folder / "vllm.log", EXAMPLE_LOG.read_text(encoding="utf-8"), rng)
        if rng.random() < 0.2
        else None
    )
    return diagnose(_metrics(rng, folder), saved, seconds=rng.choice((None, 60.0))).to_json()


def profile(rng: random.Random, folder: Path) -> Any:
    """A server's traffic, which has to be one that a scenario takes."""
    found = yaml.safe_load(build_traffic_profile(_metrics(rng, folder), rng.choice((None, 60.0))))
    (folder / "mine.yaml").write_text(yaml.safe_dump({**QUESTION, **found}))
    return str(load_scenario(folder / "mine.yaml").workload)


def points(rng: random.Random, folder: Path) -> Any:
    """A sweep, and the closed form's answer to its first point."""
    grid = {
        "workload.rate": [1, 2],
        "headroom": {"low": 0, "high": 0.5, "points": 3},
        "deployment.tp": [1, 2],
    }
    grid |= {
        name: [value, *([1, *rng.sample(JUNK, 1)] if rng.random() < 0.5 else [])]
        for name, value in ASKED.items()
    }
    data = {
        "answer": "predict",
        "scenario": "edge-8b-24gb",
        "deployment": {"gpu": "L4"},
        "set": {"headroom": 0.1},
    }
    some = {name: grid[name] for name in rng.sample(sorted(grid), rng.randrange(1, 4))}
    drawn = {
        "sample": {
            "points": 5,
            "seed": 1,
            "fields": {**some, "headroom": {"low": 0.01, "high": 1, "scale": "log"}},
        }
    }
    whole = {**data, **rng.choice(({"grid": some}, drawn))}
    found = read_sweep(written(folder / "sweep.yaml", yaml.safe_dump(spoilt(whole, rng)), rng))
    return (
        answer_point(found, found.points[0])
        if found.asked == "predict" and not found.replay
        else None
    )


def fleet(rng: random.Random, folder: Path) -> Any:
    """A fleet of scenarios whose candidates are given."""
    data = {"scenarios": ["chat-70b", "edge-8b-24gb"], "stock": {"H100-SXM": 8, "L4": 4}, "growth": 1.3,
            "usd_per_month_at_most": 73_000, "power_at_most": 9000}  # fmt: skip
    path = written(folder / "fleet.yaml", yaml.safe_dump(spoilt(data, rng)), rng)
    plan = small_plan()
    assert plan.chosen
    needs = (rng.randrange(1, 9), rng.random() * 10, rng.random() * 700)
    does = (rng.choice((1.0, 0.5, 1e-6)), 1 + rng.random(), rng.randrange(1, 9))
    with mock.patch(
        "planner.tools.fleet.allocation.plan_on_gpu",
        lambda _, kind, *__: [FleetOption(plan, plan.chosen, kind, *needs, *does)],
    ):
        return format_fleet_plan(plan_fleet(path))


NAMES = ("HF_TOKEN", "DB_PASS", "MYTOKEN", "CREDS", "UNHEARD_OF", "JWT", "PGPASS", "X")
HARMLESS = ("VLLM_LOGGING_LEVEL", "NCCL_DEBUG", "SGLANG_X")
"""Names whose values are shown, unless they have the form of a secret."""


OPTIONS = ("--db-pass", "--pin", "--my-setting", "--api-key", "--hf-token", "--license")
"""What holds a secret and is no option of an engine, or one whose value is never shown."""


def _plant(rng: random.Random, forms: Sequence[str] = (*FORMS, "{}")) -> str:
    """A secret in one of the forms that its owners give it, or plain; each holds `PLANTED`."""
    return rng.choice(forms).format(f"{PLANTED}{rng.randrange(10**9):09}")


def _planted_words(rng: random.Random) -> list[str]:
    """A command; a plain secret is known as one only where an option does not belong to the engine."""
    words = ["vllm", "serve", rng.choice(("Qwen/Qwen3-8B", "/models/own", "$MODEL"))]
    for _ in range(rng.randrange(1, 5)):
        own, secret = rng.choice(OPTIONS), _plant(rng)
        known, formed = rng.choice(("--max-model-len", "--port", "--no-such")), _plant(rng, FORMS)
        words += rng.choice(([own, secret], [f"{own}={secret}"], [known, formed], [formed]))
    return words


def secrets(rng: random.Random, folder: Path) -> Any:
    """A file with planted secrets, linted, compared, or read as a log: its answer is shown to all."""
    variables = {rng.choice(NAMES): _plant(rng) for _ in range(rng.randrange(1, 5))}
    variables |= {rng.choice(HARMLESS): _plant(rng, FORMS)}
    words = _planted_words(rng)
    line = " ".join(map(shlex.quote, words))
    service = {"image": "vllm/vllm-openai:v0.18.0", "command": words[2:], "environment": variables}
    pod = {"containers": [{"image": "vllm/vllm-openai:v0.18.0", "args": words[2:], "env": [
        {"name": name, "value": value} for name, value in variables.items()]}]}  # fmt: skip
    given = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    unit = "".join(f"Environment={name}={value}\n" for name, value in variables.items())
    kind, text = rng.choice((
        ("compose.yaml", yaml.safe_dump({"services": {"llm": service}})),
        ("pod.yaml", yaml.safe_dump({"kind": "Pod", "spec": pod})),
        ("serve.sh", f"export {given}\n{line}\n"), ("serve.sh", f"{given} {line}\n"),
        ("vllm.service", f"[Service]\n{unit}ExecStart=/usr/bin/{line}\n"),
        ("serve.log", f"INFO non-default args: {variables}\nValueError: {_plant(rng, FORMS)} is wrong\n"),
        ("rows.csv", f"id,model,gpu\n1,{_plant(rng, FORMS)},H100\n"),
        ("scenario.yaml", yaml.safe_dump({**QUESTION, "model": _plant(rng, FORMS)})),
    ))  # fmt: skip
    path = str(_whole(folder / kind, text))
    gpu = rng.choice((None, None, "H100", _plant(rng, FORMS)))
    if kind == "serve.log":
        explanation = rng.choice((lambda: diagnose(log=path), lambda: explain_log_file(path, gpu)))
        return str(explanation())
    if kind == "rows.csv":
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            return str([predict_row(one) for one in csv.DictReader(file)])
    if kind == "scenario.yaml":
        return str(load_scenario(path))
    report = lint(path, gpu=gpu, to=rng.choice((None, "0.33.0")))
    return f"{report}{json.dumps(report.to_json())}"


def _whole(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


DOORS: dict[str, Door] = {
    door.__name__: door
    for door in (
        configuration, question, trace, log, row, benchmark, case, command, served, metrics,
        profile, points, fleet, secrets
    )
}  # fmt: skip


def impossible(answer: Any) -> str:
    """What no figure of an answer may be, or nothing."""
    if isinstance(answer, dict):
        if answer.get("status") == "error":
            return complaint(str(answer["error"]))
        for name, value in answer.items():
            if (
                re.search("tpot|itl", str(name)) and value != value
            ):  # an answer of one token has none
                continue
            if isinstance(value, int | float) and not (
                math.isfinite(value) and (value >= 0 or SIGNED.search(name))
            ):
                return f"{name} is {value}"
    elif isinstance(answer, list):
        return next(filter(None, map(impossible, answer)), "")
    said = "" if isinstance(answer, dict | list) else str(answer)
    if control := re.search(r"[^\S \n]|[\x00-\x08\x0e-\x1f\x7f-\x9f]", said):
        return f"the control character {control[0]!r}"
    return "nan or inf" if re.search(r"\b(nan|inf)\b(?!/)", said) else ""


def complaint(refusal: str) -> str:
    """What is wrong with a refusal, or nothing."""
    if len(refusal) > 400 or not refusal or not refusal.isprintable():
        return f"a refusal of {len(refusal)} letters: {refusal!r:.300}"
    if (
        re.search(r"[.!?] [A-Z][a-z]+ ", re.sub(r"'[^']*'|\"[^\"]*\"", "", refusal))
        or "cannot be planned (" in refusal
    ):
        return f"no one sentence: {refusal}"
    return ""


def ready() -> None:
    """Compile the scheduler, whose time is not the inputs'."""
    with tempfile.TemporaryDirectory() as folder:
        case(random.Random(3), Path(folder), lambda data, _: data)


def most_bytes() -> int:
    """That this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _late(*_: object) -> None:
    raise TimeoutError(f"not done after {2 * SECONDS:.0f} s")


def attacked(door: str, seed: int) -> tuple[str, str]:
    """How the input `seed` of a door fared (ok or refused), and what was wrong with that."""
    rng, began, before = random.Random(f"{door} {seed}"), time.process_time(), most_bytes()
    signal.signal(signal.SIGPROF, _late)
    signal.setitimer(signal.ITIMER_PROF, 2 * SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        try:
            answer = DOORS[door](rng, Path(folder))
            wrong, fared = impossible(answer), "ok"
            wrong = wrong or "; ".join(find_planted(str(answer)))
        except PlannerError as error:
            wrong, fared = complaint(str(error)), "refused"
            wrong = wrong or "; ".join(find_planted(str(error)))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            wrong, fared = (
                (
                    f"{type(error).__name__}: {error!s:.150}"
                    f" ({Path(where.filename).name}:{where.lineno})"
                ),
                "broke",
            )
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    if (taken := time.process_time() - began) > SECONDS:
        wrong = wrong or f"it took {taken:.0f} s"
    if (peak := most_bytes()) > max(BYTES, before + BYTES / 4):  # a suite has had its own before
        wrong = wrong or f"it took {peak:,} bytes"
    return fared, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=DOORS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so many")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    resource.setrlimit(resource.RLIMIT_AS, (8 * BYTES, 8 * BYTES))
    turns = (
        [options.only]
        if options.only
        else [*DOORS, *2 * [door for door in DOORS if door not in ("row", "command")]]
    )
    doors = [turns[number % len(turns)] for number in range(options.count)]
    seeds = range(options.seed * 10**7, options.seed * 10**7 + options.count)
    fates, wrongs, began = Counter[str](), 0, time.monotonic()
    with ProcessPoolExecutor(options.jobs, initializer=ready) as pool:
        for door, seed, (fared, wrong) in zip(
            doors, seeds, pool.map(attacked, doors, seeds, chunksize=50), strict=True
        ):
            fates[f"{door} {fared}"] += 1
            if time.monotonic() - began > options.seconds:
                pool.shutdown(wait=False, cancel_futures=True)
                break
            if wrong:
                wrongs += 1
                print(f"{door} {seed}: {wrong}", flush=True)
    answered = sum(number for fate, number in fates.items() if fate.endswith(" ok"))
    print(
        f"{fates.total():,} inputs, {answered:,} answered, {wrongs} violations: "
        + ", ".join(f"{k} {n}" for k, n in sorted(fates.items()))
    )
    return int(wrongs > 0)


if __name__ == "__main__":
    sys.exit(main())
