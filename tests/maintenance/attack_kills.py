"""Attacks on what is written: commands that are killed, ended or interrupted at random moments.

`python tests/maintenance/attack_kills.py --count 50` does so many to every command (`--only fleet report` for
the slow ones) and prints one line per violation: a half file or files of two answers under final
names, a changed input, a next run that fails or answers otherwise, an answer that `predict
--resume` loses or finds again, a command or a child that goes on.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # which the suite replaces

from attack_inputs import CASE, MEASURED, QUESTION

from planner.core.files import UNFINISHED
from planner.tools.answer_store import open_default_store
from planner.ui.cli import main as planner

ROOT = Path(__file__).parents[2]
ROW = "{},meta-llama/Llama-3.1-8B-Instruct,H100,{},64,{}\n"
ROWS = [
    "id,model,gpu,isl,osl,concurrency\n" + "".join(ROW.format(n, 500 + n, 16) for n in range(many))
    for many in (9, 24)
]
CASES = [json.dumps({**CASE, "requests": CASE["requests"][:many]}) for many in (3, 7)]
QUESTIONS = [
    yaml.safe_dump({**QUESTION, "workload": {**QUESTION["workload"], "rate": rate}})
    for rate in (3, 4)
]
STOCKS = [yaml.safe_dump({"scenarios": ["edge-8b-24gb"], "stock": {"L4": many}}) for many in (6, 8)]
SWEEPS = [
    yaml.safe_dump(
        {"answer": "predict", "scenario": "edge-8b-24gb", "deployment": {"gpu": "L4"},
         "grid": {"workload.rate": [n / 100 for n in range(1, many)]}}
    )
    for many in (3, 9)
]  # fmt: skip
MEASUREMENTS = [MEASURED, MEASURED.replace("60,24", "70,30")]
COMMANDS = {
    "plan": (["plan", "mine.yaml", "--out", "out"], "mine.yaml", QUESTIONS),
    "predict": (["predict", "rows.csv", "--out", "answers.csv"], "rows.csv", ROWS),
    "calibrate": (["calibrate", "runs.csv", "--out", "own.yaml"], "runs.csv", MEASUREMENTS),
    "replay": (["replay", "case.json", "--step-log", "steps.csv"], "case.json", CASES),
    "sweep": (["predict", "sweep.yaml", "--out", "table.csv", "--workers", "2"], "sweep.yaml", SWEEPS),
    "fleet": (["fleet", "stock.yaml", "--out", "out"], "stock.yaml", STOCKS),
    "report": (["report", "mine.yaml", "--out", "out"], "mine.yaml", QUESTIONS),
}  # fmt: skip
"""Command line, its input, and what stands in that for the answer that is there before, and for the new one."""
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
QUICK = ("plan", "predict", "calibrate", "replay", "sweep")


def contents(folder: Path) -> Mapping[str, bytes]:
    """Path -> what is in it, without what killed writers leave under names of their own."""
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".part", ".partial") and path.name != UNFINISHED
    ]
    names = {
        str(path.relative_to(folder)): path
        for path in files
        if "tmp" not in path.relative_to(folder).parts
    }
    return {name: path.read_bytes() for name, path in names.items()}


def undisturbed(folder: Path, line: list[str]) -> tuple[int, str]:
    """How a command ends, and what it says; in this process, which has imported everything."""
    quiet = (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said := io.StringIO()),
    )
    with (
        quiet[0],
        quiet[1],
        contextlib.chdir(folder),
        patch.dict(os.environ, {"SOURCE_DATE_EPOCH": "0"}),
    ):
        return planner(line), said.getvalue()


def started(folder: Path, line: list[str]) -> subprocess.Popen[bytes]:
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder / "tmp"),
        "SOURCE_DATE_EPOCH": "0",
    }
    return subprocess.Popen([sys.executable, "-m", "planner", *line], cwd=folder, env=environment, process_group=0,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip


class Victim:
    """A command with its answers before and after, and the seconds that it takes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.line, self.input, texts = COMMANDS[name]
        self.before, self.folder = folder / "before", folder / "now"
        self.before.mkdir()
        (self.before / self.input).write_text(texts[0])
        self.code = undisturbed(self.before, self.line)[0]  # of verify it is the verdict's
        assert self.code in (0, 1, 3)
        (self.before / self.input).write_text(texts[1])
        shutil.copytree(self.before, self.folder)
        began = time.monotonic()
        assert started(self.folder, self.line).wait() == self.code
        self.seconds = time.monotonic() - began
        self.old, self.new = contents(self.before), contents(self.folder)
        assert self.old.keys() == self.new.keys() and self.old != self.new

    def killed(self, rng: random.Random) -> tuple[str, str]:
        """By which signal, or that it came too late, and what was wrong afterwards."""
        shutil.rmtree(self.folder)
        shutil.copytree(self.before, self.folder)
        if store := open_default_store(print).path:
            store.unlink()  # what the earlier runs answered
        sent, running = rng.choice(SIGNALS), started(self.folder, self.line)
        try:
            running.wait(rng.uniform(0.1, 0.7) * self.seconds)
            fate = "done"
        except subprocess.TimeoutExpired:
            fate = sent.name
        children = psutil.Process(running.pid).children(recursive=True) if fate != "done" else []
        if fate != "done":
            (os.killpg if sent is signal.SIGINT else os.kill)(running.pid, sent)
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            running.kill()
            return fate, "it went on"
        if alive := psutil.wait_procs(children, timeout=10)[1]:
            return fate, f"{len(alive)} children went on"
        said = any(self.folder.rglob(UNFINISHED))  # by whichever command reads it next
        if (found := contents(self.folder)) not in (self.old, self.new) and not said:
            return (
                fate,
                (
                    "neither old nor new:"
                    f" {[name for name in self.new if found.get(name) != self.new[name]]}"
                ),
            )
        return fate, self.again()

    def again(self) -> str:
        """What is wrong with the next run; kept answers are marked, which those found again would not be."""
        resumes = self.line[0] == "predict"
        store, kept = open_default_store(print).path if resumes else None, 0
        if store and store.exists():
            with closing(sqlite3.connect(store)) as database, database:
                mark = "update answers set answer = replace(answer, '\"ok\"', '\"does_not_fit\"')"
                kept = database.execute(mark).rowcount
        code, said = undisturbed(self.folder, [*self.line, *["--resume"] * resumes])
        found = contents(self.folder)
        marked = sum(text.count(b",does_not_fit,") for text in found.values())
        found = {name: text.replace(b",does_not_fit,", b",ok,") for name, text in found.items()}
        if code != self.code or found != self.new:
            return f"the next run ends with {code}, or is not as it would have been: {said[-300:]}"
        return f"{kept - marked} of {kept} answers were found again" if marked != kept else ""


def attacked(name: str, count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """How often a command ended how, of `count` times, and what was wrong."""
    rng, fates, wrongs = random.Random(f"{name} {seed}"), Counter[str](), []
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it, and their children
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache,
        patch.dict(os.environ, {"XDG_CACHE_HOME": cache}),  # a store that nobody else uses
    ):
        victim = Victim(name, Path(folder))
        for turn in range(count):
            fate, wrong = victim.killed(rng)
            fates[fate] += 1
            wrongs += [f"{name}, turn {turn}, {fate}: {wrong}"] if wrong else []
    return fates, wrongs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=COMMANDS, nargs="+", default=list(COMMANDS))
    options, failed = parser.parse_args(), False
    for name in options.only:
        fates, wrongs = attacked(name, options.count, options.seed)
        print("\n".join([*wrongs, f"{name}: {len(wrongs)} violations, {dict(fates)}"]), flush=True)
        failed |= bool(wrongs)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
