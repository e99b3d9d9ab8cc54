"""Predictions against the public serving points and timed runs that the project ships."""

import re
from pathlib import Path

import pytest
from validation.serving_points import (
    ServingCurve,
    compute_cohort_accuracy,
    compute_serving_accuracy,
    load_cohort,
    load_holdout_errors,
    load_serving_curves,
    simulate_serving_points,
)
from validation.timed_runs import (
    TimedRun,
    compare_timed_run,
    load_timed_runs,
    summarize_timed_accuracy,
)

from planner.core.catalog import load_catalog
from planner.core.errors import PlannerError
from planner.ui.notebook_files import NOTEBOOK_DIR

CURVE = """
Some curve:
  model: meta-llama/Llama-3.1-8B
  gpu: H100
  engine: vllm
  harness: inferencex
  isl: 1024
  osl: 1024
  points: [[4, 30.5, 6.1], [8, 35.0, 6.9]]
  source: somebody
  date: "2026-01"
"""
RUN = """
Some run:
  model: meta-llama/Llama-3.1-8B
  gpu: H100
  engine_version: 0.19.0
  args: {max_num_seqs: 128}
  requests: [[0.0, 100, 10, 30.5, 90.5], [0.5, 100, 10, 30.5, 90.5]]
  gauges: [[0, 1, 0], [1, 0, 0]]
  source: somebody
  date: "2026-01"
"""


@pytest.fixture(scope="module")
def points():
    return simulate_serving_points()


def test_vllm_is_predicted_within_a_few_percent(points) -> None:
    """The best peer's median errors on such points are 7% (TPOT) and 29% (TTFT)."""
    (vllm,) = compute_serving_accuracy(points[points["engine"] == "vllm"]).to_dict("records")
    assert vllm["points"] >= 40
    assert vllm["TPOT median (%)"] < 6 and vllm["TPOT mean (%)"] < 8
    assert vllm["TTFT median (%)"] < 15 and vllm["TTFT mean (%)"] < 20


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_other_engines_are_predicted_from_the_same_physics(points, engine) -> None:
    (other,) = compute_serving_accuracy(points[points["engine"] == engine]).to_dict("records")
    assert other["TPOT median (%)"] < 25 and other["TTFT median (%)"] < 50


def test_intervals_hold_most_of_what_was_measured(points) -> None:
    """80% intervals, on points of the fit: they may hold more, and must not hold much less."""
    for metric in ("TPOT", "TTFT"):
        assert 0.6 <= points[f"{metric} inside"].mean() <= 1.0
        for row in points.to_dict("records"):
            predicted = row[f"predicted {metric} (ms)"]
            assert 0 < predicted.lo < predicted.mid < predicted.hi


def test_queues_for_the_kv_pool_are_predicted(points) -> None:
    """Llama-3.1-70B in FP8 on two H100: 64 requests of 8k tokens do not fit, and wait for most of a minute."""
    own = points[
        (points["GPU"] == "H100-SXM") & points["model"].str.endswith("Llama-3.1-70B")
    ].set_index("concurrency")
    assert list(own["pool full"]) == [False, False, False, True, True]
    assert own["measured TTFT (ms)"][64] > 50_000
    assert abs(own["TTFT error"][64]) < 0.3


def test_the_points_are_broad_and_name_their_source() -> None:
    curves = load_serving_curves()
    known = {(curve.engine, curve.gpu) for curve in curves.values()}
    assert {("vllm", gpu) for gpu in ("H100-SXM", "H200-SXM", "B200", "B300")} <= known
    assert {engine for engine, _ in known} == {"vllm", "sglang", "trtllm"}
    assert {curve.isl for curve in curves.values()} == {1024, 8192}
    for curve in curves.values():
        loads = [concurrency for concurrency, *_ in curve.points]
        assert loads == sorted(set(loads))
        assert "github.com/" in curve.source and curve.date >= "2025"


@pytest.mark.parametrize("name", load_timed_runs())
def test_single_requests_and_gauges_of_a_real_run_come_out_of_the_replay(name) -> None:
    """With step costs that were fitted to other GPUs: TTFT within 15% (median), gauges within 9 requests (mean)."""
    run = load_timed_runs()[name]
    assert all(0 < ttft < e2e for *_, ttft, e2e in run.requests)
    found = compare_timed_run(run)
    (row,) = summarize_timed_accuracy({name: found}).to_dict("records")
    assert row["TTFT median error (%)"] < 15 and row["E2E median error (%)"] < 8
    assert row["running off by"] < 9 and row["waiting off by"] < 9
    gauges = found.gauge_frame
    for column in ("measured", "replayed"):
        running = gauges[gauges["gauge"] == "running"][column]
        assert running.max() == pytest.approx(
            run.args["max_num_seqs"], abs=1
        )  # more arrive than may run


@pytest.mark.parametrize(
    ("kind", "text", "old", "new", "said"),
    [
        (
            ServingCurve,
            CURVE,
            "gpu: H100",
            "gpus: H100",
            "entry Some curve, field gpus: unknown field; did you mean gpu",
        ),
        (ServingCurve, CURVE, "  isl: 1024\n", "", "entry Some curve, field isl: field is missing"),
        (
            ServingCurve,
            CURVE,
            "6.9",
            "-6.9",
            r"entry Some curve, field points.1.2: .* above 0, got -6.9",
        ),
        (
            ServingCurve,
            CURVE,
            "[8,",
            "[8.5,",
            r"entry Some curve, field points.1.0: .* whole number.* got 8.5",
        ),
        (
            ServingCurve,
            CURVE,
            "inferencex",
            "mine",
            r"entry Some curve, field harness: .*'inferencex', got other text",
        ),
        (
            TimedRun,
            RUN,
            "100, 10, 30.5, 90.5], [0",
            "100, 0, 30.5, 90.5], [0",
            "entry Some run, field requests.0.2: ",
        ),
        (
            TimedRun,
            RUN,
            "[1, 0, 0]",
            "[1, 0]",
            "entry Some run, field gauges.1.2: field is missing",
        ),
    ],
)
def test_errors_name_file_entry_and_field(
    tmp_path: Path, kind, text: str, old: str, new: str, said: str
) -> None:
    assert old in text
    file = tmp_path / "points.yaml"
    file.write_text(text)
    assert load_catalog("points.yaml", kind, tmp_path)
    file.write_text(text.replace(old, new))
    with pytest.raises(PlannerError, match=rf"^points\.yaml, {said}"):
        load_catalog("points.yaml", kind, tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu": "H1000"}, "entry Some curve: unknown GPU 'H1000'"),
        ({"model": "meta-llama/Llama-3.1-405B"}, "entry Some curve: "),
    ],
)
def test_a_curve_that_cannot_have_run_is_an_error(
    tmp_path: Path, change: dict[str, str], said: str
) -> None:
    (tmp_path / "points.yaml").write_text(CURVE)
    (curve,) = load_catalog("points.yaml", ServingCurve, tmp_path).values()
    with pytest.raises(PlannerError, match=said):
        simulate_serving_points({"Some curve": curve.model_copy(update=change)})


def test_what_was_held_back_is_told_for_every_engine_and_kind_of_new() -> None:
    """Whole models, GPUs and releases that a fit went without are predicted worse than loads of known ones."""
    table = load_holdout_errors().set_index(["engine", "new"])
    error = table["TPOT error (%)"]
    for engine in ("vllm", "sglang", "trtllm"):
        assert error[engine, "curve"] < error[engine, "model"] < 25
    assert error["vllm", "pair"] < 12 and (table["TPOT runs"] > 150).all()
    assert table["TPOT inside (%)"].between(70, 92).all()


def test_the_pages_tell_the_errors_of_the_cohort() -> None:
    """README, the page on accuracy and the summary give the medians and the coverage that `cohort.csv` has."""
    table = compute_cohort_accuracy(load_cohort()).set_index(["by", "group"])
    page = (NOTEBOOK_DIR / "accuracy.md").read_text(encoding="utf-8")
    readme = re.search(
        r"^\| TPOT of vLLM, whole prediction.*\|\n",
        (NOTEBOOK_DIR.parent / "README.md").read_text(encoding="utf-8"), re.MULTILINE,
    )  # fmt: skip
    engines = [table.loc["engine", name] for name in ("vllm", "sglang", "trtllm")]
    assert readme
    assert f"{engines[0]['TPOT median (%)']:.2g}%" in readme[0]
    summary = (NOTEBOOK_DIR / "0-summary.ipynb").read_text(encoding="utf-8")
    for word in ("median (%)", "inside (%)"):
        for row in (row[f"{metric} {word}"] for row in engines for metric in ("TPOT", "TTFT")):
            assert f"{row:.2g}%" in summary
    named = [("engine", name) for name in ("vllm", "sglang", "trtllm")]
    for by, group in (
        *named,
        *(("load", name) for name in ("light", "medium", "heavy", "open loop")),
    ):
        row = table.loc[by, group]
        (told,) = re.findall(rf"^\| {by} \| {group} \|.*\|$", page, re.MULTILINE)
        for column in ("TPOT", "TTFT"):
            figures = f"{row[f'{column} median (%)']:.1f}% | {row[f'{column} inside (%)']:.0f}%"
            assert figures in told, (figures, told)
