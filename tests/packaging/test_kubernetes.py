# SPDX-License-Identifier: Apache-2.0
"""What is deployed to Kubernetes: valid by its published schemas, and as images and daemons want it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime import VERSION
from runtime.schema import load
from runtime.settings.coordinator import NOBODY
from runtime.settings.coordinator import Settings as CoordinatorSettings
from runtime.settings.node import Settings as NodeSettings
from testbed.containers import IDS, bytes_of
from testbed.topology import PYTHON
from testbed.venvs import made_once
from tests.packaging.kubectl import kustomize

# The oldest with all that is used, and the newest that was published.
VERSIONS = ("1.25", "1.37")

KUSTOMIZATIONS = ("base", "example")

SETTINGS = {"node.yaml": NodeSettings, "coordinator.yaml": CoordinatorSettings}
MODULES = {"node.yaml": "appliance", "coordinator.yaml": "coordinator"}

# Some versions of runc take more than 20 MiB to start a container, within its own limit.
RUNTIME_BYTES = 64 << 20

# The kubelet's own, if nobody configures it.
MAX_PODS = 110

# What a container may beyond nothing, by its name.
CAPABILITIES = {"folder": ["CHOWN"], "probes": ["BPF", "PERFMON"]}

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Image:
    """As packaging/oci/build makes it."""

    uid: int
    folders: tuple[str, ...]


@pytest.fixture(scope="module")
def images(repository: Path) -> dict[str, Image]:
    script = (repository / "packaging/oci/build").read_text("utf-8")
    lines = re.findall(r"^layer (\S+) \S+ (\d+) (\S+)", script, re.MULTILINE)
    assert len(lines) == 2
    return {name: Image(int(uid), tuple(folders.split(":"))) for name, uid, folders in lines}


@pytest.fixture(params=KUSTOMIZATIONS)
def rendered(request: pytest.FixtureRequest, repository: Path) -> str:
    return kustomize(repository / "packaging/kubernetes" / request.param)


@pytest.fixture
def objects(rendered: str) -> list[Object]:
    return list(yaml.safe_load_all(rendered))


@pytest.fixture
def application(repository: Path) -> Object:
    return dict(yaml.safe_load((repository / "packaging/kubernetes/application.yaml").read_text()))


def the(objects: list[Object], kind: str, name: str = "") -> Object:
    """The only one, of all whose name begins so."""
    (found,) = (
        item
        for item in objects
        if item["kind"] == kind and item["metadata"]["name"].startswith(name)
    )
    return found


def pods(objects: list[Object]) -> Iterator[Object]:
    for item in objects:
        if item["kind"] in ("DaemonSet", "Deployment"):
            yield item["spec"]["template"]["spec"]


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def problems(text: str, version: str, directory: Path) -> str:
    """What the schemas of that version have against these objects; empty if nothing."""
    repository = Path(__file__).parents[2]
    python = made_once("kubernetes", repository / "tests/packaging/kubernetes-requirements.txt")
    file = directory / "objects.yaml"
    file.write_text(text)
    done = subprocess.run(
        [python, "-m", "kubernetes_validate", "--strict", f"--kubernetes-version={version}", file],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.parametrize("version", VERSIONS)
def test_the_objects_are_valid(rendered: str, version: str, tmp_path: Path) -> None:
    assert problems(rendered, version, tmp_path) == ""


@pytest.mark.parametrize("version", VERSIONS)
def test_the_application_is_valid(application: Object, version: str, tmp_path: Path) -> None:
    assert problems(yaml.safe_dump(application), version, tmp_path) == ""


def test_what_kubernetes_does_not_know_is_found(application: Object, tmp_path: Path) -> None:
    application["spec"]["template"]["spec"]["hostPid"] = True
    assert "hostPid" in problems(yaml.safe_dump(application), VERSIONS[-1], tmp_path)


def configurations(objects: list[Object]) -> dict[str, str]:
    """By file."""
    return {
        file: text
        for item in objects
        if item["kind"] == "ConfigMap"
        for file, text in item["data"].items()
    }


def test_the_daemons_take_their_configuration(objects: list[Object], tmp_path: Path) -> None:
    found = configurations(objects)
    assert found.keys() == SETTINGS.keys()
    for file, text in found.items():
        path = tmp_path / file
        path.write_text(text)
        done = subprocess.run(
            [PYTHON, "-m", MODULES[file], "--config", path, "--check"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


def settings(objects: list[Object], file: str, directory: Path) -> Any:
    path = directory / file
    path.write_text(configurations(objects)[file])
    return load(path, SETTINGS[file])


def ports(container: Object) -> set[int]:
    return {port["containerPort"] for port in container["ports"]}


def port_named(container: Object, name: str) -> int:
    (found,) = (port["containerPort"] for port in container["ports"] if port["name"] == name)
    return int(found)


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def test_ports_and_addresses_are_those_of_the_configurations(
    objects: list[Object], tmp_path: Path
) -> None:
    node = settings(objects, "node.yaml", tmp_path)
    coordinator = settings(objects, "coordinator.yaml", tmp_path)
    service = the(objects, "Service")
    assert node.coordinator.endpoint == f"{service['metadata']['name']}:4770"
    listens = {
        port_of(coordinator.listen),
        port_of(coordinator.metrics.listen),
        port_of(coordinator.query.listen),
    }
    assert {port["port"] for port in service["spec"]["ports"]} == listens
    deployed = the(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert ports(deployed) == listens
    daemon = the(objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    assert ports(daemon) == {port_of(node.metrics.listen)}
    # Where the kubelet asks, on a pod that has the machine's network.
    asks = daemon["readinessProbe"]["httpGet"].get("host")
    assert asks == (None if node.metrics.insecure else "127.0.0.1")


def test_only_chosen_namespaces_read_metrics_and_traces(objects: list[Object]) -> None:
    policy = the(objects, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    deployed = the(objects, "Deployment")["spec"]["template"]
    chosen = policy["podSelector"]["matchLabels"]
    assert chosen.items() <= deployed["metadata"]["labels"].items()
    (container,) = containers(deployed["spec"])
    grpc, readers = policy["ingress"]
    assert [port["port"] for port in grpc["ports"]] == ["grpc"]
    assert {port["port"] for port in [*grpc["ports"], *readers["ports"]]} == {
        port["name"] for port in container["ports"]
    }
    # No selector finds pods that have their machine's address.
    assert all(peer.keys() == {"ipBlock"} for peer in grpc["from"])
    assert readers["from"]
    for peer in readers["from"]:
        assert peer["namespaceSelector"]["matchLabels"].keys() == {"kubernetes.io/metadata.name"}


def test_whom_nobody_asks_reads_only_where_the_policy_keeps_others_away(
    objects: list[Object], tmp_path: Path
) -> None:
    """At the port for nodes he passes for a node, and that is all."""
    coordinator = settings(objects, "coordinator.yaml", tmp_path)
    assert coordinator.access.anonymous == NOBODY
    assert coordinator.everybody_queries


def test_no_address_of_the_internet_passes_for_a_node(objects: list[Object]) -> None:
    peers = the(objects, "NetworkPolicy")["spec"]["ingress"][0]["from"]
    blocks = [ip_network(peer["ipBlock"]["cidr"]) for peer in peers]
    assert blocks
    assert not any(block.is_global or block.prefixlen == 0 for block in blocks)


def test_the_example_keeps_control_to_the_machines(repository: Path) -> None:
    objects = yaml.safe_load_all(kustomize(repository / "packaging/kubernetes/example"))
    machines = the(list(objects), "NetworkPolicy")["spec"]["ingress"][0]["from"]
    assert machines
    # Not all that are private, as in the base.
    assert all(ip_network(peer["ipBlock"]["cidr"]).prefixlen > 12 for peer in machines)


def test_prometheus_finds_what_is_deployed(objects: list[Object], repository: Path) -> None:
    path = repository / "packaging/monitoring/prometheus-kubernetes.yml"
    jobs = {job["job_name"]: job for job in yaml.safe_load(path.read_text())["scrape_configs"]}

    service = the(objects, "Service")["metadata"]
    (deployed,) = containers(next(pods([the(objects, "Deployment")])))
    port = port_named(deployed, "metrics")
    (coordinator,) = jobs["backsight-coordinator"]["static_configs"]
    assert coordinator["targets"] == [f"{service['name']}.{service['namespace']}.svc:{port}"]

    daemons = the(objects, "DaemonSet")
    (pods_of,) = jobs["backsight-node"]["kubernetes_sd_configs"]
    assert pods_of["namespaces"]["names"] == [daemons["metadata"]["namespace"]]
    keep = jobs["backsight-node"]["relabel_configs"][0]
    assert keep["action"] == "keep"
    name = daemons["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
    found = [
        container["name"]
        for container in containers(daemons["spec"]["template"]["spec"])
        for port in container.get("ports", [{"name": ""}])
        if re.fullmatch(keep["regex"], f"{name};{port['name']}")
    ]
    assert found == ["node"]


def test_the_store_fits_into_its_volume(objects: list[Object], tmp_path: Path) -> None:
    claim = the(objects, "PersistentVolumeClaim")["spec"]["resources"]["requests"]["storage"]
    store = settings(objects, "coordinator.yaml", tmp_path).store
    assert store.bytes_max <= bytes_of(claim) / 1.2


def test_images_are_those_that_are_built(objects: list[Object], images: dict[str, Image]) -> None:
    named = {container["image"] for pod in pods(objects) for container in containers(pod)}
    assert {image.rpartition("/")[2] for image in named} == {f"{name}:{VERSION}" for name in images}
    for pod in pods(objects):
        (name,) = {c["image"].rpartition("/")[2].partition(":")[0] for c in containers(pod)}
        context = pod["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == (images[name].uid,) * 2
        for container in pod["containers"]:
            mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert set(images[name].folders) <= set(mounted)


def test_containers_may_do_no_more_than_they_must(
    objects: list[Object], application: Object
) -> None:
    for pod in pods([*objects, application]):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        for container in containers(pod):
            context = container["securityContext"]
            wanted = CAPABILITIES.get(container["name"], [])
            assert context["capabilities"]["drop"] == ["ALL"]
            assert context["capabilities"].get("add", []) == wanted
            assert context.get("runAsUser") == (0 if wanted else None)
            assert not context["allowPrivilegeEscalation"]
            assert context["readOnlyRootFilesystem"]
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            # A CPU that is throttled would lose records, or time.
            assert container["resources"]["limits"].keys() == {"memory"}
            assert bytes_of(container["resources"]["limits"]["memory"]) >= RUNTIME_BYTES


def test_the_range_for_user_namespaces_is_one_for_a_kubelet(
    repository: Path, tmp_path: Path
) -> None:
    text = kustomize(repository / "packaging/kubernetes/example")
    node = settings(list(yaml.safe_load_all(text)), "node.yaml", tmp_path)
    (said,) = node.allow.users
    ids = range(int(said.partition("-")[0]), int(said.partition("-")[2]) + 1)
    assert ids.start % IDS == 0
    assert len(ids) == MAX_PODS * IDS
    # Those that systemd gives to containers of its own, and OpenShift to pods.
    for others in (range(524288, 1879048192), range(1000000000, 2000000000)):
        assert ids.start >= others.stop or ids.stop <= others.start
    documented = (repository / "docs/containers.md").read_text("utf-8")
    assert f"kubelet:{ids.start}:{len(ids)} " in documented
    assert f"users: [{said}]" in documented


def test_probes_are_beside_the_node_where_they_are_chosen(repository: Path) -> None:
    for kustomization, names in (("base", ["node"]), ("example", ["node", "probes"])):
        text = kustomize(repository / "packaging/kubernetes" / kustomization)
        daemon = the(list(yaml.safe_load_all(text)), "DaemonSet")["spec"]["template"]["spec"]
        assert [container["name"] for container in daemon["containers"]] == names


def test_an_application_has_the_folder_of_the_node_and_a_group_that_may(
    objects: list[Object], application: Object, images: dict[str, Image], tmp_path: Path
) -> None:
    daemon = the(objects, "DaemonSet")["spec"]["template"]["spec"]
    (pod,) = pods([application])
    folders = [volume["hostPath"] for volume in daemon["volumes"] if "hostPath" in volume]
    assert folders == [volume["hostPath"] for volume in pod["volumes"]]
    (folder,) = images["backsight-node"].folders
    assert folders[0]["path"] == folder
    (mount,) = pod["containers"][0]["volumeMounts"]
    assert mount["mountPath"] == folder
    assert mount["readOnly"]
    node = settings(objects, "node.yaml", tmp_path)
    assert set(pod["securityContext"]["supplementalGroups"]) & set(node.allow.groups)
