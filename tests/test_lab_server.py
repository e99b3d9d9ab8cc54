"""`headroom lab` copies notebooks without overwriting anything, and tells the extension what their code is."""

import json
import re

import pytest

from planner.core.errors import PlannerError
from planner.ui import lab_server
from planner.ui.cli import main
from planner.ui.lab_server import build_extension, copy_notebooks, read_code
from planner.ui.notebook_files import NOTEBOOK_DIR, list_chapter_notebooks


def test_the_script_holds_the_code_of_every_shipped_notebook(tmp_path):
    made = build_extension(tmp_path)
    package = json.loads((made / "package.json").read_text(encoding="utf-8"))
    script = (made / package["jupyterlab"]["_build"]["load"]).read_text(encoding="utf-8")
    shipped = json.loads(re.search(r"const SHIPPED = (\[.+\]);\n", script)[1])
    by_code = {json.dumps(one["code"]): one["runsWhenOpened"] for one in shipped}
    notebooks = [
        path for path in NOTEBOOK_DIR.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
    ]
    assert len(shipped) == len(notebooks) > 20
    assert all(json.dumps(read_code(path)) in by_code for path in notebooks)
    opened = {
        json.dumps(read_code(path))
        for path in (NOTEBOOK_DIR / "start.ipynb", *list_chapter_notebooks())
    }
    assert {code for code, opens in by_code.items() if opens} == opened


def test_the_scripts_name_changes_with_its_content(tmp_path, monkeypatch):
    """JupyterLab has browsers keep the files of extensions for good."""
    names = set()
    for folder, shipped in (("one", []), ("other", [{"runsWhenOpened": True, "code": ["1"]}])):
        monkeypatch.setattr(lab_server, "list_shipped", lambda shipped=shipped: shipped)
        names |= {path.name for path in build_extension(tmp_path / folder).rglob("*.js")}
    assert len(names) == 2


def test_a_copy_keeps_what_is_there(tmp_path):
    assert copy_notebooks(tmp_path) == []
    copied = {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert {
        "start.ipynb",
        "2-vram.ipynb",
        "learn/practice.ipynb",
        "learn/data/llama-4-scout.json",
    } <= copied
    assert not any(name.endswith(".yaml") for name in copied)
    (tmp_path / "2-vram.ipynb").write_text("mine", encoding="utf-8")
    (tmp_path / "README.md").write_text("mine too", encoding="utf-8")
    run = json.loads((tmp_path / "start.ipynb").read_text(encoding="utf-8"))
    run["cells"].append({"cell_type": "markdown", "id": "m", "metadata": {}, "source": "a remark"})
    (tmp_path / "start.ipynb").write_text(json.dumps(run), encoding="utf-8")
    (tmp_path / "fleet.ipynb").unlink()
    assert [name.as_posix() for name in copy_notebooks(tmp_path)] == ["2-vram.ipynb", "README.md"]
    assert (tmp_path / "2-vram.ipynb").read_text(encoding="utf-8") == "mine"
    assert "a remark" in (tmp_path / "start.ipynb").read_text(encoding="utf-8")
    assert (tmp_path / "fleet.ipynb").is_file()


def test_the_packages_own_folder_is_opened_as_it_is():
    before = sorted(NOTEBOOK_DIR.rglob("*"))
    assert copy_notebooks(NOTEBOOK_DIR) == []
    assert sorted(NOTEBOOK_DIR.rglob("*")) == before


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "learn").write_text("a file")
    with pytest.raises(PlannerError, match="learn"):
        copy_notebooks(tmp_path)


@pytest.mark.parametrize(
    ("words", "folder", "options"),
    [
        ([], "headroom-notebooks", []),
        (["mine"], "mine", []),
        (["--no-browser", "--port=8899"], "headroom-notebooks", ["--no-browser", "--port=8899"]),
        (["mine", "--no-browser", "--port=8899"], "mine", ["--no-browser", "--port=8899"]),
        (["--no-browser", "mine"], "mine", ["--no-browser"]),
        (["mine", "--", "--no-browser"], "mine", ["--no-browser"]),
        (["--", "--no-browser"], "headroom-notebooks", ["--no-browser"]),
    ],
)
def test_other_options_reach_jupyterlab(words, folder, options, monkeypatch, tmp_path, capsys):
    given = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jupyterlab.labapp.LabApp.launch_instance", given.extend)
    assert main(["lab", *words]) == 0
    assert given[0] == f"--ServerApp.root_dir={tmp_path / folder}"
    assert given[3:] == options
    assert (tmp_path / folder / "start.ipynb").is_file()
    assert capsys.readouterr().out == f"headroom: notebooks in {folder}\n"


def test_what_is_kept_is_said_in_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("jupyterlab.labapp.LabApp.launch_instance", list)
    (tmp_path / "start.ipynb").write_text("{}")
    assert main(["lab", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and "kept your own start.ipynb" in said[0]


def test_what_is_no_notebook_is_not_told_to_the_extension(monkeypatch, tmp_path):
    """A user of a checkout leaves files among the notebooks."""
    copy_notebooks(tmp_path)
    (tmp_path / "Untitled.ipynb").touch()
    (tmp_path / "9-mine.ipynb").write_text((tmp_path / "2-vram.ipynb").read_text())
    monkeypatch.setattr(lab_server, "NOTEBOOK_DIR", tmp_path)
    monkeypatch.setattr(lab_server, "list_chapter_notebooks", lambda: [tmp_path / "2-vram.ipynb"])
    shipped = lab_server.list_shipped()
    opened = [each["code"] for each in shipped if each["runsWhenOpened"]]
    assert opened == [read_code(tmp_path / name) for name in ("2-vram.ipynb", "start.ipynb")]


def test_the_chapters_are_all_that_are_numbered():
    assert list_chapter_notebooks() == sorted(NOTEBOOK_DIR.glob("[0-9]*.ipynb"))
