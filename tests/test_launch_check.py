"""`headroom verify` passes a server that is the planned one, and names what a fault of it changed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from metrics_pages import Server
from shipped import answer_of

from planner.answers import serialize_answer
from planner.core.errors import PlannerError
from planner.memory.memory_plan import get_memory_plan
from planner.planning.planned_replica import PlannedReplica, load_planned_replica
from planner.planning.scenario import parse_scenario
from planner.planning.search import search_deployments
from planner.tools.diagnostics.launch_check import LaunchCheck, check_launch
from planner.ui.cli import main

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
QUESTION: dict[str, Any] = {
    "model": MODEL, "quantization": ["checkpoint"], "gpus": [{"gpu": "L40S", "at_most": 2}],
    "engine": "vllm", "engine_version": "0.33.0", "calibration": "mine.yaml",
    "workload": {
        "prompt_tokens": {"exactly": 640}, "output_tokens": {"exactly": 48}, "rate": 6.0,
        "shared_prefix": {"tokens": 320, "hit_rate": 0.95},
    },
    "service_level": {"ttft": {"p95": 400}, "tpot": {"p95": 32}}, "engine_args": {"max_num_seqs": 32},
}  # fmt: skip
ON_H100 = {**QUESTION, "calibration": None, "gpus": [{"gpu": "H100", "at_most": 1}]}


@dataclass(frozen=True)
class Fault:
    """How a server differs from its plan."""

    pace: float = 1.0
    kv_fraction: float = 1.0
    max_num_seqs: int | None = None
    hit_rate: float = 1.0  # every prompt of the benchmark begins with the shared prefix


FAULTS = {
    "as planned": Fault(),
    "60% slower": Fault(pace=1.6),
    "30% slower": Fault(pace=1.3),
    "half the KV cache": Fault(kv_fraction=0.5),
    "another batch size": Fault(max_num_seqs=6),
    "colder prefix cache": Fault(hit_rate=0.3),
}
NAMED = {
    "60% slower": "The GPU is slower than planned",
    "half the KV cache": "its KV cache has room for",
    "another batch size": "not run with the planned settings",
    "colder prefix cache": "The prefix cache is cold",
}
OWN_COEFFICIENTS = {
    "memory": 0.893, "memory_fp4": 0.678, "kv": 1.31, "gemm_bf16": 0.951, "gemm_fp8": 0.868,
    "gemm_fp4": 0.399, "gemm_widened": 0.379, "expert_gemm": 0.824, "expert_latency": 0.7,
    "attention": 0.438, "link": 0.633, "allreduce_s": 7.56e-6, "kernel_s": 8.01e-6,
    "token_passes": 1.83, "step_s": 5.36e-4, "row_s": 4.6e-5, "launch_s": 4.57e-6,
    "prompt_s": 2.27e-3, "request_s": 0.0103, "prompt_token_s": 5.5e-6, "pace": 0.945,
}  # fmt: skip
"""Of one machine with an L40S; the catalog's own move with every fit."""


def benchmark(
    planned: PlannedReplica, folder: Path, fault: Fault = FAULTS["as planned"], requests: int = 100
) -> dict[str, Any]:
    """Write a server's pages and log under the planned traffic, and what `vllm bench serve` saves; return that."""
    assert planned.workload
    deployment = planned.deployment.with_args(
        max_num_seqs=fault.max_num_seqs or planned.deployment.args.max_num_seqs
    )
    pool = get_memory_plan(deployment).pool
    pool = replace(pool, num_blocks=int(pool.num_blocks * fault.kv_fraction))
    workload = replace(planned.workload, prefix_hit_rate=fault.hit_rate)
    server = Server(deployment, workload, fault.pace, requests, pool=pool)
    run = server.run()
    end_s = float(run.sent.min() + run.duration)
    for name, moment in (("before", float(run.sent.min())), ("after", end_s)):
        (folder / f"{name}.txt").write_text(server.page(run, moment))
    settings = {"model": MODEL, "max_num_seqs": deployment.args.max_num_seqs}
    (folder / "vllm.log").write_text(
        f"non-default args: {settings}\nGPU KV cache size: {pool.reported_tokens:,} tokens\n"
    )
    measured = {
        f"{statistic}_{name}_ms": float(compute(values)) * 1e3
        for name, values in (("ttft", run.ttft), ("tpot", run.tpot), ("e2el", run.e2e))
        for statistic, compute in (("mean", np.mean), ("p95", lambda each: np.quantile(each, 0.95)))
    }
    bench = {
        **measured, "completed": len(run.output), "duration": run.duration,
        "total_input_tokens": int(run.prompt.sum()), "total_output_tokens": int(run.output.sum()),
        "request_throughput": run.request_tps, "output_throughput": run.output_tps,
        "request_rate": workload.rate, "input_lens": run.prompt.tolist(),
        "output_lens": run.output.tolist(), "start_times": run.sent.tolist(),
    }  # fmt: skip
    (folder / "bench.json").write_text(json.dumps(bench))
    return bench


@dataclass(frozen=True)
class Launch:
    """A folder with the files of one server."""

    plan: Path
    folder: Path
    bench: Mapping[str, Any]

    def check(self, log: bool = True) -> LaunchCheck:
        return check_launch(
            self.plan,
            [self.folder / "bench.json"],
            [self.folder / "before.txt", self.folder / "after.txt"],
            self.folder / "vllm.log" if log else None,
            self.bench["duration"],
        )


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written plan whose step costs were calibrated on one's own GPU, to a few percent."""
    folder = tmp_path_factory.mktemp("plan")
    entry = {
        "coefficients": OWN_COEFFICIENTS,
        "sigma_tpot": 0.04, "sigma_ttft": 0.08, "models": ["llama"], "points": 12,
        "versions": ["0.33.0"], "engine": "vllm", "source": "own benchmarks", "date": "2026-11-01",
        "residuals": "", "kv_cache_dtype": "auto",
    }  # fmt: skip
    (folder / "mine.yaml").write_text(yaml.safe_dump({"L40S": entry}))
    planned = search_deployments(parse_scenario(QUESTION, "question", folder))
    (folder / "plan.json").write_text(json.dumps(serialize_answer(answer_of(planned))))
    return folder


@pytest.fixture(scope="module")
def launches(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launch]:
    """One launch of each kind, benchmarked with the planned traffic."""
    planned, found = load_planned_replica(plan), {}
    for name, fault in FAULTS.items():
        folder = tmp_path_factory.mktemp("launch")
        found[name] = Launch(plan, folder, benchmark(planned, folder, fault))
    return found


def test_the_planned_server_passes(launches: dict[str, Launch]) -> None:
    check = launches["as planned"].check()
    assert check.verdict == "PASS" and not check.deviations
    rows = {row.name.split(",")[0]: row for row in check.checks}
    assert rows["KV cache"].measured == rows["KV cache"].expected.mid
    assert rows["mean TPOT"].measured == pytest.approx(rows["mean TPOT"].expected.mid, rel=0.02)
    assert rows["mean TTFT"].measured == pytest.approx(rows["mean TTFT"].expected.mid, rel=0.1)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("log", [True, False])
def test_a_fault_is_named(name: str, log: bool, launches: dict[str, Launch]) -> None:
    check = launches[name].check(log)
    assert check.verdict == "FAIL"
    (deviation,) = check.deviations  # and nothing else is suspected
    logged = log and name == "another batch size"
    assert ("max_num_seqs is 6, planned 32" if logged else NAMED[name]) in deviation
    assert deviation in str(check)


def test_without_pages_what_is_off_is_named(launches: dict[str, Launch]) -> None:
    for name, off in (
        ("60% slower", "mean TPOT, bench.json is 1."),
        ("half the KV cache", "KV cache is 0.50 times"),
    ):
        files = launches[name].folder
        check = check_launch(launches[name].plan, [files / "bench.json"], log=files / "vllm.log")
        assert check.verdict == "FAIL" and any(off in line for line in check.deviations)


def test_the_exit_code_and_the_page_are_the_verdicts(
    launches: dict[str, Launch], capsys: pytest.CaptureFixture[str]
) -> None:
    good = launches["as planned"]
    words = ["verify", str(good.plan), "--bench", str(good.folder / "bench.json"),
             "--log", str(good.folder / "vllm.log")]  # fmt: skip
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("PASS: ")
    words[3] = str(launches["60% slower"].folder / "bench.json")
    assert main(words) == 1
    text = capsys.readouterr().out
    assert (
        sum(line.endswith(" FAIL") for line in text.splitlines()) >= 2
        and "headroom calibrate" in text
    )
    assert main([*words[:2], *words[4:], "--json"]) == 3  # no benchmark: latencies are unknown
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"] == "NOT MEASURED"


@pytest.mark.parametrize("name", ["as planned", "60% slower"])
def test_live_traffic_alone_is_judged_by_its_pages(name: str, launches: dict[str, Launch]) -> None:
    launch = launches[name]
    pages = [launch.folder / "before.txt", launch.folder / "after.txt"]
    check = check_launch(launch.plan, pages=pages, seconds=launch.bench["duration"])
    rows = {row.name.partition(" of at")[0]: row for row in check.checks}
    assert rows["mean TPOT, live"].measured == pytest.approx(launch.bench["mean_tpot_ms"], rel=0.02)
    assert rows["p95 TTFT"].status == "PASS"
    if name == "as planned":
        assert check.verdict == "PASS" and rows["p95 TPOT"].status == "PASS"
    else:
        assert rows["p95 TPOT"].status == "FAIL"
        assert check.verdict == "FAIL" and "GPU is slower" in check.deviations[0]


def test_a_server_that_did_not_start_fails(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text(
        f"non-default args: {{'model': '{MODEL}', 'max_num_seqs': 32}}\n"
        "Model loading took 14.99 GiB memory and 4.1 seconds\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    check = check_launch(plan, log=tmp_path / "vllm.log")
    assert check.verdict == "FAIL" and "memory" in check.deviations[0]


def test_a_plan_with_drafts_is_compared_and_not_fitted(plan: Path, tmp_path: Path) -> None:
    fields = json.loads((plan / "plan.json").read_text())
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "acceptance_rate": 0.7}
    (tmp_path / "plan.json").write_text(json.dumps({**fields, "speculation": drafts}))
    replica = load_planned_replica(tmp_path)
    assert replica.deployment.speculation and replica.workload
    for slowdown, verdict in ((1.0, "PASS"), (2.5, "FAIL")):
        bench = benchmark(replica, tmp_path, Fault(pace=slowdown), 60)
        check = Launch(tmp_path, tmp_path, bench).check()
        assert check.verdict == verdict
        assert any("accepted drafts" in row.name and row.status == "PASS" for row in check.checks)
    worse = replace(replica.deployment.speculation, acceptance_rate=0.3)
    other = replace(replica, deployment=replace(replica.deployment, speculation=worse))
    bench = benchmark(other, tmp_path, requests=60)
    (deviation,) = Launch(tmp_path, tmp_path, bench).check().deviations
    assert "Drafts are rejected" in deviation


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"pools": {"prefill": {}}}, "prefill and decode pools"),
        ({"question": {"model": MODEL}}, "question|workload"),
        ({"question": ON_H100}, "does not allow vllm on L40S"),
        ({"question": []}, "question"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_checked_is_told(
    fields: dict[str, Any], told: str, plan: Path, tmp_path: Path
) -> None:
    whole = json.loads((plan / "plan.json").read_text()) | fields
    (tmp_path / "plan.json").write_text(json.dumps(whole))
    with pytest.raises(PlannerError, match=told):
        check_launch(tmp_path, log=tmp_path / "none.log")


def test_the_largest_load_that_a_plan_found_is_the_planned_one(plan: Path, tmp_path: Path) -> None:
    fields = json.loads((plan / "plan.json").read_text())
    fields["question"]["workload"]["rate"] = "max"
    (tmp_path / "plan.json").write_text(
        json.dumps({**fields, "max_load": {"rate": 7.5, "even_odds": 9.0}})
    )
    assert load_planned_replica(tmp_path).rate == 7.5


def test_nothing_to_compare_is_told(plan: Path) -> None:
    with pytest.raises(PlannerError, match="--bench, --metrics or --log"):
        check_launch(plan)
