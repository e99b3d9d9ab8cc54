"""Whatever a model is called, its files are made of the same parts, and the engine is started with just that name."""

import json
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_deploy import named, started
from test_manifests import written

TOKENS = ["'", '"', "`touch ran`", "$(touch ran)", "${HOME}", "$$", "\\", "\n", "\r\n", "\t", " # ", ": ", "- ", "%n",
          "{{ 7 * 7 }}", "{% raw %}", "&a", "*a", "!!python/none", "|", ">", "; touch ran",
          "\nExecStart=/bin/false\n",
          "\n---\n", "\nEOF\n", "\u2028", "\x85", "\x1b[31m", "\u202e", "🚀", "<b>", "[l](u)",
          "\n# head\n", "null",
          '"} or vector(1) #', "0x10", "$(MODEL)", "${MODEL:?x}", "9", "no"]  # fmt: skip
LETTERS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=3)


def parts(value: Any) -> Any:
    """Keys and kinds of what YAML or JSON says."""
    if isinstance(value, dict):
        return {key: parts(held) for key, held in value.items()}
    if isinstance(
        value, list
    ):  # of words there is one fewer where a name begins like an option, and is tied to it
        return sorted({str(parts(held)) for held in value})
    return type(value).__name__


def shape(file: str, text: str) -> Any:
    """What a file is made of, whatever its text says; nothing of those that are judged elsewhere."""
    if file.endswith((".env", ".service")):
        return [line.partition("=")[0] if line[:1] != "#" else "#" for line in text.split("\n")]
    if file.endswith(".json"):
        return parts(json.loads(text))
    return (
        [parts(document) for document in yaml.safe_load_all(text)]
        if file.endswith((".yaml", ".yml"))
        else None
    )


def files(name: str) -> dict[str, str]:
    """All files of a plan for a model of that name but the one that some names are refused in."""
    return {
        **named(name),
        **{file: text for file, text in written("one", name)[1].items() if file != "runpod.env"},
    }


@given(
    st.lists(st.one_of(st.sampled_from(TOKENS), LETTERS), min_size=1, max_size=8)
    .map("".join)
    .filter(bool)
)
@settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.generate])
def test_any_name_reaches_every_file_only_quoted(name: str) -> None:
    found, plain = files(name), files("plain/name")
    assert found.keys() == plain.keys()
    for file, text in found.items():
        assert shape(file, text) == shape(file, plain[file]), file
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "serve.sh").write_text(found["serve.sh"], newline="")
        assert any(
            word.endswith(name) for word in started([str(folder / "serve.sh")], folder, "vllm")
        )
        (folder / "alerts.yml").write_text(found["alerts.yml"], newline="")
        if promtool := shutil.which("promtool"):
            rules = [promtool, "check", "rules", folder / "alerts.yml"]
            done = subprocess.run(rules, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
