"""`headroom predict` of a CSV: a spreadsheet in, a spreadsheet out, and what a run keeps for the next."""

import csv
import os
import pickle
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.errors import PlannerError
from planner.core.files import read_pickle, write_pickle
from planner.planning.table_rows import INPUT_COLUMNS, OUTPUT_COLUMNS
from planner.tools import answer_store
from planner.tools.answer_store import AnswerStore, compute_answer_key
from planner.tools.batch import predict_row
from planner.tools.deployment_rows import DeploymentRows
from planner.ui.cli import main

BASE = {"model": "meta-llama/Llama-3.1-8B", "gpu": "H100", "engine_version": "0.19.0"}
CHAT = {**BASE, "isl": "1024", "osl": "1024", "length_range_ratio": "0.8", "concurrency": "32"}


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def predicted(folder: Path, header: str, *lines: str) -> tuple[int, list[dict[str, str]]]:
    (folder / "rows.csv").write_text("\n".join((header, *lines)) + "\n")
    code = main(["predict", str(folder / "rows.csv"), "--out", str(folder / "out.csv")])
    with (folder / "out.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == list(OUTPUT_COLUMNS)
        return code, list(reader)


def test_the_columns_of_the_interface_are_there(tmp_path: Path) -> None:
    """Those that are not predicted yet stay empty; every scored figure has its interval."""
    _, (row,) = predicted(tmp_path, ",".join(CHAT), ",".join(CHAT.values()))
    scored = ("kv_available_gib", "max_concurrency_x", "ttft_ms_mean", "ttft_ms_p99", "tpot_ms_mean", "tpot_ms_p99",
              "output_tps", "e2e_ms_mean", "e2e_ms_p99", "capacity_rps", "power_w_per_gpu")  # fmt: skip
    for name in scored:
        assert 0 < float(row[f"{name}_lo"]) <= float(row[name]) <= float(row[f"{name}_hi"]), name
    assert 20 < float(row["start_up_s"]) < 300
    drawn = float(row["power_w_per_gpu"]) / float(row["output_tps_per_gpu"])
    assert float(row["joules_per_output_token"]) == pytest.approx(drawn, rel=1e-5)
    assert 0 < float(row["kv_usage_p99"]) <= 1


def test_an_engine_that_no_scenario_plans_is_predicted() -> None:
    """Weights of 70.6 B parameters in 16 bits fit no H100 of 80 GB; of four each holds a quarter."""
    asked = {"model": "meta-llama/Llama-3.1-70B", "gpu": "H100", "engine": "tgi", "isl": "900"}
    one, four = (
        predict_row({**asked, "osl": "100", "concurrency": "8", "tp": tp}) for tp in ("1", "4")
    )
    assert one["status"] == "does_not_fit" and "TP2" in str(one["error"])
    assert four["status"] == "ok" and four["weights_gib"] == pytest.approx(32.9, abs=0.5)


@pytest.mark.parametrize(
    ("model", "bits", "gib"),
    [
        ("openai/gpt-oss-120b", "4", None),
        ("Qwen/Qwen3-32B-FP8", "8", None),
        ("meta-llama/Llama-3.1-8B", "16", 14.99),
        ("nvidia/MiniMax-M2.5-NVFP4", "4", None),
    ],
)
def test_bits_that_the_checkpoint_has_already_change_nothing(
    model: str, bits: str, gib: float | None
) -> None:
    row = {"model": model, "gpu": "B200", "engine_version": "0.20.2"}
    plain, said = predict_row(row), predict_row({**row, "weight_bits": bits})
    assert said["weights_gib"] == plain["weights_gib"]
    assert gib is None or said["weights_gib"] == pytest.approx(gib, abs=0.05)


def test_other_bits_are_another_checkpoint() -> None:
    """4 bits are about a quarter of 16, embeddings apart; what is stored in MXFP4 is not served in 8 bits."""
    row = {"model": "meta-llama/Llama-3.1-8B", "gpu": "H100", "engine_version": "0.20.2"}
    half, quarter = (
        predict_row({**row, "weight_bits": bits})["weights_gib"] for bits in ("8", "4")
    )
    assert 14.99 / 2 < half < 9 and 14.99 / 4 < quarter < 6
    refused = predict_row({**row, "model": "openai/gpt-oss-120b", "weight_bits": "8"})
    assert refused["status"] == "error" and "mxfp4" in refused["error"]


def test_rows_come_out_in_order_with_one_sentence_per_failure(tmp_path: Path) -> None:
    code, rows = predicted(
        tmp_path,
        "id,model,gpu,isl,osl,concurrency",
        "a,meta-llama/Llama-3.1-8B,H100,100,50,4",
        "b,meta-llama/Llama-3.1-8B,H1000,100,50,4",
        "c,meta-llama/Llama-3.1-8B,l40s,100,50,4",
    )
    assert code == 1
    assert [(row["id"], row["status"]) for row in rows] == [
        ("a", "ok"),
        ("b", "error"),
        ("c", "ok"),
    ]
    assert "H1000" in rows[1]["error"] and rows[1]["tpot_ms_mean"] == ""
    assert float(rows[0]["tpot_ms_mean"]) < float(
        rows[2]["tpot_ms_mean"]
    )  # 3,350 GB/s against 864 GB/s
    assert (
        float(rows[0]["tpot_ms_mean_lo"])
        < float(rows[0]["tpot_ms_mean"])
        < float(rows[0]["tpot_ms_mean_hi"])
    )


def test_a_row_without_traffic_is_a_memory_plan(tmp_path: Path) -> None:
    code, (row,) = predicted(
        tmp_path,
        "model,gpu,gpu_memory_utilization,max_model_len",
        "meta-llama/Llama-3.1-8B,A100 80GB,0.9,8192",
    )
    assert code == 0 and row["status"] == "ok" and row["ttft_ms_mean"] == ""
    assert int(row["params_total"]) == 8_030_261_248  # counted on the model's own checkpoint
    assert float(row["kv_bytes_per_token"]) == 2 * 32 * 8 * 128 * 2
    assert float(row["weights_gib"]) == pytest.approx(14.99, abs=0.05)
    assert float(row["max_concurrency_x"]) == pytest.approx(int(row["kv_tokens"]) / 8192, rel=0.01)


def test_one_more_token_costs_nothing_in_layers_whose_window_is_full() -> None:
    """gemma-3-27b: 10 of 62 layers attend to everything, with 16 KV heads of 128 + 128 in BF16."""
    answer = predict_row(
        {"model": "google/gemma-3-27b-it", "gpu": "H100", "engine_version": "0.19.0"}
    )
    assert answer["kv_bytes_per_token"] == 10 * 16 * (128 + 128) * 2


def test_what_does_not_fit_still_has_its_memory_and_a_way_out(tmp_path: Path) -> None:
    code, (row,) = predicted(
        tmp_path, "model,gpu,isl,osl,concurrency", "meta-llama/Meta-Llama-3.1-70B,L40S,100,50,4"
    )
    assert code == 0 and row["status"] == "does_not_fit"
    assert (
        float(row["weights_gib"]) == pytest.approx(131.4, abs=0.5)
        and float(row["kv_available_gib"]) < 0
    )
    assert "GiB" in row["error"] and row["ttft_ms_mean"] == ""


def test_a_context_that_fits_the_traffic_stands_in_for_the_models_own(tmp_path: Path) -> None:
    _, (row,) = predicted(
        tmp_path, "model,gpu,isl,osl,concurrency", "meta-llama/Llama-3.1-8B,RTX 4090,100,50,4"
    )
    assert row["status"] == "ok" and "max_model_len 131,072 does not fit" in row["warnings"]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"model": ""}, "model (or model_config) is missing"),
        ({"gpu": ""}, "gpu is missing"),
        ({"tp": "two"}, "tp: expected a whole number from 1 to 100,000,000, got 'two'"),
        ({"tp": "0"}, "tp: expected a whole number from 1"),
        ({"tp": "3"}, "must be divisible by tensor parallel size (3)"),
        ({"tp": "1e400"}, "tp: expected a whole number"),
        ({"isl": "nan"}, "isl: expected a number above 0, got 'nan'"),
        ({"osl": ""}, "osl is missing"),
        ({"isl": "-5"}, "isl: expected a number above 0"),
        ({"concurrency": "2.5"}, "concurrency: expected a whole number"),
        ({"enforce_eager": "maybe"}, "enforce_eager: expected true or false"),
        ({"gpu_memory_utilization": "90"}, "gpu_memory_utilization: expected a number from 0 to 1"),
        ({"length_range_ratio": "", "isl_p95": "90000"}, "isl: no lognormal has mean 1024"),
        ({"engine_version": "latest"}, "engine_version 'latest'"),
        ({"quantization": "fp3"}, "unknown quantization 'fp3'"),
        ({"model_config": "nowhere.json"}, "there is no file nowhere.json"),
        ({"speculative_method": "eagle3"}, "num_speculative_tokens is missing"),
        ({"speculative_method": "draft_model", "num_speculative_tokens": "3"}, "draft"),
        ({"prefill_tp": "2"}, "needs both pools"),
        ({"trace": "nowhere.csv"}, "cannot read the trace"),
        ({"max_model_len": "512"}, "do not fit into max_model_len 512"),
        ({"weight_bits": "5"}, "weight_bits"),
        ({"interconnect": "string"}, "unknown interconnect"),
    ],
)
def test_a_bad_cell_is_one_sentence(cells: dict[str, str], message: str) -> None:
    answer = predict_row({**CHAT, **cells})
    assert answer["status"] == "error" and message in str(answer["error"])
    assert "\n" not in str(answer["error"]) and "cannot be planned" not in str(answer["error"])


@settings(max_examples=25, deadline=None)
@given(
    column=st.sampled_from(sorted(set(INPUT_COLUMNS) - {"id", "model", "draft_model"})),
    cell=st.text(max_size=8),
)
def test_no_cell_ends_in_a_traceback(column: str, cell: str) -> None:
    assert predict_row({**CHAT, column: cell})["status"] in ("ok", "error", "does_not_fit")


def test_unusable_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    for text, message in (
        (None, "cannot read"),
        ("", "line 1"),
        ("a,b\n1,2\n", "line 1"),
        ("gpu,model,gpu\n", "occurs twice"),
    ):
        if text is not None:
            rows.write_text(text)
        assert main(["predict", str(rows), "--out", str(out)]) == 2
        assert message in capsys.readouterr().err and not out.exists()
    assert predicted(tmp_path, "gpu,model") == (0, [])


def test_ragged_rows_and_misspelt_columns(tmp_path: Path) -> None:
    code, rows = predicted(
        tmp_path, "model,gpu,max_num_seq", "meta-llama/Llama-3.1-8B,H100,8", "x,H100,1,2,3"
    )
    assert (
        code == 1
        and rows[0]["status"] == "ok"
        and "did you mean max_num_seqs?" in rows[0]["warnings"]
    )
    assert "2 more cells" in rows[1]["error"]
    _, rows = predicted(tmp_path, ",model,gpu", "0,meta-llama/Llama-3.1-8B,H100")  # as pandas saves
    assert rows[0]["status"] == "ok" and not rows[0]["warnings"]
    _, rows = predicted(
        tmp_path, "model,gpu,rate,prompt_tokens,concurrency", "meta-llama/Llama-3.1-8B,H100,8,900,"
    )
    assert all(f"did you mean {meant}?" in rows[0]["warnings"] for meant in ("request_rate", "isl"))
    _, rows = predicted(tmp_path, "model,gpu,request_rate", "meta-llama/Llama-3.1-8B,H100,8")
    assert "request_rate without isl and osl" in rows[0]["warnings"] and not rows[0]["ttft_ms_mean"]


def test_a_rate_that_the_concurrency_caps_is_a_closed_loop() -> None:
    capped = predict_row({**CHAT, "concurrency": "8", "request_rate": "1000"})
    closed = predict_row({**CHAT, "concurrency": "8"})
    free = predict_row({**CHAT, "concurrency": "8", "request_rate": "0.1"})
    assert capped["tpot_ms_mean"] == pytest.approx(closed["tpot_ms_mean"], rel=0.01)
    assert free["tpot_ms_mean"] < 0.95 * closed["tpot_ms_mean"]


def test_a_trace_brings_lengths_and_rate(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "arrival,prompt_tokens,output_tokens\n"
        + "".join(f"{i / 2},{100 + i},{20 + i}\n" for i in range(100))
    )
    code, rows = predicted(
        tmp_path,
        "model,gpu,trace,request_rate",
        "meta-llama/Llama-3.1-8B,H100,t.csv,",
        "meta-llama/Llama-3.1-8B,H100,t.csv,4",
    )
    assert code == 0
    assert [float(row["request_tps"]) for row in rows] == pytest.approx(
        [2, 4], rel=0.04
    )  # and the last one's answer


def test_one_client_is_served_by_one_replica_and_by_one_rank() -> None:
    """pegainfer docs/models/kimi-k2/vllm: DP8 on H20 gives 54.7 tokens/s to one client and 157.9 to four."""
    qwen = {
        "model": "Qwen/Qwen3-8B",
        "gpu": "H100",
        "isl": "1000",
        "osl": "128",
        "num_prompts": "8",
    }
    alone, eight = (
        predict_row({**qwen, "replicas": count, "concurrency": "1"})["output_tps"]
        for count in ("1", "8")
    )
    assert alone == eight
    kimi = {
        "model": "moonshotai/Kimi-K2.5", "gpu": "H20-141GB", "engine_version": "0.19.0",
        "tp": "1", "dp": "8", "ep": "8", "isl": "1", "osl": "128", "max_model_len": "4096",
    }  # fmt: skip
    one, four = (
        predict_row({**kimi, "concurrency": clients, "num_prompts": "32"})["output_tps"]
        for clients in ("1", "4")
    )
    assert (
        four / one == pytest.approx(4, rel=0.05) and 157.9 / 54.7 < 4
    )  # the step of one, or longer
    assert one == pytest.approx(54.7, rel=0.5)


@pytest.mark.parametrize("dtype", ["", "auto", "bfloat16"])
def test_a_pool_under_pressure_preempts_whether_its_dtype_is_open_or_not(dtype: str) -> None:
    """vLLM pull 44594 on a GB200: 11,582 tokens/s, 2.37 preemptions a request, E2E p50 51.6 s."""
    found = predict_row({
        "model": "Qwen/Qwen2.5-7B-Instruct", "gpu": "GB200", "engine_version": "0.22.0",
        "kv_cache_dtype": dtype, "gpu_memory_utilization": "0.1742", "max_model_len": "8192",
        "max_num_seqs": "256", "enable_prefix_caching": "false", "isl": "1000", "osl": "5000",
        "concurrency": "128", "num_prompts": "450", "length_range_ratio": "1",
    })  # fmt: skip
    assert float(found["output_tps"]) == pytest.approx(11_582, rel=0.15)
    assert float(found["preemptions_per_request"]) == pytest.approx(2.37, rel=0.25)
    assert float(found["e2e_ms_p50"]) == pytest.approx(51_600, rel=0.15)


MODEL = "meta-llama/Llama-3.1-8B"
HEADER = ["id", "model", "gpu", "max_num_seqs"]
ROWS = [[f'row {k}, "so"\nand on', MODEL, "H100", str(8 * k)] for k in range(1, 7)]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cells `max_num_seqs` of the rows that are predicted rather than taken from the store."""
    sizes: list[str] = []
    answer = DeploymentRows.answer

    def note(file: DeploymentRows, row: dict[str, str]) -> dict[str, object]:
        sizes.append(row["max_num_seqs"])
        return answer(file, row)

    monkeypatch.setattr(DeploymentRows, "answer", note)
    return sizes


def predict(
    folder: Path, rows: Sequence[Sequence[str]], *options: str, header: Sequence[str] = HEADER
) -> list[dict[str, str]]:
    """Run `headroom predict` on rows and return those of its output."""
    source, out = folder / "rows.csv", folder / "out.csv"
    with source.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    assert main(["predict", str(source), "--out", str(out), *options]) == 0
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_resumed_run_answers_every_row_as_a_fresh_one_does(
    tmp_path: Path, computed: list[str]
) -> None:
    """Rows are deleted, edited, reordered, repeated and renamed between the two runs."""
    predict(tmp_path, ROWS)
    edited = [*ROWS[4][:3], "100"]
    rows = [ROWS[5], edited, ROWS[0], ROWS[0], ["another id", *ROWS[2][1:]]]
    computed.clear()
    resumed = predict(tmp_path, rows, "--resume")
    assert computed == ["100"]
    assert resumed == predict(tmp_path, rows, "--store", str(tmp_path / "fresh"))
    assert len(computed) == 1 + 4
    assert [row["id"] for row in resumed] == [row[0] for row in rows]
    without_ids = [row[1:] for row in (ROWS[3], ROWS[0])]
    again = predict(tmp_path, without_ids, "--resume", header=HEADER[1:])
    assert again[1] == {**resumed[2], "id": ""} and len(computed) == 5


def test_an_interrupted_run_keeps_its_answers(
    tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = DeploymentRows.answer

    def interrupt(file: DeploymentRows, row: dict[str, str]) -> dict[str, object]:
        if row["max_num_seqs"] == "40":
            raise KeyboardInterrupt
        return counting(file, row)

    with monkeypatch.context() as patch:
        patch.setattr(DeploymentRows, "answer", interrupt)
        patch.setattr(os, "_exit", lambda code: pytest.fail(str(code)))
        with pytest.raises(pytest.fail.Exception, match="130"):
            predict(tmp_path, ROWS)
    assert not (tmp_path / "out.csv").exists()
    computed.clear()
    predict(tmp_path, ROWS, "--resume")
    assert computed == ["40", "48"]


def test_other_cells_files_calibrations_and_planners_are_other_questions(
    tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration, trace = tmp_path / "own.yaml", tmp_path / "trace.csv"
    own, traced = ["--calibration", str(calibration)], [*ROWS[1], "trace.csv"]
    for memory, tokens in ((0.7, 5), (0.8, 6), (0.8, 6)):
        calibration.write_text(
            f"H100: {{coefficients: {{memory: {memory}}}, source: mine, date: '2026-11'}}"
        )
        trace.write_text(f"arrival,prompt_tokens,output_tokens\n0,10,{tokens}\n1,10,5\n")
        predict(tmp_path, ROWS[:1], *own)
        predict(tmp_path, [traced], header=[*HEADER, "trace"])
    assert computed == ["8", "16"] * 2
    predict(tmp_path, ROWS[:1])
    monkeypatch.setattr(answer_store, "compute_build_digest", lambda: "another build")
    predict(tmp_path, ROWS[:1])
    assert computed == ["8", "16"] * 2 + ["8"] * 2


def test_a_key_holds_the_folder_of_a_model_with_its_quantization(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    keys = {compute_answer_key("row", ["model"], tmp_path)}
    for name in ("config.json", "hf_quant_config.json"):
        (tmp_path / "model" / name).write_text("{}")
        keys.add(compute_answer_key("row", ["model"], tmp_path))
    assert len(keys) == 3
    assert compute_answer_key("row", ["model/config.json"], tmp_path) not in keys
    before = compute_answer_key("row", ["model/config.json"], tmp_path)
    (tmp_path / "model" / "hf_quant_config.json").write_text("[]")
    assert compute_answer_key("row", ["model/config.json"], tmp_path) != before


def test_a_store_keeps_answers_but_not_errors(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path / "answers.sqlite")
    store.add({"a": {"status": "ok", "gpus": 2}, "b": {"status": "error", "error": "no network"}})
    keys = ["a", "b", "c", *map(str, range(1000))]
    assert AnswerStore(store.path).fetch(keys) == {"a": {"status": "ok", "gpus": 2}}
    with closing(sqlite3.connect(tmp_path / "answers.sqlite")) as database, database:
        database.execute("update answers set answer = substr(answer, 2)")
    assert store.fetch(keys) == {}
    (tmp_path / "other").write_text("no data base at all, but text" * 50)
    with pytest.raises(PlannerError, match="as a store"):
        AnswerStore(tmp_path / "other")


def test_a_corrupt_store_is_one_line_and_everything_is_computed(
    tmp_path: Path,
    cache_home: Path,
    computed: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fresh = predict(tmp_path, ROWS[:3])
    store = cache_home / "headroom" / "answers.sqlite"
    assert store.stat().st_mode & 0o777 == 0o600
    assert store.parent.stat().st_mode & 0o777 == 0o700
    whole = store.read_bytes()
    for damaged in (b"no database, but text" * 50, whole[:100] + b"x" * (len(whole) - 100)):
        store.write_bytes(damaged)
        computed.clear()
        capsys.readouterr()
        assert predict(tmp_path, ROWS[:3], "--resume") == fresh
        assert len(computed) == 3
        message, count = capsys.readouterr().err.splitlines()
        assert f"cannot use {store} as a store of answers" in message
        assert count.endswith("3 points, 0 from the store") and store.read_bytes() == damaged


@pytest.mark.parametrize("change", ["mode", "owner"])
def test_a_store_that_others_may_write_is_not_used(
    tmp_path: Path,
    cache_home: Path,
    computed: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    store = cache_home / "headroom" / "answers.sqlite"
    predict(tmp_path, ROWS[:1])
    if change == "mode":
        store.chmod(0o666)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: store.stat().st_uid + 1)
    predict(tmp_path, ROWS[:1], "--resume")
    assert computed == ["8"] * 2 and "a store of answers" in capsys.readouterr().err


class Payload:
    """An object whose pickle would run code when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("a distrusted pickle was loaded",)


def test_a_pickle_is_private_and_one_that_others_may_write_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.pickle"
    write_pickle(path, ["a plan"])
    assert path.stat().st_mode & 0o777 == 0o600 and read_pickle(path, list) == ["a plan"]
    with pytest.raises(PlannerError, match="holds no dict"):
        read_pickle(path, dict)
    path.write_bytes(pickle.dumps(Payload()))
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(PlannerError, match="other users may write it"):
            read_pickle(path, list)
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(PlannerError, match="belongs to another user"):
        read_pickle(path, list)


def test_a_file_that_cannot_be_read_fails_its_own_row_alone(tmp_path: Path) -> None:
    """It can be stat'ed, and opening it works, but not reading: /proc/self/mem."""
    code, rows = predicted(
        tmp_path, "model,model_config,gpu", ",/proc/self/mem,H100", f"{MODEL},,H100"
    )
    assert code == 1 and [row["status"] for row in rows] == ["error", "ok"]
