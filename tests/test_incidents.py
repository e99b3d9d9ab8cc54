# ruff: noqa: E501 (lines of logs)
"""`headroom diagnose` on what people post: the true cause first, and nothing on what is healthy.

Inputs are synthetic, in the forms of public reports: periodic lines, a few lines of a page, a page,
two pages, a piece of a log.
"""

from pathlib import Path

import pytest

from planner.tools.diagnostics import diagnose
from planner.tools.diagnostics.diagnosis import Diagnosis

VLLM = "INFO 05-19 10:13:{:02} [loggers.py:271] Engine 000: Avg prompt throughput: {} tokens/s, Avg generation throughput: {} tokens/s, Running: {} reqs, Waiting: {} reqs, {}GPU KV cache usage: {}%, Prefix cache hit rate: {}%"  # fmt: skip
V0 = "INFO 02-01 10:00:{:02} metrics.py:455] Avg prompt throughput: {} tokens/s, Avg generation throughput: {} tokens/s, Running: {} reqs, Swapped: 0 reqs, Pending: {} reqs, GPU KV cache usage: {}%, CPU KV cache usage: 0.0%."  # fmt: skip
SGLANG = "[2026-03-01 10:00:{:02} TP0] Decode batch, #running-req: {}, #token: {}, token usage: {}, cuda graph: True, gen throughput (token/s): {}, #queue-req: {}"  # fmt: skip
SGLANG_PREFILL = "[2026-03-01 10:00:{:02} TP0] Prefill batch, #new-seq: {}, #new-token: {}, #cached-token: {}, token usage: {}, #running-req: {}, #queue-req: {}"  # fmt: skip


def vllm(*rows: tuple[float, ...], extra: str = "") -> str:
    """Periodic lines: prompt and generated tokens/s, running, waiting, KV cache %, hit rate %."""
    return "\n".join(VLLM.format(k, *row[:4], extra, *row[4:]) for k, row in enumerate(rows))


def sglang(*rows: tuple[float, ...]) -> str:
    """Periodic lines: running, tokens, usage, tokens/s, queued."""
    return "\n".join(SGLANG.format(k, *row) for k, row in enumerate(rows))


def page(edges: dict[str, tuple[float, ...]] | None = None, **values: float) -> str:
    """A page of vLLM by short names: gauges and counters, and histograms as (mean, count)."""
    lines = [f'vllm:{name}{{model_name="m"}} {value}' for name, value in values.items()]
    for name, (mean, count, *rest) in (edges or {}).items():
        top = rest[0] if rest else 2 * mean
        lines += [
            f'vllm:{name}_bucket{{model_name="m",le="{top}"}} {count}',
            f'vllm:{name}_bucket{{model_name="m",le="+Inf"}} {count}',
            f'vllm:{name}_sum{{model_name="m"}} {mean * count}',
            f'vllm:{name}_count{{model_name="m"}} {count}',
        ]
    return "\n".join(lines) + "\n"


def served(n: float, running: float, waiting: float, kv: float, **more: float) -> str:
    """A page after `n` answers of a server that is as fast as it should be."""
    times = {
        "time_to_first_token_seconds": (more.pop("ttft", 0.12), n),
        "request_queue_time_seconds": (more.pop("queue", 0.002), n),
        "request_prefill_time_seconds": (more.pop("prefill", 0.1), n),
        "inter_token_latency_seconds": (0.02, 200 * n),
        "e2e_request_latency_seconds": (4.0, n),
    }
    counters = {
        "request_success_total": n, "generation_tokens_total": 200 * n,
        "prompt_tokens_total": 900 * n, "num_preemptions_total": more.pop("preemptions", 0.0),
    }  # fmt: skip
    return page(
        times, num_requests_running=running, num_requests_waiting=waiting, kv_cache_usage_perc=kv,
        **{**counters, **more},
    )  # fmt: skip


FULL = [(0.0, 1055.3, 18, 43, 95.9, 0.0), (0.0, 1226.3, 18, 42, 95.5, 0.0),
        (18032.5, 589.8, 21, 23, 95.9, 0.0), (0.0, 1242.7, 20, 23, 98.4, 0.0)]  # fmt: skip
STARTED = """INFO [api_server.py:1] vLLM API server version 0.20.2
INFO [gpu_model_runner.py:2] Model loading took 14.99 GiB memory and 4.1 seconds
INFO [gpu_worker.py:3] Available KV cache memory: 20.1 GiB
INFO:     Application startup complete.
"""

INCIDENTS = {
    "vLLM's lines, KV cache full": (vllm(*FULL), "kv_full"),
    "vLLM's lines, all slots taken": (vllm(*[(900.0, 2400.0, 256, 130 + k, 34.0, 12.0) for k in range(5)]), "oversubscribed"),
    "vLLM's lines, no token computed": (vllm((800.0, 300.0, 7, 0, 9.0, 0.0), *[(0.0, 0.0, 7, 2 * k, 9.0, 0.0) for k in range(4)]), "stalled"),
    "vLLM's lines, nobody is let in and nothing runs": (vllm(*[(0.0, 0.0, 0, 12, 0.0, 0.0)] * 4), "stalled"),
    "vLLM's lines with preemptions": (vllm(*FULL, extra="Preemptions: 3, "), "kv_preemption"),
    "V0's lines, KV cache full": ("\n".join(V0.format(k, 0.0, 700.0, 31, 55, 99.1) for k in range(4)), "kv_full"),
    "V0's warnings": ("WARNING 01-10 scheduler.py:1057] Sequence group cmpl-3a is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space. This can affect the end-to-end performance. Increase gpu_memory_utilization or tensor_parallel_size to provide more KV cache memory. total_cumulative_preemption_cnt=51", "kv_preemption"),
    "SGLang's lines, KV cache full": (sglang(*[(48, 250000, 0.98, 1900.0, 60 + k) for k in range(4)]), "kv_full"),
    "SGLang's lines, all slots taken": (sglang(*[(64, 60000, 0.31, 2900.0, 90) for _ in range(4)]), "oversubscribed"),
    "SGLang retracts": ("\n".join("[2026-03-01 10:00:01] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_token_ratio: 0.5100 -> 0.7200" for _ in range(3)), "kv_preemption"),
    "an out-of-memory error": ("(EngineCore_DP0 pid=9) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 23.53 GiB of which 412.00 MiB is free.\nRuntimeError: Engine core initialization failed. See root cause above.", "cuda_oom"),
    "another process on the GPU": ("ValueError: Free memory on device cuda:0 (5.21/23.53 GiB) on startup is less than desired GPU memory utilization (0.9, 21.18 GiB).", "foreign_process"),
    "a context that does not fit": (STARTED + "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (7.61 GiB). Based on the available memory, the estimated maximum model length is 62336.", "max_model_len_above_pool"),
    "an engine that died": (STARTED + "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.", "engine_dead"),
    "a failing kernel": (STARTED + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "cuda_error"),
}  # fmt: skip
HEALTHY = {
    "vLLM's lines under light load": vllm(*[(300.0, 240.0, 4, 0, 3.1, 20.0)] * 5),
    "vLLM's lines, idle": vllm(*[(0.0, 0.0, 0, 0, 0.0, 0.0)] * 5),
    "a short burst": vllm(*[(300.0, 900.0, 30, 0, 20.0, 0.0)] * 8, (9000.0, 500.0, 60, 80, 41.0, 0.0)),
    "a nearly full KV cache without a queue": vllm(*[(300.0, 2400.0, 64, 0, 94.0, 0.0)] * 5),
    "a request or two that wait": vllm(*[(300.0, 2400.0, 64, 2, 51.0, 0.0)] * 5),
    "one line without tokens": vllm((800.0, 300.0, 7, 0, 9.0, 0.0), (0.0, 0.0, 1, 0, 0.4, 0.0), (0.0, 210.0, 4, 0, 3.0, 0.0)),
    "V0's lines": "\n".join(V0.format(k, 90.0, 700.0, 12, 0, 21.0) for k in range(4)),
    "SGLang's lines": sglang(*[(12, 40000, 0.21, 800.0, 0)] * 4),
    "SGLang's prefills": "\n".join(SGLANG_PREFILL.format(k, 2, 1900, 300, 0.12, 10, 0) for k in range(4)),
    "one retraction in a busy hour": "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.5 -> 0.6\n" + sglang(*[(48, 250000, 0.93, 1900.0, 0)] * 4),
    "a start": STARTED,
    "a start with harmless words": STARTED + "WARNING Failed to import from vllm._C with ModuleNotFoundError\nINFO 0 errors, retrying never\nINFO: 127.0.0.1 - \"POST /v1/chat/completions HTTP/1.1\" 400 Bad Request\n",
}  # fmt: skip
PAGES_OF_INCIDENTS = {
    "four lines, old name, KV cache full": ([page(num_requests_running=41, num_requests_waiting=22, gpu_cache_usage_perc=0.99)], "kv_full"),
    "three lines, all slots taken": ([page(num_requests_running=256, num_requests_waiting=300, kv_cache_usage_perc=0.15)], "oversubscribed"),
    "one page, preemptions": ([served(500, 60, 20, 0.98, preemptions=400)], "kv_preemption"),
    "two pages, no answer between them": ([served(500, 12, 3, 0.2), served(500, 12, 30, 0.2)], "stalled"),
    "two pages, drafts rejected": ([served(10, 4, 0, 0.1, spec_decode_num_draft_tokens_total=100, spec_decode_num_accepted_tokens_total=60), served(500, 4, 0, 0.1, spec_decode_num_draft_tokens_total=90100, spec_decode_num_accepted_tokens_total=9060)], "drafts_rejected"),
    "two pages, a slow front end": ([served(10, 4, 0, 0.1, ttft=1.2), served(500, 4, 0, 0.1, ttft=1.2)], "front_end"),
    "two pages, long waits": ([served(10, 256, 40, 0.3, ttft=9.0, queue=8.5), served(500, 256, 90, 0.3, ttft=9.0, queue=8.5)], "oversubscribed"),
}  # fmt: skip
HEALTHY_PAGES = {
    "one page": [served(500, 4, 0, 0.1)],
    "two pages": [served(10, 4, 0, 0.1), served(500, 6, 1, 0.12)],
    "a full KV cache without a queue": [served(10, 60, 0, 0.95), served(500, 62, 0, 0.96)],
    "three lines": [page(num_requests_running=12, num_requests_waiting=0, kv_cache_usage_perc=0.4)],
    "good drafts": [served(10, 4, 0, 0.1), served(500, 4, 0, 0.1, spec_decode_num_draft_tokens_total=1000, spec_decode_num_accepted_tokens_total=640)],
}  # fmt: skip


def diagnosed(pages: list[str], folder: Path) -> Diagnosis:
    paths = [folder / f"page-{k}.txt" for k in range(len(pages))]
    for path, text in zip(paths, pages, strict=True):
        path.write_text(text)
    return diagnose(paths, seconds=60.0 if len(pages) == 2 else None)


def read(text: str, folder: Path) -> Diagnosis:
    (folder / "server.log").write_text(text)
    return diagnose(log=folder / "server.log")


@pytest.mark.parametrize("name", INCIDENTS)
def test_a_posted_log_is_understood(name: str, tmp_path: Path) -> None:
    text, cause = INCIDENTS[name]
    diagnosis = read(text, tmp_path)
    assert diagnosis.to_json()["verdict"][0] == cause  # type: ignore[index]
    assert "remedy" in str(diagnosis)


@pytest.mark.parametrize("name", PAGES_OF_INCIDENTS)
def test_a_posted_page_is_understood(name: str, tmp_path: Path) -> None:
    pages, cause = PAGES_OF_INCIDENTS[name]
    diagnosis = diagnosed(pages, tmp_path)
    assert diagnosis.findings[0].mode == cause
    assert "--plan" in str(diagnosis).partition("Not in these files")[2]
    if len(pages) == 1:
        assert "a second page" in str(diagnosis).partition("Not in these files")[2]


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_wrong_with_a_healthy_log(name: str, tmp_path: Path) -> None:
    assert read(HEALTHY[name], tmp_path).exit_code != 1


@pytest.mark.parametrize("name", HEALTHY_PAGES)
def test_nothing_is_wrong_with_a_healthy_page(name: str, tmp_path: Path) -> None:
    assert diagnosed(HEALTHY_PAGES[name], tmp_path).exit_code != 1


def test_a_full_kv_cache_is_not_told_to_raise_max_num_seqs(tmp_path: Path) -> None:
    told = str(read(vllm(*FULL), tmp_path))
    assert "max_num_seqs changes nothing" in told and "higher max_num_seqs" not in told


def test_an_unknown_kv_cache_is_not_called_empty(tmp_path: Path) -> None:
    told = str(diagnosed([page(num_requests_running=64, num_requests_waiting=40)], tmp_path))
    assert "0% full" not in told and "whether the KV cache is full" in told


BLOCKS = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="27000"} 1\n'


def test_an_idle_moment_is_no_evidence_of_the_load(tmp_path: Path) -> None:
    """500 answers that queued, and a page saved after the last: the counters tell, the gauges do not."""
    idle = served(500, 0, 0, 0.0, ttft=3.0, queue=2.5, preemptions=7) + BLOCKS
    told = diagnosed([idle], tmp_path)
    assert [one.mode for one in told.findings] == ["kv_preemption", "oversubscribed"]
    assert "0% full" not in str(told) and "0 running" not in str(told)
    assert "each with a full KV cache" in str(told)
    assert "taken while nothing ran" in str(told) and "432,000 tokens" in str(told)
    assert "saved while requests run" in str(told).partition("Not in these files")[2]
    healthy = diagnosed([served(500, 0, 0, 0.0)], tmp_path)
    assert healthy.exit_code != 1 and "0% full" not in str(healthy)


def test_of_two_pages_the_busy_one_tells_of_the_load(tmp_path: Path) -> None:
    """A page before a load test and one within it: the KV cache is as full as on the second."""
    before, within = (
        served(n, running, waiting, full, ttft=9.0, queue=8.5)
        for n, running, waiting, full in ((10, 0, 0, 0.0), (500, 60, 40, 0.97))
    )
    told = diagnosed([before, within], tmp_path)
    assert told.findings[0].mode == "kv_full" and "97% full" in str(told)
    just_asked = diagnosed([served(500, 0, 0, 0.0), served(500, 1, 0, 0.1)], tmp_path)
    assert just_asked.exit_code != 1  # a first request that just came is no stalled engine


def test_a_server_that_nobody_asks_is_told(tmp_path: Path) -> None:
    told = diagnosed([served(500, 0, 0, 0.0), served(500, 0, 0, 0.0)], tmp_path)
    assert told.exit_code == 3 and "none is in flight" in str(told)
    assert "No problem found" not in str(told)
