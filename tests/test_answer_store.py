"""The store of answers: what `predict --resume` and sweeps take from it, and what they never do."""

import csv
import json
import os
import pickle
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from planner.core import files
from planner.core.errors import PlannerError
from planner.core.files import find_private_folder, read_pickle, write_pickle
from planner.tools import answer_store, batch
from planner.tools.answer_store import AnswerStore, compute_answer_key
from planner.ui.cli import main

COLUMNS = {"status", "gpus"}
MODEL = "meta-llama/Llama-3.1-8B"
HEADER = ["id", "model", "gpu", "max_num_seqs"]
ROWS = [[f'row {k}, "so"\nand on', MODEL, "H100", str(8 * k)] for k in range(1, 7)]


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The cells `max_num_seqs` of the rows that are predicted rather than taken from the store."""
    sizes: list[str] = []
    predict_row = batch.predict_row

    def predict(row: dict[str, str], *more: object) -> dict[str, object]:
        sizes.append(row["max_num_seqs"])
        return predict_row(row, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(batch, "predict_row", predict)
    yield sizes


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


def test_a_resumed_batch_answers_every_row_as_a_fresh_one_does(
    tmp_path: Path, predicted: list[str]
) -> None:
    """Rows are deleted, edited, reordered, repeated and renamed between the two runs."""
    predict(tmp_path, ROWS)
    edited = [*ROWS[4][:3], "100"]
    rows = [ROWS[5], edited, ROWS[0], ROWS[0], ["another id", *ROWS[2][1:]]]
    predicted.clear()
    resumed = predict(tmp_path, rows, "--resume")
    assert predicted == ["100"]
    assert resumed == predict(tmp_path, rows)
    assert [row["id"] for row in resumed] == [row[0] for row in rows]


def test_rows_without_ids_are_told_apart_by_their_cells(
    tmp_path: Path, predicted: list[str]
) -> None:
    rows = [row[1:] for row in ROWS]
    predict(tmp_path, rows, header=HEADER[1:])
    kept = [*rows[:1], *rows[3:]]
    predicted.clear()
    resumed = predict(tmp_path, kept, "--resume", header=HEADER[1:])
    assert not predicted
    assert resumed == predict(tmp_path, kept, header=HEADER[1:])


def test_an_interrupted_batch_keeps_its_answers(
    tmp_path: Path, predicted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = batch.predict_row

    def interrupt(row: dict[str, str], *more: object) -> dict[str, object]:
        if row["max_num_seqs"] == "40":
            raise KeyboardInterrupt
        return counting(row, *more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(batch, "predict_row", interrupt)
        patch.setattr(os, "_exit", lambda code: pytest.fail(str(code)))
        with pytest.raises(pytest.fail.Exception, match="130"):
            predict(tmp_path, ROWS)
    assert not (tmp_path / "out.csv").exists()
    predicted.clear()
    predict(tmp_path, ROWS, "--resume")
    assert predicted == ["40", "48"]


def test_another_calibration_file_or_planner_is_another_question(
    tmp_path: Path, predicted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = tmp_path / "own.yaml"
    options = ["--resume", "--calibration", str(calibration)]
    for memory in ("0.7", "0.8"):
        calibration.write_text(
            f"H100: {{coefficients: {{memory: {memory}}}, source: mine, date: '2026-11'}}"
        )
        predict(tmp_path, ROWS[:1], *options)
    predict(tmp_path, ROWS[:1], *options)
    assert predicted == ["8", "8"]
    predict(tmp_path, ROWS[:1], "--resume")
    monkeypatch.setattr(answer_store, "compute_build_digest", lambda: "another build")
    predict(tmp_path, ROWS[:1], "--resume")
    assert predicted == ["8"] * 4


def test_a_file_that_a_row_names_is_part_of_its_question(
    tmp_path: Path, predicted: list[str]
) -> None:
    header, row = [*HEADER, "trace"], [*ROWS[0], "trace.csv"]
    for tokens in (5, 6, 6):
        (tmp_path / "trace.csv").write_text(
            f"arrival,prompt_tokens,output_tokens\n0,10,{tokens}\n1,10,5\n"
        )
        predict(tmp_path, [row], "--resume", header=header)
    assert predicted == ["8", "8"]


def test_a_key_holds_the_folder_of_a_model_with_its_quantization(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    keys = {compute_answer_key("row", ["model"], tmp_path)}
    for name in ("config.json", "hf_quant_config.json"):
        (tmp_path / "model" / name).write_text("{}")
        keys.add(compute_answer_key("row", ["model"], tmp_path))
    assert len(keys) == 3
    assert compute_answer_key("point", ["model"], tmp_path) not in keys


def test_a_store_keeps_answers_but_not_errors(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path / "answers.sqlite")
    store.add({"a": {"status": "ok", "gpus": 2}, "b": {"status": "error", "error": "no network"}})
    keys = ["a", "b", "c", *map(str, range(1000))]
    assert AnswerStore(store.path).fetch(keys, COLUMNS) == {"a": {"status": "ok", "gpus": 2}}
    (tmp_path / "other").write_text("no data base at all, but text" * 50)
    with pytest.raises(PlannerError, match="as a store"):
        AnswerStore(tmp_path / "other")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "{",
        "[" * 100_000,
        '{"gpus": 2}',
        '{"status": "fine"}',
        '{"status": ["ok"]}',
        '{"status": "ok", "gpus": NaN}',
        '{"status": "ok", "gpus": [2]}',
        '{"status": "ok", "another": 2}',
    ],
)
def test_a_damaged_answer_is_computed_again(tmp_path: Path, text: str) -> None:
    messages: list[str] = []
    store = AnswerStore(tmp_path / "answers.sqlite", messages.append)
    store.add({key: {"status": "ok"} for key in "ab"})
    with closing(sqlite3.connect(tmp_path / "answers.sqlite")) as database, database:
        database.execute("update answers set answer = ? where key = 'a'", [text])
    assert store.fetch(["a", "b"], COLUMNS) == {"b": {"status": "ok"}}
    assert len(messages) == 1 and "1 answers" in messages[0]
    store.add({"a": {"status": "ok"}})
    assert len(store.fetch(["a", "b"], COLUMNS)) == 2 and len(messages) == 1


def test_a_corrupt_store_is_one_line_and_everything_is_computed(
    tmp_path: Path,
    cache_home: Path,
    predicted: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fresh = predict(tmp_path, ROWS[:3])
    store = cache_home / "headroom" / "answers.sqlite"
    whole = store.read_bytes()
    for damaged in (b"no database, but text" * 50, whole[:100] + b"x" * (len(whole) - 100)):
        store.write_bytes(damaged)
        predicted.clear()
        assert predict(tmp_path, ROWS[:3], "--resume") == fresh
        assert len(predicted) == 3
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and f"cannot use {store} as a store of answers" in message
        assert store.read_bytes() == damaged


@pytest.mark.parametrize("change", ["mode", "owner"])
def test_a_store_that_others_may_write_is_not_used(
    tmp_path: Path,
    cache_home: Path,
    predicted: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    store = cache_home / "headroom" / "answers.sqlite"
    predict(tmp_path, ROWS[:1])
    assert store.stat().st_mode & 0o777 == 0o600
    assert store.parent.stat().st_mode & 0o777 == 0o700
    if change == "mode":
        store.chmod(0o666)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: store.stat().st_uid + 1)
    predicted.clear()
    predict(tmp_path, ROWS[:1], "--resume")
    message = capsys.readouterr().err
    assert predicted == ["8"] and message.count("\n") == 1 and "a store of answers" in message


@pytest.mark.parametrize("place", ["~/.cache/headroom", "{}/file/headroom", "/proc/none/headroom"])
def test_without_a_cache_folder_nothing_is_kept_and_nothing_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    """The user has no home, as in a container, or the folder cannot be created, for root neither."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "user_cache_path", lambda _: Path(place.format(tmp_path)))
    assert find_private_folder() is None
    predict(tmp_path, ROWS[:1], "--resume")
    assert "you have no private cache folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out.csv", "rows.csv"]


def test_a_sweep_takes_its_answers_from_the_same_store(
    tmp_path: Path, cache_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = {
        "answer": "predict",
        "scenario": "edge-8b-24gb",
        "grid": {"workload.rate": [0.1, 0.1, 0.5]},
    }
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    line = ["sweep", str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "out.csv")]
    assert main([*line, "--workers", "1"]) == 0
    assert "2 of 2 points, 0 from the store" in capsys.readouterr().err
    table = (tmp_path / "out.csv").read_bytes()
    assert main(line) == 0
    assert "2 of 2 points, 2 from the store" in capsys.readouterr().err
    assert (tmp_path / "out.csv").read_bytes() == table
    store = cache_home / "headroom" / "answers.sqlite"
    with closing(sqlite3.connect(store)) as database, database:
        database.execute("update answers set answer = replace(answer, '\"ok\"', '\"fine\"')")
    assert main([*line, "--workers", "1"]) == 0
    message = capsys.readouterr().err
    assert "2 answers in" in message and "2 of 2 points, 0 from the store" in message
    assert (tmp_path / "out.csv").read_bytes() == table


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
    (tmp_path / "rows.csv").write_text(
        f"model,model_config,gpu\n,/proc/self/mem,H100\n{MODEL},,H100\n"
    )
    source, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    code = batch.predict_file(source, out)
    with out.open(newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["error", "ok"]
    assert code == 1
