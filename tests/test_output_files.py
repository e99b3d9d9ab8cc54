"""What is written is whole or not there, however its writer ends, and files of two plans are never mixed."""

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from shipped import answer_of
from test_plan_command import QUESTION

from planner.core.errors import PlannerError
from planner.core.files import get_report_date, replace_atomically
from planner.core.readers import read_text
from planner.planning.scenario import load_scenario
from planner.planning.search import search_deployments
from planner.ui.cli import main
from planner.ui.plan_files import check_plan_folder, write_plan_files, write_plan_folders

MEASURED = """\
model,gpu,engine,engine_version,isl,osl,concurrency,num_prompts,measured_ttft_ms,measured_tpot_ms
meta-llama/Llama-3.1-8B-Instruct,L40S,vllm,0.20.2,512,64,8,16,60,24
"""
WRITER = """
import sys
from pathlib import Path
from planner.core.files import replace_atomically
while True:
    with replace_atomically(*(Path(sys.argv[1]) / str(n) for n in range(4))) as parts:
        for part in parts:
            part.write_text(sys.argv[2] * 100_000)
"""
WRITES = ("open", "os.rename", "os.remove", "os.chmod", "os.mkdir", "os.rmdir", "os.link")


def killed(write: Callable[[], object], folder: Path, moment: int) -> bool:
    """Whether a fork of this process that writes is killed at this change of the folder."""
    sys.stdout.flush()
    if not (child := os.fork()):
        steps = 0

        def step(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal steps
            if event in WRITES and str(folder) in str(arguments):
                steps += 1
                if steps == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(step)
        try:
            write()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def letters(folder: Path) -> list[str]:
    """The letters that each whole file of `WRITER` is made of."""
    found = [(folder / str(n)).read_text() for n in range(4)]
    assert all(len(text) == 100_000 and len(set(text)) == 1 for text in found)
    return [text[0] for text in found]


def writer(folder: Path, letter: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, folder, letter])


CASE_FILE = Path(__file__).parent / "data" / "schedules" / "preemption_async.json"
COMMANDS = {
    "calibrate in.csv --out out.yaml": (MEASURED, MEASURED.replace("60,24", "70,30")),
    "predict in.csv --out out.csv": (MEASURED, MEASURED.replace(",512,", ",600,")),
    "replay in.csv --step-log out.csv": (
        (case := CASE_FILE.read_text(encoding="utf-8")),
        case.replace('"output_len": 1', '"output_len": 2'),
    ),
    "init out.yaml": ("", ""),
}
"""Commands that write a file, and what they read: before it is killed, and then."""


@pytest.mark.parametrize("command", ["plan", *COMMANDS])
def test_a_command_killed_at_any_of_its_writes_leaves_old_or_new_files(
    command: str, tmp_path: Path, mine: Path
) -> None:
    """Or the next command that reads one of them says that they may be of two, as several are replaced."""
    kept, out, pdf = tmp_path / "kept", tmp_path / "out", tmp_path / "new.pdf"
    for folder in (kept, out):
        (folder / "a").mkdir(parents=True)
    if command == "plan":  # so do reports and fleets, whose plans have folders beside the PDF
        changes = ({"files": ["script"]}, {"files": [], "workload.rate": 3})
        answers = [answer_of(search_deployments(load_scenario(mine, each))) for each in changes]
        pdf.write_text("%PDF")
        (kept / "r.pdf").write_text("old")
        write_plan_files(answers[0], kept / "a")

        def write() -> None:
            write_plan_folders({out / "a": answers[1]}, {out / "r.pdf": pdf})
    else:
        before, now = COMMANDS[command]

        def write() -> None:
            words = [str(out / word) if "." in word else word for word in command.split()]
            assert main(words) == 0

        if before:
            (out / "in.csv").write_text(before)
            write()
        (out / "in.csv").write_text(now)
        shutil.copytree(out, kept, dirs_exist_ok=True)
    old = contents(kept)
    shutil.copytree(kept, out, dirs_exist_ok=True)
    write()
    new, mixed, moment = contents(out), 0, 0
    assert old != new
    for moment in range(1, 200):
        shutil.rmtree(out)
        shutil.copytree(kept, out)
        if not killed(write, out, moment):
            break
        if (found := contents(out)) not in (old, new):
            mixed += 1
            for name in found.keys() - {"r.pdf"}:
                with pytest.raises(PlannerError, match="was killed; run it again"):
                    read_text(out / name)
            check_plan_folder(answers[1].scenario, out / "a", force=False)
        if found != new or command == "plan":
            write()
        assert contents(out) == new
        assert all(read_text(out / name) for name in new.keys() - {"r.pdf"} if new[name])
    assert moment > 3 and (mixed > 2) == (command == "plan") and contents(out) == new


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


def test_of_two_plans_at_once_the_later_is_whole(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has looked at the folder before the first one writes a file that it has not."""
    out = tmp_path / "out"
    first = answer_of(search_deployments(load_scenario(mine)))
    second = answer_of(search_deployments(load_scenario(mine, {"files": []})))
    write_plan_files(second, out)
    alone = contents(out)

    def replace_later(*paths: Path, **options: Any) -> Any:
        with monkeypatch.context() as undone:
            undone.setattr("planner.ui.plan_files.replace_atomically", replace_atomically)
            write_plan_files(first, out)
        assert contents(out).keys() > alone.keys()
        return replace_atomically(*paths, **options)

    monkeypatch.setattr("planner.ui.plan_files.replace_atomically", replace_later)
    write_plan_files(second, out)
    assert contents(out) == alone


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
    """File -> what is in it, without what a killed writer left under names of its own."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name[0] != "."
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
    shutil.copyfile(CASE_FILE, tmp_path / "case.json")
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
    before = contents(tmp_path)
    with full_disk(100):
        assert [main(command) for command in commands] == [70, 70]
    assert capsys.readouterr().err.count("File too large") == 2
    assert contents(tmp_path) == before


def test_the_date_is_that_of_source_date_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86399")
    assert get_report_date() == date(1970, 1, 1)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "soon")
    with pytest.raises(PlannerError, match="SOURCE_DATE_EPOCH: expected whole seconds"):
        get_report_date()


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
        "case.json": CASE_FILE.read_text(),
    }  # fmt: skip
    own |= dict.fromkeys(("table.csv", "steps.csv", "requests.csv"), "point,own\n1,2\n")
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
