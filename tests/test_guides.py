"""`headroom check-guide`: what public guides state wrongly is found, what is right raises no alarm."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.analysis.guide_judgements import JUDGES, find_guide_model
from planner.analysis.guide_rules import find_stated_rules, judge_rule, load_guide_rules
from planner.core.errors import PlannerError
from planner.tools.guide_check import check_guide
from planner.ui.cli import main

GUIDES = yaml.safe_load(
    (Path(__file__).parent / "data" / "guides.yaml").read_text(encoding="utf-8")
)
VERSION = "0.20.2"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.models.hub.check_hub_reachable", lambda: False)


def name_guide(guide: dict[str, Any]) -> str:
    return str(guide["source"]).rstrip("/").rpartition("/")[2][:40]


@pytest.mark.parametrize("guide", GUIDES["wrong"], ids=name_guide)
def test_every_wrong_number_of_a_public_guide_is_found(guide: dict[str, Any]) -> None:
    found = check_guide(guide["text"]).findings
    assert {one.name: one.verdict for one in found if one.verdict != "right"} == guide["finds"]
    assert {one.name for one in found if one.verdict == "right" and one.kind == "rule"} == {
        *guide["right"]
    }


@pytest.mark.parametrize("guide", GUIDES["correct"], ids=name_guide)
def test_no_false_alarm_on_a_guide_that_is_right(guide: dict[str, Any]) -> None:
    found = check_guide(guide["text"])
    assert [one for one in found.findings if one.verdict != "right"] == []


def numbers(text: str) -> list[float]:
    """The numbers of a finding, without those in names."""
    return [
        float(one.replace(",", "")) for one in re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?", text)
    ]


def judged(claim: str, version: str | None = VERSION) -> dict[str, str]:
    """Rule -> verdict, of a text that consists of claims."""
    return {
        one.name: one.verdict for one in check_guide(claim, version).findings if one.kind == "rule"
    }


def test_every_rule_is_recognized_by_its_own_patterns_and_every_judge_is_used() -> None:
    rules = load_guide_rules()
    with_patterns = {rule.judge for rule in rules.values() if rule.patterns}
    assert {rule.judge for rule in rules.values()} == with_patterns == {*JUDGES}
    for name, rule in rules.items():
        if rule.patterns:
            assert name in {one.name for one in find_stated_rules(rule.claim)}, name


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        # bytes of KV cache: 2 x 80 layers x 8 heads x 128 x 2 bytes = 320 KiB; no grouped heads: eightfold
        ("Llama-3.1-70B keeps 320 KiB of KV cache per token.", "right"),
        ("Llama-3.1-70B keeps 2.6 MB of KV cache per token.", "wrong"),
        ("A 70B on 8 GPUs keeps 40 KiB of KV cache per token and GPU.", "right"),
        ("A 70B on 8 GPUs keeps 80 bytes of KV cache per token and GPU.", "wrong"),
        # 131,072 tokens x 320 KiB = 40 GiB
        ("With Llama-3.1-70B a request of 128K tokens needs 43 GB of KV cache.", "right"),
        ("With a 70B 10 requests of 32K tokens need 800 GB of KV cache.", "wrong"),
        # 70.6 billion parameters of 2 bytes; 6.7 billion
        ("A 70B model takes 140 GB in FP16.", "right"),
        ("A 70B model takes 70 GB in FP16.", "wrong"),
        ("A 7B model takes 14 GB in FP16.", "right"),
        ("An INT4 parameter takes 0.5 bytes per parameter.", "wrong"),
        # 145 GB of weights on two cards of 80 GB, and half of it
        ("Qwen2.5-72B runs on two 80 GB GPUs.", "risky"),
        ("Qwen2.5-72B runs on one 80 GB GPU.", "wrong"),
        ("Qwen2.5-72B in FP8 runs on two 80 GB GPUs.", "right"),
        ("Qwen2.5-72B in BF16 does not fit on two 80 GB GPUs.", "right"),
        ("A 4-bit 70B model runs on one 48 GB card.", "right"),
        # 24 GB less 13.5 of weights, at 512 KiB a token: a dozen thousand tokens
        ("Start a 7B on an A10G with max_num_seqs 64.", "wrong"),
        ("Start a 7B on an A10G with max_num_seqs 4.", "right"),
        ("Start a 13B on an A100 40GB with max_num_seqs 64.", "wrong"),
        ("Start a 70B on eight H100 with max_num_seqs 256.", "right"),
        ("Start a 70B on eight A100 with max_num_seqs 256.", "right"),
        ("Llama-3.1-8B on one H100 holds 500 requests of 8K tokens at once.", "wrong"),
        ("The H100 reads 3.35 TB/s.", "right"),
        ("The H100 reads 8 TB/s.", "wrong"),
        ("gpu_memory_utilization is the share of the GPU reserved for the KV cache.", "wrong"),
        ("max_model_len reserves memory for every sequence.", "wrong"),
        ("Set max_model_len to the 95th percentile.", "wrong"),
        ("Set max_model_len to the p99 of your lengths.", "wrong"),
        ("Tensor parallelism replicates the KV cache on every rank.", "wrong"),
        ("Larger KV blocks fit more requests.", "wrong"),
        ("Prefilling 32K tokens at 0.98 runs out of memory.", "wrong"),
        ("Prefix caching gives 30-50% less KV cache.", "wrong"),
        ("A prefix-cache hit cuts the TTFT by 50-95%.", "wrong"),
        ("Prefix caching pays from 35% reuse on.", "wrong"),
        ("gpu_memory_utilization from 0.90 to 0.95 gives 15% more throughput.", "wrong"),
        ("INT4 gives 3 times the throughput.", "wrong"),
        ("Speed scales linearly with tensor parallelism.", "wrong"),
        ("Tensor parallelism costs 20 us a layer.", "not checkable"),
        ("A pipeline of p stages leaves (p - 1)/p of its GPUs idle.", "wrong"),
        ("Speculation pays from an acceptance of 70% on.", "wrong"),
        ("An FP8 KV cache is emulated on Ampere and Ada.", "wrong"),
        ("Choose FlashInfer with VLLM_ATTENTION_BACKEND for prefix caching.", "outdated"),
        ("Turn chunked prefill off for short prompts: chunking costs; disable chunking if short.", "wrong"),
        ("Alert at 2% of requests preempted.", "not checkable"),
        ("SGLang is 20 to 25% faster than vLLM for agents.", "not checkable"),
        ("Defaults give 60% of the throughput, tuning gives 95%.", "wrong"),
        ("Warm up before you read a p99.", "right"),
        ("Look at nvidia-smi topo -m first.", "right"),
        ("A GPU utilization above 90% means that the GPU is full.", "wrong"),
    ],
)  # fmt: skip
def test_what_is_known_of_a_claim(claim: str, verdict: str) -> None:
    assert {*judged(claim).values()} == {verdict}


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        # 70.55 G parameters of 2 bytes are 141.1 GB or 131.4 GiB, 320 KiB are 328 kB
        ("A 70B model takes 131 GB in FP16.", ""),
        ("A 70B model takes 131 GiB in FP16.", ""),
        ("A 70B model takes 141 GiB in FP16.", "7.3% too high"),
        ("A 70B model takes 100 GB in FP16.", "29% too low"),
        ("A 70B model takes 100 GiB in FP16.", "24% too low"),
        ("Llama-3.1-70B keeps 320 KB of KV cache per token.", ""),
        ("Llama-3.1-70B keeps 250 KiB of KV cache per token.", "22% too low"),
        # 131,072 tokens of it are 40 GiB or 42.9 GB
        ("With Llama-3.1-70B a request of 128K tokens needs 40 GB of KV cache.", ""),
        ("With Llama-3.1-70B a request of 128K tokens needs 43 GiB of KV cache.", "7.5% too high"),
        ("With Llama-3.1-70B a request of 128K tokens needs 30 GB of KV cache.", "30% too low"),
    ],
)
def test_a_size_is_judged_in_its_own_unit(claim: str, told: str) -> None:
    (found,) = check_guide(claim).findings
    assert found.verdict == ("wrong" if told else "right")
    assert told in found.finding and ("too" in found.finding) == bool(told)


def test_slices_of_a_gpu_are_no_variant_of_it() -> None:
    """NVIDIA's H100: 2.0 (PCIe), 3.35 (SXM) and 3.9 TB/s (NVL); a seventh of one reads less."""
    assert judged("The H100 reads 0.5 TB/s.") == {"bandwidth": "wrong"}


def test_what_is_removed_is_said_once_and_with_what_to_write() -> None:
    (found,) = check_guide("```\nvllm serve m --use-v2-block-manager\n```", "0.33.0").findings
    assert found.finding.count("since") == 1 and found.remember.startswith("leave it out: ")


def test_defaults_are_judged_by_version() -> None:
    """0.90 until 0.18, 0.92 from 0.20 on (vllm config/cache.py)."""
    claim = "gpu_memory_utilization defaults to 0.90."
    assert judged(claim, "0.18.0") == {"option_default": "right"}
    assert judged(claim, "0.20.2") == {"option_default": "outdated"}
    assert "0.20.2" in judge_rule("option_default", version="0.33.0").finding
    assert judged("gpu_memory_utilization defaults to 0.75.", None) == {"option_default": "wrong"}
    assert judged("enable_prefix_caching defaults to false.", "0.6.6") == {
        "option_default": "right"
    }
    assert judged("enable_prefix_caching defaults to false.", None) == {
        "option_default": "outdated"
    }


def test_an_fp8_cache_holds_twice_the_tokens_wherever_it_runs() -> None:
    finding = judge_rule("fp8_kv_emulated", version=VERSION).finding
    assert [float(one) for one in re.findall(r"([\d.]+) times the tokens", finding)] == [2, 2, 2]
    assert min(float(one) for one in re.findall(r"([\d.]+) times the pace", finding)) > 1.1
    assert finding.count("without FP8 arithmetic") == 1  # Ampere; Ada and Hopper have it


def test_a_latent_cache_is_replicated() -> None:
    found = judge_rule("kv_replicated", {"model": "deepseek-ai/DeepSeek-R1"}, VERSION)
    assert found.verdict == "right"


def test_shared_prefixes_save_their_part_and_hits_save_no_more_than_they_find() -> None:
    _, _, _, saved = numbers(judge_rule("prefix_saves_memory").finding)[-4:]
    assert saved == pytest.approx(100 * 63 / 64 * 4000 / 5300, abs=1)
    finding = judge_rule("prefix_ttft", version=VERSION).finding
    for low, high, found in re.findall(r"([\d.]+) to ([\d.]+)% less at (\d+)% found", finding):
        assert 0 < float(low) <= float(high) < float(found) + 1


def test_a_percentile_rejects_the_rest_and_frees_nothing() -> None:
    for percentile in (95, 99):
        _, _, _, rejected, cut, change = numbers(
            judge_rule("model_len_percentile", {"percentile": percentile}, VERSION).finding
        )
        assert rejected + cut == pytest.approx(100 - percentile, abs=0.2)
        assert change < 1


def test_more_memory_helps_a_small_pool_and_not_a_large_one() -> None:
    small, large, _ = re.findall(
        r"([+-]\d+)%", judge_rule("utilization_gain", version=VERSION).finding
    )
    assert int(small) > 15 > 5 > int(large) >= 0


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guide = tmp_path / "guide.md"
    guide.write_text("A 70B model takes 70 GB in FP16.", encoding="utf-8")
    assert main(["check-guide", str(guide)]) == 1
    first, _, finding, text, instead = capsys.readouterr().out.splitlines()
    assert first.startswith("1 wrong") and finding.startswith("wrong: ")
    assert "141 GB (131 GiB)" in finding and "too low by a factor of 2" in finding
    assert text == "  says: A 70B model takes 70 GB in FP16." and instead.startswith("  instead:")
    assert main(["check-guide", "--json", "A 70B model takes 140 GB in FP16."]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "ok" and report["findings"][0]["verdict"] == "right"
    assert main(["check-guide", "Alert at 2% of requests preempted."]) == 3
    assert main(["check-guide", "Nothing of this is known."]) == 3
    assert main(["check-guide", "no-such-guide.md"]) == 2
    assert main(["check-guide", "x", "--engine-version", "newest"]) == 2


def test_secrets_of_a_guide_are_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    text = "```\nHF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz vllm serve m --api-key sk-1234567890abcdef --swap-space 4\n```"
    assert main(["check-guide", text]) == 1
    assert main(["check-guide", "--json", text]) == 1
    shown = capsys.readouterr().out
    assert "hf_abcdef" not in shown and "sk-1234567890" not in shown


def test_an_unknown_model_is_not_checkable_and_asks_no_network() -> None:
    with pytest.raises(PlannerError):
        find_guide_model("Nobody-70B")
    assert judged("Nobody-70B takes 140 GB in FP16.") in ({}, {"weight_size": "not checkable"})


@pytest.mark.parametrize(
    ("claim", "name"),
    [
        ("Throughput grows almost linearly with the number of GPUs.", "tp_linear"),
        ("An H100 SXM has 2.0 TB/s of bandwidth.", "bandwidth"),
        ("Out of the box vLLM gives 60% of the throughput; tuning gets 95%.", "defaults_60"),
        ("FP8 KV cache on A100 is emulated, so there is no benefit.", "fp8_kv_emulated"),
        ("On Ampere and Ada, FP8 KV is only emulated.", "fp8_kv_emulated"),
        ("Prefix caching cuts KV usage by 30-50%.", "prefix_saves_memory"),
        (
            "Raising gpu_memory_utilization from 0.90 to 0.95 increases throughput by about 15%.",
            "utilization_gain",
        ),
    ],
)
def test_other_wordings_of_a_claim_are_found_and_not_right(claim: str, name: str) -> None:
    assert judged(claim)[name] != "right"


def test_what_no_rule_reads_is_told() -> None:
    """64 users with 32k tokens of context each take 256 GiB of KV cache: no rule knows the sentence."""
    unread = "A 24 GB RTX 4090 serves 64 users with 32k tokens of context each."
    found = check_guide(f"The weights of Llama-3.1-8B in BF16 take about 16 GB. {unread}")
    assert found.unread == (unread,) and found.verdict == "at_risk" and unread in str(found)
    assert unread in str(check_guide(unread))
    into_code = "The weights of Llama-3.1-8B in BF16 take about 16 GB, started so:\n```\nls\n```\n"
    assert check_guide(into_code).verdict == "ok"  # its sentence goes on in the block


def test_what_is_too_much_to_read_is_told() -> None:
    """201 commands that differ, of which 200 are checked; a block of 21, of which 20 are."""
    many = "\n".join(f"vllm serve m --port {8000 + k}" for k in range(201))
    report = check_guide(many)
    assert report.dropped[0] == "1 block or line that may start a server after the first 200"
    assert report.verdict == "at_risk" and "not read: 1 block" in str(report)
    assert not check_guide(many.rpartition("\n")[0]).dropped
    block = "```\n" + "\n".join(many.splitlines()[:21]) + "\n```"
    (unread,) = [one for one in check_guide(block).findings if one.verdict == "not checkable"]
    assert "more than 20 commands" in unread.finding


def test_a_conversations_cache_is_not_taken_for_the_weights() -> None:
    """Llama-3.1-8B: 2 x 32 layers x 8 heads x 128 x 2 bytes a token, 1 GiB at 8,192 tokens."""
    text = (
        "The KV cache of Llama-3.1-8B takes 128 KiB per token in BF16, so a conversation of 8,192"
        " tokens takes 1 GiB."
    )
    (found,) = check_guide(text).findings
    assert (found.verdict, found.name) == ("right", "kv_per_token")


def test_that_an_option_exists_does_not_make_what_is_said_of_it_right() -> None:
    said = "Raising --gpu-memory-utilization from 0.90 to 0.95 makes every token faster."
    report = check_guide(f"An FP8 KV cache halves what a token takes. {said}")
    (option,) = [one for one in report.findings if one.kind == "option"]
    assert option.text == "--gpu-memory-utilization"
    vague = check_guide(
        "--tensor-parallel-size makes a model eight times faster. Use a large batch."
    )
    assert vague.unread == ("--tensor-parallel-size makes a model eight times faster.",)
    assert vague.verdict == "at_risk" and vague.num_plain_sentences == 1
    assert said in report.unread
