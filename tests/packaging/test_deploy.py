"""The files in `deploy/` pass the checks of the tools they are for, and name what the server really has."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.serve.server import serving

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
UNIT = DEPLOY / "systemd" / "tenuto.service"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
KUBERNETES = DEPLOY / "kubernetes" / "tenuto.yaml"
FLEET = DEPLOY / "kubernetes" / "fleet.yaml"
PROMETHEUS = DEPLOY / "prometheus"
BOARD = DEPLOY / "grafana" / "dashboards" / "tenuto.json"


def tool(name: str) -> str:
    """Returns the path of a program; skips the test without it."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    run(tool("hadolint"), str(DOCKERFILE))


def test_systemd_accepts_the_unit_and_its_exposure_is_low(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/tenuto/bin/tenuto", "/bin/true"))
    assert run(tool("systemd-analyze"), "verify", str(unit)) == ""
    run(tool("systemd-analyze"), "security", "--offline=yes", "--threshold=20", str(unit))


def test_the_manifests_are_valid_for_kubernetes() -> None:
    assert run(tool("kubernetes-validate"), "--strict", str(KUBERNETES)).count("passed") == 2
    assert run(tool("kubernetes-validate"), "--strict", str(FLEET)).count("passed") == 4


def test_prometheus_accepts_its_configuration_and_the_queries_of_the_board(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    for file in PROMETHEUS.iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("/run/secrets/admin_key", str(key)))
    queries = [target["expr"] for panel in board() for target in panel["targets"]]
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries)]
    (tmp_path / "board.yml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    run(tool("promtool"), "check", "config", str(tmp_path / "prometheus.yml"))
    run(tool("promtool"), "check", "rules", str(tmp_path / "board.yml"))


def found(pattern: str, file: Path) -> str:
    """Returns the group of a pattern that a line of the file has."""
    match = re.search(pattern, file.read_text(), re.MULTILINE)
    assert match is not None, f"{file} has no {pattern}"
    return match[1]


def board() -> list[dict[str, Any]]:
    return json.loads(BOARD.read_text())["panels"]


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """The labels of each metric of a server that has computed a turn."""
    with serving("--model", "witness") as server:
        with server.client() as http:
            http.post("/v1/sessions", json={"id": "one"})
            turn = {"input": [1, 2, 3], "max_new_tokens": 4, "ignore_eos": True, "stream": False}
            assert http.post("/v1/sessions/one/turns", json=turn).status_code == 200
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
    metrics: dict[str, set[str]] = {}
    for name in re.findall(r"^# TYPE (\S+) (?!histogram)", text, re.MULTILINE):
        metrics[name] = set()
    for name, labels in re.findall(r"^(tenuto_\w+)(?:\{(.*?)\})? ", text, re.MULTILINE):
        metrics.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return metrics


def test_alerts_and_the_board_use_metrics_and_labels_that_the_server_has(exposed: dict[str, set[str]]) -> None:
    alerts = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
    queries = [rule["expr"] for rule in alerts]
    queries += [target["expr"] for panel in board() for target in panel["targets"]]
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"tenuto_\w+", query)
        assert names or "up{" in query
        for name in names:
            assert name in exposed, query
            if by := re.search(r"by \((\w+)\)", query):
                assert not exposed[name] or by[1] in exposed[name], query


def starts() -> dict[str, list[str]]:
    """Returns the arguments of `tenuto serve` in each file."""
    image = json.loads(found(r"^CMD (\[.*\])$", DOCKERFILE))
    unit = found(r"^ExecStart=\S+ (.*)$", UNIT)
    (pod,) = (each for each in yaml.safe_load_all(KUBERNETES.read_text()) if each["kind"] == "StatefulSet")
    return {
        "image": image,
        "unit": shlex.split(unit),
        "pod": pod["spec"]["template"]["spec"]["containers"][0]["args"],
    }


@pytest.mark.parametrize("file", starts())
def test_the_server_knows_the_flags(file: str) -> None:
    arguments = starts()[file]
    shown = run(
        sys.executable, "-c", "from tenuto.cli import main; main()", *arguments, "--api-key", "k", "--show-config"
    )
    assert "/var/lib/tenuto/journal" in shown


def of_fleet(kind: str) -> dict[str, Any]:
    """Returns the last object of this kind in the manifests of a fleet."""
    return [each for each in yaml.safe_load_all(FLEET.read_text()) if each["kind"] == kind][-1]


def test_the_pods_of_a_fleet_start_and_reach_each_other(tmp_path: Path) -> None:
    replicas = of_fleet("StatefulSet")
    (container,) = replicas["spec"]["template"]["spec"]["containers"]
    advertised = next(each["value"] for each in container["env"] if each["name"] == "TENUTO_ADVERTISE")
    service = of_fleet("Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == replicas["spec"]["serviceName"]
    assert service["spec"]["selector"].items() <= replicas["spec"]["template"]["metadata"]["labels"].items()
    port = container["ports"][0]["containerPort"]
    assert advertised == f"http://$(POD_NAME).{replicas['spec']['serviceName']}:{port}"
    mounted = next(each["mountPath"] for each in container["volumeMounts"] if each["name"] == "secret")
    secret = tmp_path / "secret"
    secret.write_text("a-secret-of-letters-and-9s")
    arguments = [each.replace(f"{mounted}/secret", str(secret)) for each in container["args"]]
    assert str(secret) in arguments
    of_secret = ["--fleet", "postgresql:///fleet", "--api-key", "k"]
    given = [*arguments, *of_secret, "--advertise", advertised.replace("$(POD_NAME)", "tenuto-fleet-0")]
    shown = run(sys.executable, "-c", "from tenuto.cli import main; main()", *given, "--show-config")
    assert "http://tenuto-fleet-0.tenuto-replicas:8000" in shown


def test_the_probes_of_a_fleet_ask_what_a_server_answers() -> None:
    (container,) = of_fleet("StatefulSet")["spec"]["template"]["spec"]["containers"]
    probes = [container[probe].get("httpGet") for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    paths = {probe["path"] for probe in probes if probe is not None}
    with serving("--model", "witness") as server:
        assert paths <= httpx.get(f"{server.url}/openapi.json", timeout=60).json()["paths"].keys()


def test_the_pods_of_a_fleet_have_time_to_end() -> None:
    pods = of_fleet("StatefulSet")["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = int(container["args"][container["args"].index("--drain-seconds") + 1])
    assert pods["terminationGracePeriodSeconds"] > pause + drain + 30  # --snapshot-seconds


def test_all_files_give_the_server_time_to_end() -> None:
    least = 5 + 30  # --drain-seconds and --snapshot-seconds
    unit = int(found(r"TimeoutStopSec=(\d+)", UNIT))
    service = yaml.safe_load(COMPOSE.read_text())["services"]["tenuto"]
    pods = list(yaml.safe_load_all(KUBERNETES.read_text()))[1]["spec"]["template"]["spec"]
    pause = int(pods["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert min(unit, int(service["stop_grace_period"][:-1]), pods["terminationGracePeriodSeconds"] - pause) > least


def test_compose_builds_the_image_and_mounts_what_is_there() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    build = services["tenuto"]["build"]
    assert (COMPOSE.parent / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE.resolve()
    mounts = [mount for service in services.values() for mount in service.get("volumes", []) if mount.startswith(".")]
    assert len(mounts) == 3
    for mount in mounts:
        assert (COMPOSE.parent / mount.split(":")[0]).is_dir()
