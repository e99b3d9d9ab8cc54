"""Sweeps: which points there are, and that a store loses none of their answers and asks for none twice."""

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import yaml

from planner.core.catalog import compute_build_digest
from planner.core.errors import PlannerError
from planner.tools import batch
from planner.tools.answer_store import compute_answer_key
from planner.tools.batch import answer_chunk, answer_point, unify_column_type
from planner.tools.sweep_points import SweepPoints, read_sweep
from planner.ui.cli import main

PREDICT = {
    "answer": "predict",
    "scenario": "edge-8b-24gb",
    "grid": {"workload.rate": [0.1, 0.5, 2.0]},
}


def written(folder: Path, **fields: object) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({**PREDICT, **fields}, sort_keys=False), encoding="utf-8")
    return path


def command(path: Path, out: str, *more: str) -> list[str]:
    store = str(path.parent / "answers.sqlite")
    return ["predict", str(path), "--out", str(path.parent / out), "--store", store, *more]


def make_key(sweep: SweepPoints, point: dict[str, Any]) -> str:
    return compute_answer_key("sweep", sweep.describe_question(point), sweep.folder)


def kept(store: Path) -> int:
    if not store.exists():
        return 0
    with closing(sqlite3.connect(store, timeout=30)) as data:
        return (
            int(data.execute("select count(*) from answers").fetchone()[0])
            if _has_table(data)
            else 0
        )


def _has_table(data: sqlite3.Connection) -> bool:
    return bool(data.execute("select 1 from sqlite_master where name = 'answers'").fetchone())


def test_a_grid_has_every_combination_and_a_sample_covers_every_field(tmp_path: Path) -> None:
    rates = {"low": 1, "high": 100, "points": 3, "scale": "log"}
    grid = read_sweep(
        written(tmp_path, grid={"workload.rate": rates, "headroom": [0.1, 0.3]})
    ).points
    assert [(p["workload.rate"], p["headroom"]) for p in grid] == [
        (pytest.approx(rate), share) for rate in (1, 10, 100) for share in (0.1, 0.3)
    ]
    drawn = {
        "points": 40,
        "fields": {"workload.rate": {"low": 0, "high": 40}, "headroom": [0.1, 0.3]},
    }
    points = read_sweep(written(tmp_path, grid={}, sample=drawn)).points
    assert sorted(int(p["workload.rate"]) for p in points) == list(
        range(40)
    )  # one in each of forty equal parts
    assert sum(p["headroom"] == 0.1 for p in points) == 20
    assert points == read_sweep(written(tmp_path, grid={}, sample=drawn)).points
    assert points != read_sweep(written(tmp_path, grid={}, sample={**drawn, "seed": 1})).points


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"grid": {}}, "either a grid or a sample"),
        ({"grid": {"workload.rate": []}}, "at least 1 item"),
        ({"grid": {"workload.rate": {"low": 0, "high": 1, "points": 3, "scale": "log"}}}, "above 1e-12, got 0 to 1"),
        ({"grid": {"workload.rate": {"low": 1, "high": 1e308, "points": 3, "whole": True}}}, "must be at most"),
        ({"grid": {}, "sample": {"points": 10**6, "fields": {f"engine_args.{k}": [1] for k in "abcde"}}}, "4,000,000"),
        ({"grid": {"workload.rate": {"low": 0, "high": 1}}}, "number of points"),
        ({"grid": {f"engine_args.{k}": [0] * 100 for k in "abcd"}}, "100,000,000 points"),
        ({"grid": {"gpus.9.at_most": [1]}}, "numbered from 0"),
        ({"answer": "plan", "grid": {"deployment.tp": [1, 2]}}, "a plan chooses"),
        ({"scenario": "edge-9b"}, "did you mean edge-8b-24gb"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_sweep_is_told(
    tmp_path: Path, fields: dict[str, object], said: str
) -> None:
    with pytest.raises(PlannerError, match=said):
        read_sweep(written(tmp_path, **fields))


def test_a_point_that_is_wrong_does_not_end_the_others(tmp_path: Path) -> None:
    wrong = read_sweep(
        written(tmp_path, grid={"deployment.tp": [1, 3], "deployment.gpu": ["L4", "L5"]})
    )
    said = [answer_point(wrong, point) for point in wrong.points]
    assert [one["status"] for one in said] == ["ok", "error", "error", "error"]
    assert said[0]["gpu"] == "L4"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"grid": {"workload.rat": [1, 2]}}, "workload.rat"),
        ({"grid": {"headroom": [0, 0.1]}, "set": {"service_level": ["ttft"]}}, "service_level"),
        ({"grid": {"gpus": [[{"gpu": f"hf_Zq7{'A' * 20}", "at_most": n}] for n in (1, 2)]}}, "GPU"),
    ],
)
def test_what_points_lack_is_told(
    wrong: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(written(tmp_path, **wrong), "out.csv")) == 1
    shown, told = capsys.readouterr()
    assert (
        "2 of 2 points failed, the first: " in told and said in told and "Zq7" not in shown + told
    )
    assert len(pd.read_csv(tmp_path / "out.csv")) == 2


def test_the_table_is_written_however_printing_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, grid={"workload.rat": [1, 2]})

    def fail(*_: object) -> str:
        raise BrokenPipeError

    with monkeypatch.context() as broken, suppress(BrokenPipeError, SystemExit):
        broken.setattr("planner.ui.sweep_text.format_sweep", fail)
        main(command(path, "out.csv"))
    assert len(pd.read_csv(tmp_path / "out.csv")) == 2


def test_a_key_hangs_on_the_question_and_on_nothing_else(tmp_path: Path) -> None:
    sweep = replace(read_sweep(written(tmp_path)), folder=tmp_path)
    first, second, _ = (make_key(sweep, point) for point in sweep.points)
    assert first != second
    assert first == make_key(sweep, {**sweep.points[0], "question": "Other words?"})
    assert first != make_key(replace(sweep, replay=True), sweep.points[0])
    keys = set()
    for tokens in (5, 6):
        (tmp_path / "trace.csv").write_text(f"arrival,prompt_tokens,output_tokens\n0,10,{tokens}\n")
        keys |= {make_key(sweep, {f"workload.{name}": "trace.csv"}) for name in ("trace", "day")}
    assert len(keys) == 4


def test_workers_of_another_build_do_not_answer(tmp_path: Path) -> None:
    sweep = read_sweep(written(tmp_path))
    found = answer_chunk(sweep, compute_build_digest(), [("a", sweep.points[0])])
    assert found["a"]["status"] == "ok"
    with pytest.raises(PlannerError, match="another version"):
        answer_chunk(sweep, "of yesterday", [("a", sweep.points[0])])


def test_a_killed_sweep_goes_on_where_it_stopped_and_its_workers_end_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, grid={"workload.rate": {"low": 0.1, "high": 2, "points": 60}})
    store = tmp_path / "answers.sqlite"
    line = [sys.executable, "-m", "planner", *command(path, "out.csv", "--workers", "2")]
    running = psutil.Popen(line, stderr=subprocess.DEVNULL)
    while not kept(store) and running.poll() is None:
        time.sleep(0.02)
    workers = running.children(recursive=True)
    running.kill()
    running.wait()
    before = kept(store)
    assert 0 < before < 60 and len(workers) >= 2 and not (tmp_path / "out.csv").exists()
    assert main(command(path, "out.csv", "--workers", "1")) == 0
    assert f"60 points, {before} from the store" in capsys.readouterr().err
    assert kept(store) == 60
    table = pd.read_csv(tmp_path / "out.csv")
    assert (table["status"] == "ok").all()
    assert table["set.workload.rate"].tolist() == pytest.approx(
        [p["workload.rate"] for p in read_sweep(path).points]
    )
    assert main(command(path, "again.csv")) == 0
    assert "60 points, 60 from the store" in capsys.readouterr().err
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "out.csv").read_bytes()
    assert psutil.wait_procs(workers, timeout=10)[1] == []


CLUSTER = """
from distributed import LocalCluster
how = {"host": "127.0.0.1", "protocol": "tcp", "dashboard_address": None, "processes": False}
with LocalCluster(1, threads_per_worker=1, **how) as it:
    print(it.scheduler_address, flush=True)
    input()
"""


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """The address of a scheduler and its worker, in a process of their own."""
    running = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=folder
    )  # fmt: skip
    with running:
        try:
            yield running.stdout.readline().strip()  # type: ignore[union-attr]
        finally:
            running.kill()


def test_a_scheduler_in_another_process_answers_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, grid={"workload.rate": [0.1, 2.0]})
    with cluster(tmp_path) as address:
        line = [sys.executable, "-m", "planner", *command(path, "out.csv", "--scheduler", address)]
        subprocess.run(line, check=True)
    found = pd.read_csv(tmp_path / "out.csv")
    sweep = read_sweep(path)
    here = [answer_point(sweep, point) for point in sweep.points]
    assert found["ttft_ms_p99"].tolist() == pytest.approx(
        [one["ttft_ms_p99"] for one in here], rel=1e-6
    )


def test_the_cheapest_gpu_at_each_load_is_marked_and_what_is_assumed_is_said(
    tmp_path: Path, capsys
) -> None:
    """An oracle by hand: of the rows of one load that hold, the least price; a mean alone is spread."""
    gpus = [[{"gpu": name, "at_most": 8}] for name in ("L4", "L40S", "H100-SXM")]
    grid = {"workload.rate": [0.2, 4], "workload.prompt_tokens": [{"mean": 4000}], "gpus": gpus}
    path = written(tmp_path, answer="plan", replay=False, grid=grid)
    main(command(path, "out.csv"))
    said, rows = capsys.readouterr().out, pd.read_csv(tmp_path / "out.csv")
    assert rows["set.workload.rate"].nunique() == 2
    for _, group in rows.groupby("set.workload.rate"):
        holding = group[group["verdict"] == "holds"]
        assert group["cheapest"].eq("yes").sum() == (len(holding) > 0)
        if len(holding):
            assert group["cheapest"][holding["usd_per_hour"].idxmin()] == "yes"
    assert (rows["cheapest"] == "yes").any() and "The cheapest GPU that holds" in said
    assert "USD/month" in said and "$" in said
    assert all("Of the prompt lengths only the mean is given" in text for text in rows["assumed"])


def test_a_column_of_a_table_has_one_type() -> None:
    for same in ([1, 2], ["a", None], [0.5, None], [0.5, 1]):
        assert unify_column_type(same) == same
    assert unify_column_type(["auto", None, 64]) == ["auto", None, "64"]
    assert unify_column_type([True, 2]) == ["true", "2"]


def test_a_table_is_parquet_where_pyarrow_is_there_and_else_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = written(tmp_path), tmp_path / "out.parquet"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pyarrow", None)
        assert main(command(path, "out.parquet")) == 2
    assert 'a .parquet file needs the extra "parquet": pip' in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["sweep.yaml"]
    pytest.importorskip("pyarrow")
    for name in ("out.csv", "out.parquet", "out.parquet"):
        assert main(command(path, name)) == 0
    columns, same = pd.read_parquet(out), pd.read_csv(tmp_path / "out.csv")
    assert columns["set.workload.rate"].tolist() == [0.1, 0.5, 2.0] and list(columns) == list(same)
    assert columns["ttft_ms_p99"].tolist() == pytest.approx(same["ttft_ms_p99"].tolist(), rel=1e-6)
    (tmp_path / "rows.csv").write_text("id,model,gpu\n7,Qwen/Qwen3-8B,H100\n")
    assert main(command(tmp_path / "rows.csv", "rows.parquet")) == 0
    assert pd.read_parquet(tmp_path / "rows.parquet")[["id", "status"]].values.tolist() == [
        ["7", "ok"]
    ]
    pd.DataFrame({"point": [1]}).to_parquet(tmp_path / "mine.parquet")
    assert main(command(path, "mine.parquet")) == 2


def _list_listening_sockets(_: object) -> dict[str, Any]:
    """The sockets of the main process and its workers that others could connect to."""
    parent = psutil.Process(os.getppid())
    family = [parent, *parent.children(recursive=True)]
    sockets = [socket for process in family for socket in process.net_connections("all")]
    return {"listening": [s.laddr for s in sockets if s.status == psutil.CONN_LISTEN]}


def _end_abruptly(_: object) -> dict[str, Any]:
    os._exit(1)


def test_no_worker_on_this_machine_listens_to_anyone() -> None:
    here = {s.laddr for s in psutil.Process().net_connections("all") if s.status == "LISTEN"}
    found = list(batch._run_on_workers(_list_listening_sockets, [[]], None, 1))
    assert [set(answer["listening"]) - here for answer in found] == [set()]


def test_a_worker_that_dies_is_told_in_a_sentence() -> None:
    with pytest.raises(PlannerError, match="a worker on this machine gave up"):
        list(batch._run_on_workers(_end_abruptly, [[]], None, 1))
