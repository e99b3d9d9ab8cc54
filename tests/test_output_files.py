"""What is written is whole or not there, however its writer ends, and files of two plans are never mixed."""

import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pytest
import yaml
from shipped import answer_of
from test_deploy import NAMES
from test_plan_command import QUESTION

from planner.calibration.user_fit import CalibrationFit, fit_calibration
from planner.core.errors import PlannerError
from planner.core.files import get_report_date, replace_atomically
from planner.latency.coefficient_lookup import load_user_calibrations
from planner.planning.scenario import load_scenario
from planner.planning.search import search_deployments
from planner.ui.cli import main
from planner.ui.plan_files import write_plan_files

MEASURED = """\
model,gpu,engine,engine_version,isl,osl,concurrency,num_prompts,measured_ttft_ms,measured_tpot_ms
meta-llama/Llama-3.1-8B-Instruct,L40S,vllm,0.20.2,512,64,8,16,60,24
"""
WRITER = """
import os, signal, sys
from pathlib import Path
from planner.core import files
from planner.core.files import replace_atomically
folder, letter, moment = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
steps = 0
def step(event, arguments):
    global steps
    if event in ("open", "os.rename", "os.remove", "os.chmod") and str(folder) in str(arguments):
        steps += 1
        if steps == moment:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(step)
while True:
    with replace_atomically(*(folder / str(n) for n in range(4))) as parts:
        for part in parts:
            part.write_text(letter * 100_000)
    if moment:
        break
"""


def letters(folder: Path) -> list[str]:
    """The letters that each whole file of `WRITER` is made of."""
    found = [(folder / str(n)).read_text() for n in range(4)]
    assert all(len(text) == 100_000 and len(set(text)) == 1 for text in found)
    return [text[0] for text in found]


def writer(folder: Path, letter: str, moment: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, folder, letter, str(moment)])


def test_a_writer_killed_at_any_of_its_steps_leaves_whole_files(tmp_path: Path) -> None:
    for n in range(4):
        (tmp_path / str(n)).write_text("a" * 100_000)
    for moment in range(1, 40):
        if writer(tmp_path, "b", moment).wait() == 0:
            break
        found = letters(tmp_path)
        assert found == sorted(found, reverse=True)
    assert moment > 10 and letters(tmp_path) == ["b"] * 4


def test_writers_at_once_never_mix(tmp_path: Path) -> None:
    running = [writer(tmp_path, letter) for letter in "xyz"]
    try:
        while not (tmp_path / "3").exists():
            assert all(process.poll() is None for process in running)
            time.sleep(0.01)
        folder = os.open(tmp_path, os.O_RDONLY)
        for _ in range(200):
            fcntl.flock(folder, fcntl.LOCK_EX)  # between two turns
            assert len(set(letters(tmp_path))) == 1
            fcntl.flock(folder, fcntl.LOCK_UN)
        os.close(folder)
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, kept)


def contents(folder: Path) -> Mapping[str, bytes]:
    """File name -> what is in it, without what a killed writer left under a name of its own."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.is_file() and path.suffix != ".part"
    }


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(QUESTION))
    return path


def test_what_is_read_is_never_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, rows = tmp_path / "bench.sh", tmp_path / "rows.csv"
    trace.write_text(
        "arrival,prompt_tokens,output_tokens\n" + "".join(f"{n},512,64\n" for n in range(20))
    )
    rows.write_text(MEASURED)
    for name, changes in (("alerts.yml", {}), ("mine.yaml", {"workload": {"trace": "bench.sh"}})):
        (tmp_path / name).write_text(yaml.safe_dump({**QUESTION, **changes}))
    case = Path(__file__).parent / "data" / "schedules" / "preemption_async.json"
    (tmp_path / "case.json").write_text(case.read_text())
    before = contents(tmp_path)
    for command in (
        ["plan", "alerts.yml", "--out", "."],
        ["plan", "mine.yaml", "--out", "."],
        ["calibrate", "rows.csv", "--out", "./rows.csv"],
        ["calibrate", "rows.csv", "--scenario", "mine.yaml", "--out", "mine.yaml"],
        ["predict", "rows.csv", "--out", "rows.csv"],
        ["replay", "case.json", "--step-log", "case.json"],
        ["replay", "--scenario", "mine.yaml", "--requests", "mine.yaml"],
    ):
        with contextlib.chdir(tmp_path):
            assert main(command) == 2
        assert "is read, and would be written over" in capsys.readouterr().err
        assert contents(tmp_path) == before


def test_what_must_be_new_is_not_written_over_however_late_another_comes(tmp_path: Path) -> None:
    with (
        pytest.raises(PlannerError, match="File exists"),
        replace_atomically(tmp_path / "a", new=True) as (part,),
    ):
        part.write_text("mine")
        (tmp_path / "a").write_text("another's")
    assert contents(tmp_path) == {"a": b"another's"} and len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_leaves_the_earlier_plan(mine: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_plan_files(answer_of(search_deployments(load_scenario(mine))), out)
    before, another = contents(out), search_deployments(load_scenario(mine, {"workload.rate": 3}))
    with (
        full_disk(1500),
        pytest.raises(PlannerError, match=r"^cannot write .*out: File too large$"),
    ):
        write_plan_files(answer_of(another), out)
    assert contents(out) == before
    write_plan_files(answer_of(another), out)
    assert contents(out).keys() == before.keys() and contents(out) != before


def test_only_files_of_an_earlier_plan_are_removed(mine: Path, tmp_path: Path) -> None:
    none = search_deployments(load_scenario(mine, {"service_level": {"ttft": {"p95": 0.1}}}))
    (tmp_path / "bench.sh").write_text("my own")
    write_plan_files(answer_of(none), tmp_path)
    assert (tmp_path / "bench.sh").read_text() == "my own"


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    for path in (tmp_path / "link", Path("/dev/null")):
        with replace_atomically(path) as (part,):
            part.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640 and Path(
        "/dev/null"
    ).is_char_device()
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}


def test_a_full_disk_leaves_what_commands_wrote_before(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, own, out = tmp_path / "runs.csv", tmp_path / "own.yaml", tmp_path / "out"
    measured.write_text(MEASURED)
    commands = (
        ["plan", str(mine), "--out", str(out)],
        ["calibrate", str(measured), "--out", str(own)],
    )
    assert [main(command) for command in commands] == [0, 0]
    before = (contents(tmp_path), contents(out))
    with full_disk(100):
        assert [main(command) for command in commands] == [2, 2]
    assert capsys.readouterr().err.count("File too large") == 2
    assert (contents(tmp_path), contents(out)) == before


def test_the_date_is_that_of_source_date_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86399")
    assert get_report_date() == date(1970, 1, 1)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "soon")
    with pytest.raises(PlannerError, match="SOURCE_DATE_EPOCH: expected whole seconds"):
        get_report_date()


@pytest.mark.parametrize("question", ["".join(NAMES)])
def test_a_question_is_told_in_one_line(
    mine: Path, capsys: pytest.CaptureFixture[str], question: str
) -> None:
    mine.write_text(yaml.safe_dump({**QUESTION, "question": question + "\x1b[2J"}))
    assert main(["plan", str(mine), "--all"]) == 0
    told = capsys.readouterr().out
    labels = [line[:10].strip() for line in told.splitlines()]
    assert "\x1b" not in told and labels[labels.index("Question") + 1] == "Model"


def test_what_the_command_did_not_write_is_replaced_only_by_force(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {
        "serve.sh": "my own\n", "page.md": "# My own page\n", "notes.md": "my own\n",
        "report.pdf": "%PDF-1.7 /Creator (Typst 0.13)",
        "rows.csv": "model,gpu\nQwen/Qwen3-8B,H100\n", "measured.csv": MEASURED,
        "sweep.yaml": yaml.safe_dump(
            {"scenario": "edge-8b-24gb", "answer": "predict", "grid": {"workload.rate": [0.1, 0.2]}}
        ),
        "case.json": (Path(__file__).parent / "data/schedules/preemption_async.json").read_text(),
    }  # fmt: skip
    tables = ("table.csv", "table.svg", "steps.csv", "requests.csv")
    own |= dict.fromkeys(tables, "point,own\n1,2\n") | {"table.svg": "<svg>my own</svg>"}
    for name, text in own.items():
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    commands = (
        (["predict", "rows.csv", "--out", "mine.yaml"], "mine.yaml", 0),
        (["plan", "edge-8b-24gb", "--out", "."], "serve.sh", 0),
        (["predict", "sweep.yaml", "--out", "table.csv", "--store", "kept.sqlite"], "table.csv", 0),
        (["replay", "case.json", "--step-log", "steps.csv"], "steps.csv", 0),
        (["replay", "--scenario", "edge-8b-24gb", "--requests", "requests.csv"], "requests.csv", 0),
        (["calibrate", "measured.csv", "--out", "notes.md"], "notes.md", 0),
    )
    with contextlib.chdir(tmp_path):
        for command in (*(one for one, _, _ in commands), ["report", "edge-8b-24gb", "--out", "."]):
            assert main(command) == 2, command
            assert "--force" in capsys.readouterr().err
        for command in (
            ["predict", "rows.csv", "--out", "no/o.csv"],
            ["calibrate", "measured.csv", "--out", "no/o.yaml"],
            ["replay", "case.json", "--step-log", "no/o.csv"],
        ):
            assert main(command) == 2 and "no folder" in capsys.readouterr().err
        assert contents(tmp_path) == before
        for command, name, code in commands:
            ended = main([*command, "--force"])
            assert code is None or ended == code, capsys.readouterr().err
            assert (tmp_path / name).read_bytes() != before[name]
        for command, _, code in commands:  # its own files it replaces
            assert main(command) in ((0, 1, 3) if code is None else (code,))


def test_what_another_calibration_saves_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, own, others = (tmp_path / name for name in ("runs.csv", "own.yaml", "others.yaml"))
    measured.write_text(MEASURED.replace("L40S", "L4").replace(",60,24", ",200,70"))
    assert main(["calibrate", str(measured), "--out", str(others)]) == 0
    measured.write_text(MEASURED)

    def fit_late(*arguments: object, **options: object) -> CalibrationFit:
        own.write_text(others.read_text())
        return fit_calibration(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("planner.calibration.user_fit.fit_calibration", fit_late)
    assert main(["calibrate", str(measured), "--out", str(own)]) == 0
    assert load_user_calibrations(own).keys() == {"L4", "L40S"}
