"""Files for schedulers and clouds: their own schemas accept them, and they start what is planned."""

import json
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from launch_plans import plans
from shipped import answer_of
from test_deploy import NAMES, WORKLOAD
from test_plan_command import QUESTION

from planner.core.errors import PlannerError
from planner.core.templates import render_template
from planner.deploy import LaunchSpec, build_deployment_launch, build_launch
from planner.deploy.arguments import SCRIPT, format_argument
from planner.deploy.artifacts import render_artifacts
from planner.deploy.manifests import (
    MANIFEST_FILES,
    build_slug,
)
from planner.engines.cli_options import get_cli_options
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.layout import SpeculationConfig
from planner.planning.prediction import Prediction, evaluate
from planner.planning.scenario import load_scenario
from planner.planning.scenario_schema import DEFAULT_ARTIFACTS
from planner.planning.search import search_deployments
from planner.planning.slo import SloTarget
from planner.tools.lint.report import lint
from planner.ui.plan_files import write_plan_files

SCHEMAS = Path(__file__).resolve().parents[2] / "shared" / "schemas"
V3 = {"model": "deepseek-ai/DeepSeek-V3", "gpu": "H200"}
CASES: dict[str, dict[str, Any]] = {
    "one": {"tp": 2, "replicas": 3, "engine_version": "0.20.2", "speculation": SpeculationConfig("ngram", 3)},
    "nodes": {**V3, "tp": 8, "pp": 2, "engine_version": "0.20.2"},
    "copies": {**V3, "dp": 16, "ep": 16, "engine_version": "0.20.2"},
    "head": {"speculation": SpeculationConfig("eagle3", 3), "max_loras": 4},
    "amd": {"gpu": "MI300X", "replicas": 2},
    "sglang": {"engine": "sglang", "engine_version": "0.5.10", "tp": 2},
    "sglang nodes": {**V3, "tp": 8, "pp": 2, "engine": "sglang"},
    "trtllm": {"engine": "trtllm", "engine_version": "1.2.0", "tp": 2},
}  # fmt: skip


@cache
def predicted(case: str) -> Prediction:
    known = {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "gpu": "H100",
        "max_model_len": 8192,
        "max_num_seqs": 64,
    }
    return evaluate(deploy_on(**{**known, **CASES[case]}), WORKLOAD)


@cache
def written(case: str, name: str = "") -> tuple[LaunchSpec, dict[str, str]]:
    """The launch of a case and all its files, those that refuse left out."""
    prediction = predicted(case)
    if name:
        served = prediction.deployment
        prediction = replace(
            prediction, deployment=replace(served, model=replace(served.model, name=name))
        )
    return build_launch(prediction), render_artifacts(prediction, (), wanted=[*MANIFEST_FILES])


def every(*files: str) -> Iterator[tuple[LaunchSpec, str]]:
    for case in CASES:
        started, found = written(case)
        yield from ((started, found[file]) for file in files if file in found)


def parsed(text: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(text) if found]


def in_pod(words: list[str], **known: str) -> list[str]:
    """Arguments as the kubelet expands them: $(NAME), and $$(NAME) for the text itself."""
    return [
        re.sub(r"\$\$|\$\((\w+)\)", lambda m: known[m[1]] if m[1] else "$", word) for word in words
    ]


def in_compose(words: list[str], **known: str) -> list[str]:
    """Arguments as compose interpolates them."""
    return [
        re.sub(r"\$\$|\$\{(\w+):\?[^}]*\}", lambda m: known[m[1]] if m[1] else "$", word)
        for word in words
    ]


def given(started: LaunchSpec, **known: str) -> list[str]:
    """The planned command with its variables set, as an image runs it."""
    words = [
        re.sub(r"\$\{(\w+):\?[^}]*\}", lambda m: known[m[1]], word) for word in started.command
    ]
    words = ["python3" if word == "python" else word for word in words]
    return ["/headroom/trtllm.yaml" if word == "trtllm.yaml" else word for word in words]


KNOWN = {"DRAFT": "some/head", "MODEL": "some/model", "NODE_RANK": "1", "MASTER_ADDR": "lead"}
IN_GROUP = {**KNOWN, "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "lead"}


def test_kinds_that_cannot_start_a_plan_say_so() -> None:
    assert set(written("one")[1]) == {name for names in MANIFEST_FILES.values() for name in names}
    assert "compose.yaml" not in written("nodes")[1] and "k8s/serve.yaml" in written("nodes")[1]
    assert "runpod.env" not in written("sglang")[1]
    assert "k8s/scale.yaml" not in written("trtllm")[1]  # no metric of the engine's to scale by


@pytest.mark.parametrize("case", CASES)
def test_pods_start_what_is_planned(case: str) -> None:
    started, found = written(case)
    workload, service, budget, *_ = parsed(found["k8s/serve.yaml"])
    group = workload["spec"].get("leaderWorkerTemplate")
    pods = (
        [group["leaderTemplate"], group["workerTemplate"]]
        if group
        else [workload["spec"]["template"]]
    )
    assert workload["spec"]["replicas"] == started.deployment.layout.replicas
    assert (group["size"] if group else 1) == started.nodes
    for pod, extra in zip(pods, ([], list(started.worker_arguments)), strict=False):
        (container,) = pod["spec"]["containers"]
        ran = in_pod([*container["command"], *container["args"]], **IN_GROUP)
        assert ran == given(started, **KNOWN) + extra
        limits = {started.device.resource: started.gpus}
        # InfiniBand is asked for in requests and limits (docs.coreweave.com, GPUDirect RDMA)
        fabric = {"rdma/ib": 1} if started.nodes > 1 else {}
        assert container["resources"]["limits"] == limits | fabric
        assert fabric.items() <= container["resources"]["requests"].items()
        capabilities = container["securityContext"]["capabilities"]
        assert ("IPC_LOCK" in capabilities.get("add", [])) == bool(fabric)
        assert ("NCCL_IB_HCA" in {one["name"] for one in container["env"]}) == bool(fabric)
        assert pod["spec"]["terminationGracePeriodSeconds"] > started.drain_s
        assert any(
            volume["emptyDir"].get("medium") == "Memory"
            for volume in pod["spec"]["volumes"]
            if "emptyDir" in volume
        )
        assert service["spec"]["selector"].items() <= pods[0]["metadata"]["labels"].items()
    probe = pods[0]["spec"]["containers"][0]["startupProbe"]
    if started.start_up:
        assert probe["periodSeconds"] * probe["failureThreshold"] > started.start_up.total.hi
    assert budget["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("case", ["one", "head", "amd", "sglang", "trtllm"])
def test_compose_starts_what_is_planned(case: str) -> None:
    started, found = written(case)
    services = yaml.safe_load(found["compose.yaml"])["services"]
    assert len(services) == started.deployment.layout.replicas
    for service in services.values():
        assert in_compose(service["command"], **KNOWN) == given(started, **KNOWN)
        assert service["environment"].items() >= dict(started.environment).items()
    ids = [
        device["device_ids"] for service in services.values() if "deploy" in service
        for device in service["deploy"]["resources"]["reservations"]["devices"]
    ]  # fmt: skip
    assert len({one for group in ids for one in group}) == sum(map(len, ids))  # no GPU twice


def test_what_scales_asks_for_the_plans_own_traffic() -> None:
    prediction = predicted("one")
    (scaled,) = parsed(written("one")[1]["k8s/scale.yaml"])
    (trigger,) = scaled["spec"]["triggers"]
    inside = (WORKLOAD.rate or 0) * prediction.performance.get("e2e", "mean").mid / 3
    assert float(trigger["metadata"]["threshold"]) == pytest.approx(max(inside, 1.0), rel=0.01)
    assert scaled["spec"]["maxReplicaCount"] == 3
    name = '{model_name="meta-llama/Llama-3.1-8B-Instruct"}'
    assert (
        trigger["metadata"]["query"]
        == f"sum(vllm:num_requests_running{name}) + sum(vllm:num_requests_waiting{name})"
    )


@pytest.mark.parametrize(
    "name", ["9", "no", "Y", "0x10", "4-bit", "模型", "a/Qwen3-8B.Q4_K_M", "-" * 99]
)
def test_every_name_becomes_one_that_kubernetes_takes(name: str) -> None:
    """A label of RFC 1035, as a Service is named, and text to YAML."""
    assert (
        re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", build_slug(name)) and len(build_slug(name)) < 50
    )
    assert yaml.safe_load(build_slug(name)) == build_slug(name)


def test_runpod_gets_every_option_and_room_for_the_batch() -> None:
    started, files = written("one")
    settings = dict(
        line.split("=", 1) for line in files["runpod.env"].splitlines() if line[0] != "#"
    )
    assert set(settings) == {"MODEL_NAME", "VLLM_EXTRA_ARGS", "MAX_CONCURRENCY"}
    # the worker splits it as a shell does and appends it to `vllm serve --model MODEL_NAME --port ...`
    run = ["vllm", "serve", settings["MODEL_NAME"], *shlex.split(settings["VLLM_EXTRA_ARGS"])]
    assert run == given(started)[: given(started).index("--port")]
    assert int(settings["MAX_CONCURRENCY"]) >= 64
    with pytest.raises(PlannerError, match="name the repository of its eagle3 head"):
        render_artifacts(predicted("head"), (), wanted=["runpod"])


@pytest.mark.parametrize("name", NAMES)
def test_any_name_reaches_every_file_as_it_is(name: str) -> None:
    """A user's text is text, whatever it looks like: the same arguments come out, and nothing else changes."""
    started, found = written("one", name)
    plain = written("one")[1]
    for file in found.keys() - {"runpod.env"}:
        assert [sorted(part) for part in parsed(found[file])] == [
            sorted(part) for part in parsed(plain[file])
        ]
    container = parsed(found["k8s/serve.yaml"])[0]["spec"]["template"]["spec"]["containers"][0]
    assert in_pod([*container["command"], *container["args"]]) == given(started)
    assert in_compose(
        yaml.safe_load(found["compose.yaml"])["services"]["serve-0"]["command"]
    ) == given(started)
    query = parsed(found["k8s/scale.yaml"])[0]["spec"]["triggers"][0]["metadata"]["query"]
    assert json.JSONDecoder().raw_decode(query.split("model_name=")[1])[0] == name


@pytest.mark.skipif(
    not SCHEMAS.is_dir(), reason="the schemas of custom resources are not beside this checkout"
)
def test_custom_resources_follow_their_schemas() -> None:
    found = [json.loads(path.read_text()) for path in (SCHEMAS / "crd").glob("*.json")]
    known = {
        tuple(one["properties"][key]["const"] for key in ("apiVersion", "kind")): one
        for one in found
    }
    checked = set()
    for _, text in every("k8s/serve.yaml", "k8s/scale.yaml", "k8s/monitor.yaml"):
        for document in parsed(text):
            kind = document["apiVersion"], document["kind"]
            if kind in known:
                jsonschema.Draft202012Validator(known[kind]).validate(document)
                checked.add(document["kind"])
    assert checked == {"LeaderWorkerSet", "ScaledObject", "PodMonitor"}


def test_kubernetes_own_kinds_follow_its_schemas() -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for _, text in every("k8s/serve.yaml"):
        for document in parsed(text):
            if document["kind"] != "LeaderWorkerSet":
                validate.validate(document, "1.34", strict=True)


@pytest.mark.skipif(
    shutil.which("check-jsonschema") is None, reason="check-jsonschema is not installed"
)
def test_compose_files_follow_its_schema(tmp_path: Path) -> None:
    for at, (_, text) in enumerate(every("compose.yaml")):
        (tmp_path / f"{at}.yaml").write_text(text)
    command = [
        "check-jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        *tmp_path.glob("*.yaml"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def stubs(folder: Path) -> None:
    """Programs on the PATH that say what they were started with."""
    for name in ("vllm", "python", "trtllm-serve", "mpirun"):
        (folder / name).write_text('#!/bin/sh\nprintf "%s\\0" "${0##*/}" "$@"\n')
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_the_script_runs_the_printed_command(engine: str, tmp_path: Path) -> None:
    stubs(tmp_path)
    for at, started in enumerate(plans(engine, 6, 7)):
        script = tmp_path / f"{at}.sh"
        script.write_text(script_of(started))
        for rank in ("0", "1") if started.nodes > 1 else ("0",):
            env = {
                **KNOWN,
                "NODE_RANK": rank,
                "HOSTFILE": "hosts",
                "PATH": f"{tmp_path}:/usr/bin:/bin",
            }
            ran = (
                subprocess.run(["bash", script], env=env, capture_output=True, check=True)
                .stdout.decode()
                .split("\0")
            )
            shown = subprocess.run(
                ["bash", "-c", next(iter(started.shell_lines.values()))],
                env=env,
                capture_output=True,
                check=True,
            )
            printed = (
                shown.stdout.decode().replace("trtllm.yaml", f"{tmp_path}/trtllm.yaml").split("\0")
            )
            extra = list(started.worker_arguments) if rank == "1" else []
            assert ran[:-1] == printed[:-1] + extra
        if shutil.which("shellcheck"):
            done = subprocess.run(
                ["shellcheck", script], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout


def script_of(started: LaunchSpec) -> str:
    deployment: Deployment = started.deployment
    return render_template(
        "deploy",
        "serve.sh",
        title="t",
        launch=started,
        d=deployment,
        layout=deployment.layout,
        script=partial(format_argument, dialect=SCRIPT),
    )


def test_a_replica_that_a_node_has_no_gpus_for_is_refused(tmp_path: Path) -> None:
    stubs(tmp_path)
    (tmp_path / "serve.sh").write_text(script_of(written("one")[0]))
    for replica, status in (("2", 0), ("3", 2), ("one", 2), ("-1", 2)):
        done = subprocess.run(
            ["bash", tmp_path / "serve.sh", replica], env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status, done
    assert "the plan puts 3 replicas of 2 GPUs on a machine: REPLICA is 0 to 2" in done.stderr


def test_a_script_starts_no_more_than_the_rented_machine_holds() -> None:
    """Eight TP2 replicas on machines of four GPUs: two a machine, on four machines."""
    served = deploy_on(
        "meta-llama/Llama-3.1-8B-Instruct", "H100", tp=2, replicas=8, max_model_len=8192
    )
    started = build_launch(evaluate(replace(served, machine_sizes=(2, 4)), WORKLOAD))
    assert started.deployment.machines == (4, 4, 4, 4) and started.replicas_per_node == 2


@pytest.mark.parametrize(
    ("card", "version", "image"),
    [
        ("H100", "0.10.0", "vllm/vllm-openai:v0.10.0"),
        ("MI300X", "0.20.2", "vllm/vllm-openai-rocm:v0.20.2"),
        ("MI300X", "0.10.0", None),
        ("Gaudi-3", "0.10.0", None),
    ],
)
def test_an_image_is_named_where_one_is_published(
    card: str, version: str, image: str | None
) -> None:
    served = deploy_on(
        "meta-llama/Llama-3.1-8B-Instruct", card, engine_version=version, max_model_len=8192
    )
    assert build_deployment_launch(served).image == image


def test_gaudi_is_picked_by_its_own_variable() -> None:
    served = deploy_on("meta-llama/Llama-3.1-8B-Instruct", "Gaudi-3", tp=2, max_model_len=8192)
    text = script_of(build_deployment_launch(served))
    assert "HABANA_VISIBLE_MODULES=" in text and "ZE_AFFINITY_MASK" not in text


def test_keys_are_the_owners_alone_and_survive_the_next_plan(tmp_path: Path) -> None:
    question = {**QUESTION, "files": ["script", "kubernetes"]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(question))
    out = tmp_path / "out"
    names = write_plan_files(
        answer_of(search_deployments(load_scenario(tmp_path / "mine.yaml"))), out
    )
    assert {"serve.sh", "serve.env", "k8s/serve.yaml", "plan.json"} <= set(
        names
    ) and "bench.sh" not in names
    assert stat.S_IMODE((out / "serve.env").stat().st_mode) == 0o600
    (out / "serve.env").write_text("HF_TOKEN=mine\n")
    write_plan_files(
        answer_of(
            search_deployments(load_scenario(tmp_path / "mine.yaml", {"files": ["unit", "script"]}))
        ),
        out,
    )
    assert (out / "serve.env").read_text() == "HF_TOKEN=mine\n" and not (
        out / "k8s" / "serve.yaml"
    ).exists()
    assert json.loads((out / "plan.json").read_text())["files"] == [
        "headroom@.service",
        "serve.sh",
        "serve.env",
    ]


@pytest.mark.parametrize("case", ["one", "nodes", "copies"])
def test_a_claim_holds_the_checkpoint(case: str) -> None:
    started, found = written(case)
    documents = parsed(found["k8s/serve.yaml"])
    (claim,) = [one for one in documents if one["kind"] == "PersistentVolumeClaim"]
    size = claim["spec"]["resources"]["requests"]["storage"]
    assert int(size.removesuffix("Gi")) * 2**30 > predicted(case).memory.weights.mid * started.gpus
    pods = started.nodes * started.deployment.num_replicas
    assert claim["spec"]["accessModes"] == ["ReadWriteMany" if pods > 1 else "ReadWriteOnce"]
    assert found["k8s/serve.yaml"].count(f"claimName: {claim['metadata']['name']}") >= 1
    assert "GiB of weights on their way to the GPUs" in found["k8s/serve.yaml"]


@pytest.mark.parametrize("written_as", ["acme-9b", "acme-9b/config.json", "acme-9b.json"])
def test_a_model_of_ones_own_has_one_name_and_its_place_is_asked_for(
    tmp_path: Path, written_as: str
) -> None:
    """No file names a path of the machine that planned it, and nothing starts before MODEL is set."""
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
              "max_position_embeddings": 8192}  # fmt: skip
    path = tmp_path / written_as
    path = path if path.suffix else path / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    prediction = evaluate(
        deploy_on(str(tmp_path / written_as), "H100", max_model_len=8192), WORKLOAD
    )
    kinds = (*DEFAULT_ARTIFACTS, "compose", "kubernetes")
    files = render_artifacts(prediction, (SloTarget("ttft", "p95", 1.0),), wanted=kinds)
    for name, text in files.items():
        assert str(tmp_path) not in text and "config.json" not in text, name
        assert "acme-9b" in text, name
    stubs(tmp_path)
    (tmp_path / "serve.sh").write_text(files["serve.sh"])
    for known, told in (({}, ""), ({"MODEL": "/weights/acme"}, "serve /weights/acme ")):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **known}
        done = subprocess.run(
            ["bash", tmp_path / "serve.sh"], env=env, capture_output=True, text=True, check=False
        )
        ran = done.stdout.replace("\0", " ")
        assert (done.returncode == 0) == bool(known) and told in ran
        assert ("--served-model-name acme-9b " in ran) == bool(known)
    with pytest.raises(PlannerError, match="the repository of its weights, or their folder"):
        render_artifacts(prediction, (), wanted=["runpod"])


@pytest.mark.parametrize("case", CASES)
def test_lint_finds_nothing_to_mend_in_what_is_written(case: str, tmp_path: Path) -> None:
    """In the printed command, the compose file, and the environment of RunPod's worker, which says it all again."""
    started, files = written(case)
    engine, gpu = started.deployment.engine, started.deployment.gpu.name
    reports = {
        name: lint(text, engine.version, gpu=gpu) for name, text in started.shell_lines.items()
    }
    for name in {"compose.yaml", "runpod.env"} & files.keys():
        (tmp_path / name).write_text(files[name])
        reports[name] = lint(str(tmp_path / name))
    for name, report in reports.items():
        to_mend = [one for one in report.findings if one.needs_fix and one.verdict != "unread"]
        assert report.commands and not to_mend, (name, to_mend)
    if "runpod.env" in reports:
        read = reports["runpod.env"].commands[0].checked.argument_values
        known = get_cli_options("vllm", engine.version).parse(started.command[2:]).values
        assert read == {
            name: value for name, value in known.items() if name not in ("port", "lora_modules")
        }
