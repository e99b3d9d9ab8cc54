"""What comes in is read as written or refused in a sentence, in bounded time, depth and size."""

import json
import os
import re
from pathlib import Path

import pytest

from planner.calibration.benchmark_results import read_benchmark_results
from planner.core.catalog import StrictEntry, validate_entry
from planner.core.errors import PlannerError
from planner.core.readers import parse_json, parse_yaml, read_text
from planner.core.redaction import redact_text
from planner.hardware.gpus import parse_gpu_count
from planner.models.hf_config import parse_hf_config
from planner.models.registry import _merge_entry_config, list_models, load_model
from planner.planning.scenario import find_scenario_file, load_scenario, parse_scenario
from planner.simulator.schedule_cases import run_schedule_case
from planner.tools.batch import predict_row
from planner.tools.diagnostics.log_comparison import infer_deployment
from planner.tools.diagnostics.startup_log import parse_startup_log
from planner.tools.lint.source_reader import read_source
from planner.ui.cli import main
from planner.workload import traces
from planner.workload.traces import read_trace

KV = "Available KV cache memory: 1.5 GiB\n"


NO_SERVER = "no server starts in"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[Service]\nExecStart=" + "a" * 200_000, NO_SERVER),
        ("ExecStart=/a.sh\n" * 20_000, NO_SERVER),
        ("\n" * 200_000, NO_SERVER),
        ("{{" * 100_000, NO_SERVER),
        ("{{" + " " * 10**6 + "a", NO_SERVER),
        ("A=" + " " * 10**6 + "a", NO_SERVER),
        ("<<a " * 40_000, NO_SERVER),
        ("".join(f"cat >{n} <<E\n" for n in range(60_000)) + "E", NO_SERVER),
        ("".join(f"export A{n}=\na\n" for n in range(60_000)), "more than 500 variables"),
        ("[Service]\nEnvironment=A=" + "a" * 10**6, "at most 131,072 characters"),
        ("sh -c '" + "$@ " * 10**5 + "' a " + "b " * 10**5, "grows beyond 262,144 characters"),
        ("A=aa " + " ".join(f"A{n + 1}=$A{n}$A{n}" for n in range(60)).replace("A0", "A"), "grows beyond"),
        ("A=" + "a" * 10**5 + "\necho " + "$A" * 10**5, "grows beyond"),
        ("A=()\n" + "A+=(a)\n" * 10**5, "grows beyond"),
        ("vllm serve a " + "--a " * 50_000, "more than 21,000 words"),
    ],
    ids=lambda text: f"{text:.30}",
)  # fmt: skip
def test_a_long_text_is_read_once(text: str, told: str) -> None:
    """Not once more for each of its characters, lines or variables, which would take hours."""
    with pytest.raises(PlannerError, match=told):
        read_source(text)


def test_a_long_line_is_searched_once() -> None:
    names = "a." * 50_000, "(" * 100_000, "a" + " " * 100_000 + "b"
    assert redact_text(names[0]) == names[0]
    assert redact_text("1.http://user:pw@host") == "1.http://...@host"
    for text in ("\\" + "a" * 100_000, "eyJ-" * 25_000, "a.-" * 30_000, "://" * 30_000):
        redact_text(text)
    for name in names:
        with pytest.raises(PlannerError):
            parse_gpu_count(name)
        with pytest.raises(PlannerError):
            load_model(name)
    for text in ("`" * 250_000, "```a\n" * 50_000, "```\n```\n" + "`vllm serve " * 20_000):
        with pytest.raises(PlannerError, match=NO_SERVER):
            read_source(f"```\n```\n{text}")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("1:30", "1:30"),
        ("yes", "yes"),
        ("off", "off"),
        ("010", 10),
        ("1e3", 1000.0),
        ("2024-01-01", "2024-01-01"),
    ],
)
def test_scalars_are_read_as_written(text: str, read: object) -> None:
    assert parse_yaml(text, "x") == read


@pytest.mark.parametrize("text", ["[" * 30_000, "- " * 30_000, "{a: " * 30_000, '{"a":' * 30_000])
def test_nesting_is_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    for parse in (parse_yaml, parse_json):
        with pytest.raises(
            PlannerError,
            match=r"nested deeper than 100 levels|maximum nesting depth|not JSON: Expecting",
        ):
            parse(text, "x")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PlannerError):
        load_model(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: a is given twice"),
        ("rate: 9007199254740993", "beyond 2^53"),
        ("a: &a [1, 1, 1]\n" + "".join(f"{y}: &{y} [{f'*{x}, ' * 99}]\n" for x, y in zip("abcd", "bcde", strict=True)),
         "aliases stand for too much"),
        ("a: &a [*a]", "aliases stand for too much"),
        ("a: !!bool x", "not valid YAML"),
        ("[" + "~," * 2**18 + "]", "more than 65,536 values"),
    ],
)  # fmt: skip
def test_yaml_traps_are_refused(text: str, told: str) -> None:
    with pytest.raises(PlannerError, match=re.escape(told)):
        parse_yaml(text, "mine.yaml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "'b' is given twice"),
        ("[" + "{}," * 10**7 + "1]", "at most 8e+08 are given"),
        ('["' + "\N{ROCKET}" * 10**8 + '"]', "at most 8e+08 are given"),
    ],
)
def test_json_traps_are_refused(text: str, told: str) -> None:
    with pytest.raises(PlannerError, match=re.escape(told)):
        parse_json(text, "mine.json")


def test_half_characters_are_no_text(tmp_path: Path) -> None:
    data = parse_yaml(Path(find_scenario_file("chat-70b")).read_text(encoding="utf-8"), "chat-70b")
    half = "\ud800"
    config = _merge_entry_config("meta-llama/Llama-3.1-8B")
    (tmp_path / f"{os.fsdecode(bytes([255]))}.yaml").write_text(json.dumps(data))
    for read in (
        lambda: parse_scenario({**data, "question": half}, "mine"),
        lambda: parse_scenario({**data, "engine_args": {"kv_cache_dtype": half}}, "mine"),
        lambda: load_scenario(next(tmp_path.iterdir())),
        lambda: load_model({**config, "_name_or_path": half}),
        lambda: parse_yaml(f'"{half}"', "mine"),
    ):
        with pytest.raises(PlannerError, match=r"unicode|Unicode|utf-8"):
            read()


@pytest.mark.parametrize(
    "pattern",
    [
        "re:(a+)+$",
        "re:" + "e?" * 30 + "e" * 30,
        "re:" + "(e|e|.)" * 20 + "Z",
        "*e" * 8,
        "re:[(",
        "re:(e)\\1",
    ],
)
def test_expressions_of_module_names_that_may_take_hours_are_refused(pattern: str) -> None:
    config = {
        **_merge_entry_config("meta-llama/Llama-3.1-8B"),
        "quantization_config": {"quant_method": "fp8", "ignore": [pattern]},
    }
    with pytest.raises(PlannerError, match="quantization_config"):
        load_model(config)


def test_expressions_of_published_checkpoints_keep_their_meaning() -> None:
    ignore = ["re:.*mlp\\.(gate|up)_proj.*", "re:^.*self_attn\\.[qk]_proj$"]
    config = {
        **_merge_entry_config("meta-llama/Llama-3.1-8B"),
        "quantization_config": {"quant_method": "fp8", "ignore": ignore},
    }
    stored = load_model(config).quantization
    named = {
        w.name
        for w in load_model(config).architecture.layers[0].weights
        if w.linear and not stored.get_weight_format(w, "layers.0.")
    }
    assert named == {"self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"}


def test_a_truth_value_is_no_number_in_any_entry() -> None:
    class Sizes(StrictEntry):
        sizes: dict[str, float]

    with pytest.raises(PlannerError, match=r"field sizes\.a: must be a number, got True"):
        validate_entry(Sizes, {"sizes": {"a": True}}, "x")


def test_mebibytes_for_gibibytes_get_a_hint() -> None:
    with pytest.raises(PlannerError, match=r"if it is MiB, write 6$"):
        load_scenario("edge-8b-24gb", {"other_tenants_gib": 6144})
    row = {"model": "meta-llama/Llama-3.1-8B-Instruct", "gpu": "L4", "gpu_free_gib": "22528"}
    assert "if it is MiB, write 22" in str(predict_row(row)["error"])


def test_only_regular_files_of_bounded_size_and_utf_8_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "latin").write_bytes(b"ok\xe9")
    (tmp_path / "big").write_bytes(b"a" * 101)
    for path, told in ((tmp_path, "a directory"), (tmp_path / "fifo", "no regular file"), (Path("/dev/zero"), "no reg"),
                       (tmp_path / "latin", "byte 3 is not UTF-8"), (tmp_path / "big", "at most"),
                       (Path("a\0b"), "null"), (Path("a" * 5000), "too long")):  # fmt: skip
        with pytest.raises(PlannerError, match=re.escape(told)):
            read_text(path, 100)


@pytest.mark.parametrize("end", ["\n" * 200_000, ",,\n" * 100_000])
def test_blank_lines_at_the_end_of_a_trace_take_no_time(end: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival,prompt_tokens,output_tokens\n0,1,1\n1,1,1\n" + end)
    assert read_trace(tmp_path / "t.csv").rate == 1


@pytest.mark.parametrize(
    "text",
    ["a" * 400_000, "1" * 400_000, "1," * 200_000, "Free memory on device " * 20_000, "Graph capturing " * 25_000,
     "speculative_config={" * 20_000, "Error" * 80_000, "model='" * 60_000],
)  # fmt: skip
def test_one_long_line_of_a_log_takes_no_time(text: str) -> None:
    assert parse_startup_log(KV + text).figures["kv_available"] == 1.5 * 2**30


def test_a_pattern_of_a_million_layers_is_refused() -> None:
    config = _merge_entry_config(list_models()[0]) | {"hybrid_override_pattern": "*" * 10**6}
    with pytest.raises(
        PlannerError, match="hybrid_override_pattern: expected at most 2,000 entries"
    ):
        parse_hf_config(config)


def test_a_case_that_would_take_hours_is_refused(tmp_path: Path) -> None:
    config = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "num_blocks": 9,
        "block_size": 1,
        "max_model_len": 2**31 - 1,
    }
    requests = [{"id": "a", "arrival_step": 0, "prompt_len": 2**30, "output_len": 1}]
    (tmp_path / "case.json").write_text(json.dumps({"config": config, "requests": requests}))
    with pytest.raises(PlannerError, match=r"1\.07e\+09 steps together are more than"):
        run_schedule_case(tmp_path / "case.json")
    config["block_size"] = 16_000_000  # which would take a gigabyte
    (tmp_path / "case.json").write_text(json.dumps({"config": config, "requests": requests}))
    with pytest.raises(PlannerError, match="block_size"):
        run_schedule_case(tmp_path / "case.json")


def test_a_number_where_a_log_names_a_format_or_gpu_is_refused() -> None:
    for named in ("quantization=8, device_name=H100", "device_name=8"):
        with pytest.raises(PlannerError, match=r"does not name its GPU|quantization"):
            infer_deployment(
                parse_startup_log(f"{KV}model='meta-llama/Llama-3.1-8B-Instruct', {named}")
            )


def test_a_cell_of_two_hundred_thousand_letters_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("gpu,model,measured_ttft_ms\n" + "a" * 200_000)
    with pytest.raises(PlannerError, match="is not a CSV"):
        read_benchmark_results([tmp_path / "b.csv"])


def test_a_misspelt_measured_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text(
        "gpu,model,concurrency,isl,osl,measured_ttft_ms,measured_tpot\n"
    )
    with pytest.raises(
        PlannerError, match="unknown column measured_tpot; did you mean measured_tpot_ms"
    ):
        read_benchmark_results([tmp_path / "b.csv"])


@pytest.mark.parametrize("most", ["MAX_TRACE_REQUESTS", "MAX_TRACE_BLOCKS"])
def test_a_trace_has_so_many_requests(
    most: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, most, 3)
    line = '{"timestamp": %d, "input_length": 600, "output_length": 1, "hash_ids": [1, %d]}\n'
    (tmp_path / "t.jsonl").write_text("".join(line % (n, n) for n in range(5)))
    with pytest.raises(PlannerError, match="cut it to its busiest hours"):
        read_trace(tmp_path / "t.jsonl")


def test_numbers_beyond_floats_are_no_tokens(tmp_path: Path) -> None:
    line = '{"arrival": 0, "prompt_tokens": 1%s, "output_tokens": 1}\n'
    (tmp_path / "t.jsonl").write_text(line % "" + line % ("0" * 400))
    with pytest.raises(PlannerError, match="line 2, field prompt_tokens"):
        read_trace(tmp_path / "t.jsonl")


def test_a_refusal_is_one_printable_line_whatever_it_quotes() -> None:
    said = str(PlannerError("a\nb\x1b[31m\ud800" + "c" * 10**6))
    assert said.startswith("a b\\x1b[31m\\ud800ccc") and said.isprintable() and len(said) <= 400


def test_a_part_of_a_name_takes_no_time_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "models", "[" * 30_000]) == 2
    assert "at most 200 letters" in capsys.readouterr().err


def test_a_name_is_no_glob_pattern() -> None:
    with pytest.raises(PlannerError, match="unknown model"):
        load_model("**")


def test_a_file_name_longer_than_names_may_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs.csv").write_text(
        "gpu,model,concurrency,isl,osl,measured_ttft_ms,measured_tpot_ms\nH100,Qwen/Qwen3-8B,1,100,10,20,8\n"
    )
    runs = str(tmp_path / "runs.csv")
    for command in (["calibrate", runs], ["predict", "--resume", runs], ["plan", "edge-8b-24gb"]):
        assert main([*command, "--out", str(tmp_path / ("1" * 300))]) == 2
        assert "too long" in capsys.readouterr().err
