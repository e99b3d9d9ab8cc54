"""Forty varied questions whose files every tool has to take: engines, layouts, drafts, adapters, odd names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from shipped import answer_of

from planner.deploy import LaunchSpec, build_launch
from planner.deploy.manifests import MANIFEST_FILES, explain_unsupported_kinds
from planner.models.registry import _merge_entry_config
from planner.planning.evaluation import get_candidate_workload
from planner.planning.plan import Plan
from planner.planning.prediction import Prediction, predict
from planner.planning.scenario import parse_scenario
from planner.planning.scenario_schema import DEFAULT_ARTIFACTS
from planner.planning.search import search_analytically
from planner.ui.plan_files import write_plan_files

LLAMA, LARGE = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"
EXPERTS = "deepseek-ai/DeepSeek-V3"
ODD = (
    """it's "quoted" `touch ran` $(touch ran) ${HOME} $$ %n""",
    "a # b: [c] {{ 7 * 7 }} {% raw %} ![x](y) <b> \\n\\",
    "Ünï-模型 🚀 --option=1 ; touch ran",
    "- &anchor *alias !!tag | > @x",
)
"""Folders that somebody may keep a model in."""


def _asked(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "question": "Do its files work?", "model": LLAMA,
        "gpus": [{"gpu": "H100-SXM", "at_most": 8}],
        "workload": {
            "prompt_tokens": {"mean": 900, "p95": 2500}, "output_tokens": {"mean": 200, "p95": 500},
            "rate": 2,
        },
        "service_level": {"ttft": {"p95": 5000}, "tpot": {"p95": 100}},
    }  # fmt: skip
    load = {**base["workload"], **changes.pop("workload", {})}
    return {
        **base,
        **changes,
        "workload": {name: value for name, value in load.items() if value is not None},
    }


def _drafts(method: str, **more: Any) -> dict[str, Any]:
    return {
        "speculation": {
            "method": method,
            "num_speculative_tokens": 3,
            "acceptance_rate": 0.8,
            **more,
        }
    }


NODES = {
    "model": EXPERTS,
    "gpus": [{"gpu": "H200-SXM", "at_most": 16}],
    "layout": {"tp": 8, "pp": 2},
}
ONE_NODE = {"model": EXPERTS, "gpus": [{"gpu": "H200-SXM", "at_most": 8}]}
ADAPTERS = {"adapters": {"count": 20, "ranks": [8, 16], "max_loras": 4}}
DAY = {
    "day": [1, 1, 1, 1, 1, 2, 6, 12, 25, 40, 50, 55, 60, 55, 50, 45, 40, 30, 20, 12, 6, 3, 2, 1],
    "rate": 60,
}
QUESTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "vllm 0.8.5": {"engine_version": "0.8.5"},
    "vllm 0.10.0": {"engine_version": "0.10.0", "engine_args": {"enable_prefix_caching": False}},
    "vllm 0.14.1": {"engine_version": "0.14.1", "engine_args": {"gpu_memory_utilization": 0.8, "block_size": 32}},
    "vllm 0.18.0": {"engine_version": "0.18.0", "engine_args": {"async_scheduling": False, "dtype": "float16"}},
    "vllm 0.20.2": {"engine_version": "0.20.2", "engine_args": {"scheduling_policy": "priority"}},
    "replicas": {"workload": {"rate": 60}},
    "spares": {"workload": {"rate": 60}, "spare_replicas": 1},
    "a day": {"workload": DAY, "layout": {"tp": 1, "pp": 1}},
    "converted to fp8": {"quantization": ["fp8"], "kv_cache_dtype": ["fp8"], "gpus": [{"gpu": "L40S", "at_most": 4}]},
    "a checkpoint to name": {"quantization": ["awq"], "gpus": [{"gpu": "A10G", "at_most": 4}]},
    "amd": {"gpus": [{"gpu": "MI300X", "at_most": 8}], "layout": {"tp": 2}},
    "gaudi": {"gpus": [{"gpu": "Gaudi-3", "at_most": 8}], "engine_version": "0.10.0"},
    "tensor parallel": {"model": LARGE, "layout": {"tp": 4}},
    "two nodes": {**NODES, "engine_version": "0.20.2"},
    "two nodes of an old version": {**NODES, "engine_version": "0.10.0"},
    "wide experts": {**NODES, "layout": {"dp": 16, "ep": 16}, "engine_version": "0.33.0"},
    "adapters": ADAPTERS,
    "adapters of sglang": {**ADAPTERS, "engine": "sglang"},
    "ngram": _drafts("ngram"),
    "a head to name": _drafts("eagle3"),
    "a head": _drafts("eagle3", head="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
    "a draft model": {"model": LARGE, **_drafts("draft_model", draft_model="meta-llama/Llama-3.2-1B-Instruct")},
    "mtp": {**ONE_NODE, **_drafts("mtp"), "layout": {"tp": 8}},
    "offline": {"workload": {"rate": None, "requests": 40_000, "within_hours": 2}, "service_level": {}},
    "users": {"workload": {"rate": None, "concurrency": 64}},
    "a commit": {"engine_args": {"revision": "refs/pr/12"}},
    "pictures": {"model": "Qwen/Qwen3-VL-32B-Instruct", "engine_args": {"limit_mm_per_prompt": "image=2,video=0"}},
    "code of its repository": {"model": "moonshotai/Kimi-K2-Instruct", "gpus": [{"gpu": "B200", "at_most": 16}]},
    "sglang 0.5.10": {"engine": "sglang", "engine_version": "0.5.10", "layout": {"tp": 2}},
    "sglang, copies of the attention": {**ONE_NODE, "engine": "sglang", "layout": {"dp": 8, "ep": 8}},
    "sglang on two nodes": {**NODES, "engine": "sglang"},
    "sglang with a head": {"engine": "sglang", **_drafts("eagle3", head="some/head")},
    "trtllm": {"engine": "trtllm", "kv_cache_dtype": ["fp8"]},
    "trtllm on two nodes": {**NODES, "engine": "trtllm", **_drafts("mtp")},
    "an odd name": {"model": ODD[0], **_drafts("eagle3", head="it's $HOME/`touch ran`/$(touch ran)")},
    "an odd name in sglang": {"model": ODD[1], "engine": "sglang", "workload": {"rate": 30}},
    "an odd name in trtllm": {"model": ODD[2], "engine": "trtllm", "question": 'x"; touch ran #\n{{ 7 * 7 }}'},
    "another odd name in trtllm": {"model": ODD[3], "engine": "trtllm"},
}  # fmt: skip
SAMPLE = [
    "as it comes", "replicas", "two nodes", "adapters", "a head", "offline", "sglang with a head",
    "trtllm on two nodes",
    "an odd name", "an odd name in sglang", "an odd name in trtllm", "another odd name in trtllm",
]  # fmt: skip
"""Those that have every engine, several machines, drafts, adapters and all odd names among them."""


@dataclass(frozen=True)
class Written:
    """A plan, how a replica of it starts, and the folder with all files that can be written of it."""

    plan: Plan
    prediction: Prediction
    launch: LaunchSpec
    folder: Path

    def texts(self, *names: str) -> Iterator[str]:
        """Those of the files `names` that this plan has."""
        yield from (
            (self.folder / name).read_text() for name in names if (self.folder / name).is_file()
        )


@cache
def written(name: str) -> Written:
    """The answer to one of `QUESTIONS`, with the files of every kind that can start it."""
    folder = Path(mkdtemp(prefix="headroom-"))
    asked = _asked(**QUESTIONS[name])
    if asked["model"] in ODD:
        model = folder / asked["model"]
        model.mkdir()
        (model / "config.json").write_text(
            json.dumps(_merge_entry_config("meta-llama/Llama-3.1-8B"))
        )
        asked["model"] = str(model)
    plan = search_analytically(parse_scenario(asked, name))  # any deployment will do
    assert plan.chosen, plan
    served, scenario = plan.chosen.deployment, plan.scenario
    if scenario.speculation:  # whether or not it pays here
        served = replace(served, speculation=scenario.speculation.to_config())
    prediction = predict(served, get_candidate_workload(scenario, served), scenario.prices)
    plan = replace(plan, chosen=replace(plan.chosen, deployment=served, prediction=prediction))
    started = build_launch(prediction)
    refused = explain_unsupported_kinds(prediction, [*MANIFEST_FILES])
    wanted = [*DEFAULT_ARTIFACTS, *(kind for kind in MANIFEST_FILES if kind not in refused)]
    out = folder / "out"
    write_plan_files(
        answer_of(replace(plan, scenario=replace(plan.scenario, output_kinds=tuple(wanted)))), out
    )
    return Written(plan, prediction, started, out)
