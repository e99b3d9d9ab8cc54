"""`planner.engines.cli_options` reads command lines as the launchers' own parsers do."""

import argparse
import io
import json
import re
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.errors import PlannerError
from planner.core.versions import Version
from planner.engines import cli_options as flags
from planner.engines import engine as engines
from planner.engines.cli_options import (
    get_cli_options,
    list_versions_with_spelling,
    load_flag_lists,
    load_recorded_names,
    load_recorded_options,
)
from planner.engines.metric_names import get_metric_names

LISTED = [
    (engine, str(version))
    for engine in ("vllm", "sglang", "trtllm")
    for version in load_flag_lists(engine).versions
]
COUNTS = {"?": {"nargs": "?"}, "+": {"nargs": "+"}, "*": {"nargs": "*"}, "": {}}


@cache
def reference(engine: str, version: str) -> argparse.ArgumentParser:
    """Python's own argparse with the options of a list: what vLLM and SGLang hand their words to."""
    made = argparse.ArgumentParser(add_help=False)
    made.add_argument("model_tag", nargs="?")
    kinds = {"int": int, "float": float, "json": json.loads}
    for option in {
        option.name: option for option in get_cli_options(engine, version).by_spelling.values()
    }.values():
        if option.kind == "nothing":
            made.add_argument(
                option.name,
                *option.aliases,
                dest=option.argument,
                action="store_true",
                default=None,
            )
            for name in option.negations:
                made.add_argument(name, dest=option.argument, action="store_false", default=None)
        else:
            made.add_argument(option.name, *option.aliases, dest=option.argument, type=kinds.get(option.kind, str),
                              choices=None if option.kind == "int" else option.choices or None,
                              **COUNTS[option.count])  # fmt: skip
    return made


def judged(engine: str, version: str, words: list[str]) -> dict[str, object] | None:
    """What the reference reads; None where it refuses."""
    try:
        with redirect_stderr(io.StringIO()):
            found, rest = reference(engine, version).parse_known_args(words)
    except SystemExit:
        return None
    refused = any(re.match(r"-\D", word) for word in rest)  # -1 is a word like any other
    known = {
        name: value
        for name, value in vars(found).items()
        if value is not None and name != "model_tag"
    }
    return None if refused else known


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[str, str, list[str]]:
    """Words as people write them: options whole, cut short, misspelt, tied to a value or not, with and without one."""
    engine, version = draw(st.sampled_from([(e, v) for e, v in LISTED if e in ("vllm", "sglang")]))
    names = sorted(get_cli_options(engine, version).spellings - {"-h", "--help", "-O"})
    words = []
    for _ in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(names))
        name = draw(
            st.sampled_from([name, name, name, name[: draw(st.integers(4, 40))], name + "x"])
        )
        value = draw(
            st.sampled_from(["", "4", "0.9", "auto", "fp8", '{"a": 1}', "-1", "a b", "x=y", "on"])
        )
        words += draw(st.sampled_from([[name], [name, value], [f"{name}={value}"]]))
    return engine, version, [word for word in words if word]


@given(command_lines())
@settings(max_examples=400, deadline=None)
def test_a_command_line_is_read_as_argparse_reads_it(line: tuple[str, str, list[str]]) -> None:
    engine, version, words = line
    kinds = {
        option.argument: option for option in get_cli_options(engine, version).by_spelling.values()
    }
    read, wanted = get_cli_options(engine, version).parse(words), judged(engine, version, words)
    loose = any(
        g.option and g.option.kind in ("bool", "size", "size or auto", "json or text", "json")
        for g in read.options
    )
    negatives = engine == "vllm" and any(g.written.startswith("--no-") for g in read.options)
    spaced = any(
        g.option is None and " " in " ".join(g.words) for g in read.options
    )  # which argparse takes for a model
    if (
        loose
        or negatives
        or spaced
        or any(kinds[name].count == "*" for name in read.values if name in kinds)
    ):
        return  # kinds that only the engines have; argparse is no reference for them
    if wanted is None:
        assert read.errors
    else:
        assert not read.errors
        assert {name: value for name, value in read.values.items() if value is not None} == wanted


@pytest.mark.parametrize(("engine", "version"), LISTED)
def test_every_option_is_taken_with_a_value_of_its_kind_and_refused_without(
    engine: str, version: str
) -> None:
    known = get_cli_options(engine, version)
    right = {
        "bool": "true",
        "int": "3",
        "float": "0.5",
        "text": "x",
        "json": '{"a": 1}',
        "json or text": "x",
        "size": "8k",
        "size or auto": "auto",
    }
    for spelling in known.spellings:
        option = known[spelling]
        if option.kind == "nothing":
            assert known.parse([spelling]).values == {
                option.argument: spelling not in option.negations
            }
            assert known.parse([f"{spelling}=1"]).errors
            continue
        value = option.choices[0] if option.choices else right[option.kind]
        assert not known.parse([spelling, value]).errors, spelling
        assert bool(known.parse([spelling]).errors) == (option.count in ("", "+"))
        if option.choices:
            assert known.parse([spelling, "no-such-choice"]).errors
    assert known.parse(["--no-such-option"]).errors == ("unknown option --no-such-option",)


def test_what_vllm_reads_differently_from_argparse() -> None:
    read = get_cli_options("vllm", "0.20.2").parse
    assert read(["--max_model_len=8k"]).values == {"max_model_len": 8000}
    assert read(["--max-model-len", "8K"]).values == {"max_model_len": 8192}
    assert read(["--max-model-len", "1.5k"]).values == {"max_model_len": 1500}
    assert read(["--max-model-len", "1.5K"]).errors
    assert read(["--max-model-len", "-1"]).values == {"max_model_len": "-1"}
    assert read(
        ["-sc.method", "ngram", "--speculative-config.num_speculative_tokens", "4"]
    ).values == {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    assert read(["-cc.cudagraph_capture_sizes+", "1", "-cc.cudagraph_capture_sizes+=2"]).values == {
        "compilation_config": {"cudagraph_capture_sizes": [1, 2]}
    }
    assert (
        read(["-O3"]).values
        == read(["-O=3"]).values
        == read(["-O", "3"]).values
        == {"optimization_level": "3"}
    )
    assert get_cli_options("vllm", "0.10.0").parse(["-O3"]).values == {"compilation_config": 3}
    assert (
        not get_cli_options("vllm", "0.33.0").parse(["--no-enable-prefix-caching"]).errors
    )  # hidden, still taken
    assert get_cli_options("vllm", "0.33.0").parse(["--device", "cuda"]).errors == (
        "--device may be --device-ids or --device-memory-utilization",
    )


def test_other_launchers_take_no_beginnings_and_no_other_dashes() -> None:
    assert get_cli_options("trtllm", "1.2.0").parse(["model", "--tp_size", "8"]).values == {
        "tensor_parallel_size": 8
    }
    assert get_cli_options("trtllm", "1.2.0").parse(["model", "--tp-size", "8"]).errors
    assert (
        get_cli_options("sglang", "0.5.10").parse(["--tp", "8"]).errors == ()
    )  # argparse: a unique beginning
    assert get_cli_options("sglang", "0.5.10").parse(["--tp_size", "8"]).errors


def test_a_version_without_a_list_is_read_by_the_nearest_and_says_so() -> None:
    assert get_cli_options("vllm", "0.20.2").note == ""
    assert [
        str(get_cli_options("vllm", short).version) for short in ("0.20", "0.19", "0.20.0")
    ] == [
        "0.20.2",
        "0.18.0",
        "0.18.0",
    ]
    assert get_cli_options("vllm", "0.19.1").note == "vllm 0.19.1 is read by the options of 0.18.0"
    assert str(get_cli_options("vllm", "0.5.0").version) == "0.5.4"
    assert str(get_cli_options("vllm", "nightly").version) == "0.33.0"
    with pytest.raises(PlannerError, match="unknown engine 'ollama'"):
        get_cli_options("ollama", "1.0")


def test_when_options_came_and_went() -> None:
    assert str(list_versions_with_spelling("vllm", "--swap-space")[-1]) == "0.16.0"
    assert str(list_versions_with_spelling("vllm", "--nnodes")[0]) == "0.12.0"
    assert list_versions_with_spelling("vllm", "--disable-log-requests") == [
        *load_flag_lists("vllm").versions[:8],
        Version(0, 33),
    ]
    for spelling, listed in (
        ("--speculative-model", "0.5.4 0.6.6 0.7.3"),
        ("--worker-use-ray", "0.5.4 0.6.6"),
        ("--num-scheduler-steps", "0.6.6 0.7.3 0.8.5 0.10.0"),
    ):
        versions = list_versions_with_spelling("vllm", spelling)
        assert " ".join(map(str, versions)) == listed
    spelt = [
        len(get_cli_options("vllm", version).by_spelling)
        for version in load_flag_lists("vllm").versions[3:]
    ]
    assert spelt == [
        157,
        214,
        262,
        283,
        294,
        310,
        328,
        435,
    ]  # counted in the running parsers, and --config of 0.8.5


def test_what_the_environment_and_metrics_pages_had() -> None:
    environment, metrics = (
        load_recorded_names("environment", "vllm"),
        load_recorded_names("metrics", "vllm"),
    )
    assert " ".join(map(str, environment["VLLM_USE_V1"])) == "0.6.6 0.7.3 0.8.5 0.10.0"
    assert str(environment["VLLM_ATTENTION_BACKEND"][-1]) == "0.14.1"
    assert str(metrics["vllm:gpu_cache_usage_perc"][-1]) == "0.10.0"
    assert metrics["vllm:kv_cache_usage_perc"] == load_flag_lists("vllm").versions[4:]
    assert list(map(str, load_recorded_names("metrics", "sglang")["sglang:token_usage"])) == [
        "0.5.23"
    ]
    for engine in ("vllm", "sglang"):  # what the plan's alerts ask for is there
        for version in load_flag_lists(engine).versions[-2:]:
            asked = get_metric_names(engines.get_engine(engine, version)).names
            assert {name for name in asked.values() if name} <= set(
                load_recorded_names("metrics", engine)
            ), version


def test_a_list_with_a_mistake_names_its_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(flags, "FLAGS_DIR", tmp_path)
    for line, told in (
        (
            "--a,,,number,,,1.2.0,1.2.0",
            "trtllm.csv, line 2: --a takes 'number'; accepted: nothing, bool",
        ),
        ("--a,,,int,,,1.2.0,1.3.0", "trtllm.csv, line 2: expected 8 cells"),
    ):
        (tmp_path / "trtllm.csv").write_text(",".join(flags.FLAG_COLUMNS) + f"\n{line}\n")
        load_recorded_options.cache_clear()
        with pytest.raises(PlannerError) as error:
            load_recorded_options("trtllm")
        assert told in str(error.value)
    load_recorded_options.cache_clear()
