# SPDX-License-Identifier: Apache-2.0
"""The images, run as packaging/kubernetes has them run, in containers of systemd-nspawn.

One network namespace stands for the machine of the node, another for the coordinator's pod.
Applications have pid namespaces of their own, and user namespaces.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctl.node import NodeClient
from runtime import VERSION
from runtime.schema import loads
from runtime.settings.node import Settings as NodeSettings
from testbed.containers import Bind, Container, bytes_of, unpacked
from testbed.topology import PYTHON, Host, Network
from tests.packaging.kubectl import kustomize

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1800)]

# Where the user namespaces of these tests begin: the last that the example allows.
FIRST_ID = 2_104_295_424

SOCKET = "/run/backsight"

# Nobody tells when a process is watched.
LOOK_EVERY_S = 0.05

# Says whether it is attached, and does what each line says; then a trace, or nothing, is its answer.
APPLICATION = """
import os, secrets, sys, time
import backsight

print(backsight.wait_attached(float(sys.argv[1])), flush=True)

for line in sys.stdin:
    command, *words = line.split()
    answer = words[0] if command == "fire" else secrets.token_hex(16)
    if command == "attachments":
        while (answer := backsight.stats().attachments) < int(words[0]):
            time.sleep(0.01)  # nobody tells
    elif command == "fill":
        for _ in range(0, int(words[0]), 30000):
            with backsight.Trace(secrets.token_hex(16)) as trace:
                trace.write(bytes(30000))
    else:
        with backsight.Trace(answer) as trace:
            if command in ("write", "crash"):
                trace.span_start(1, 0, time.time_ns(), "GET /cart")
                trace.span_end(1, time.time_ns())
            if command == "crash":
                print(answer, flush=True)
                os.abort()
            if command == "fire":
                trace.trigger("by-hand", "it is to be collected")
    print(answer, flush=True)
"""

Pod = dict[str, Any]


@pytest.fixture(scope="module")
def dist(
    repository: Path,
    debs_of: Callable[[str], list[Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Packages, and the images of them."""
    directory = tmp_path_factory.mktemp("dist")
    for package in debs_of("bookworm"):
        shutil.copy(package, directory)
    subprocess.run([repository / "packaging/oci/build", directory, "bookworm"], check=True)
    return directory


def image(dist: Path, name: str) -> str:
    return f"{dist}/oci/{name}:{VERSION}"


@pytest.fixture(scope="module")
def application_image(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One of Debian that has the client for Python beside it."""
    directory = tmp_path_factory.mktemp("application")
    layout = directory / "layout"
    shutil.copytree(dist / "oci/backsight-node", layout)
    bundle = unpacked(f"{layout}:{VERSION}", directory / "bundle")
    (package,) = dist.glob("python3-backsight_*.deb")
    shutil.copy(package, bundle / "rootfs/tmp")
    subprocess.run(
        ["chroot", bundle / "rootfs", "dpkg", "--install", f"/tmp/{package.name}"], check=True
    )
    subprocess.run(["umoci", "repack", "--image", f"{layout}:application", bundle], check=True)
    return f"{layout}:application"


@dataclass(frozen=True, slots=True)
class Site:
    """A machine with a node, and a coordinator elsewhere. ``folder``: what pods of it share."""

    directory: Path
    deployed: list[Pod]
    application_pod: Pod
    coordinator_host: Host
    node_host: Host
    node_bundle: Path
    applications: Path
    mapped_applications: Path

    @property
    def folder(self) -> Path:
        return self.directory / "run"

    def status(self) -> dict[str, Any]:
        """What the node says to the machine's root."""
        return NodeClient(str(self.folder / "node.sock")).status()

    @property
    def arena_bytes(self) -> int:
        text = (self.directory / "DaemonSet/config/node.yaml").read_text("utf-8")
        return loads(text, NodeSettings, "node.yaml").arena_bytes_or_default

    def pod(self, kind: str) -> Pod:
        (found,) = (item for item in self.deployed if item["kind"] == kind)
        return dict(found["spec"]["template"]["spec"])

    def container(
        self,
        kind: str,
        name: str,
        bundle: Path,
        host: Host,
        **changes: Any,
    ) -> Container:
        """A container of a pod, as its YAML says."""
        pod = self.pod(kind)
        (said,) = (
            item
            for item in [*pod.get("initContainers", []), *pod["containers"]]
            if item["name"] == name
        )
        context = pod["securityContext"] | said["securityContext"]
        add = context["capabilities"].get("add", [])
        binds = [
            Bind(
                self.directory / kind / mount["name"],
                mount["mountPath"],
                mount.get("readOnly", False),
            )
            for mount in said["volumeMounts"]
            if mount["name"] != "socket"
        ]
        if any(mount["name"] == "socket" for mount in said["volumeMounts"]):
            binds.append(Bind(self.folder, SOCKET, is_read_only=False))
        # The name of the service, which a cluster's DNS would know.
        binds.append(Bind(self.directory / "hosts", "/etc/hosts"))
        options = {
            "arguments": said.get("args"),
            "command": said.get("command"),
            "user": context["runAsUser"],
            "group": context["runAsGroup"],
            "memory_bytes": bytes_of(said["resources"]["limits"]["memory"]),
            "capabilities": [f"CAP_{capability}" for capability in add],
            "sees_all": pod.get("hostPID", False),
        }
        return Container(name, bundle, host, binds, **(options | changes))

    def node(self, **changes: Any) -> Container:
        """The node, to be started."""
        return self.container("DaemonSet", "node", self.node_bundle, self.node_host, **changes)

    def application(self, attach_s: float = 30.0, **changes: Any) -> Container:
        """A container as application.yaml has it, that waits so long for the node and then for words."""
        (said,) = self.application_pod["containers"]
        (mount,) = said["volumeMounts"]
        (self.directory / "app.py").write_text(APPLICATION)
        context = self.application_pod["securityContext"]
        options = {
            "user": context["runAsUser"],
            "group": context["runAsGroup"],
            "memory_bytes": bytes_of(said["resources"]["limits"]["memory"]),
            "groups": context["supplementalGroups"],
            "environment": {item["name"]: item["value"] for item in said["env"]}
            | {"BACKSIGHT_DEBUG": "1"},
            "is_asked": True,
        }
        is_mapped = changes.get("first_id") is not None
        return Container(
            "shop",
            self.mapped_applications if is_mapped else self.applications,
            None,
            [
                Bind(self.folder, mount["mountPath"], mount["readOnly"]),
                Bind(self.directory / "app.py", "/srv/app.py"),
            ],
            command=["/usr/bin/python3", "/srv/app.py", str(attach_s)],
            **(options | changes),
        )

    def await_ready(self, kind: str, name: str, host: Host) -> None:
        """By its own probe."""
        (said,) = (item for item in self.pod(kind)["containers"] if item["name"] == name)
        probe = said["readinessProbe"]["httpGet"]
        (port,) = (p["containerPort"] for p in said["ports"] if p["name"] == probe["port"])
        url = f"http://{host.address}:{port}{probe['path']}"
        host.run(PYTHON, "-m", "testbed.await_health", url, "1")

    def collected(self, trace_id: str) -> dict[str, Any]:
        """A trace that was triggered, once its verdict is not provisional."""
        # As root of the machine, at what is mounted into the pod for that.
        access = f"unix:{self.directory / 'Deployment/access/coordinator.sock'}"
        traces = (PYTHON, "-m", "ctl", "--coordinator", access, "traces", "--limit", "0", "--json")
        while True:
            for trace in map(json.loads, self.coordinator_host.run(*traces).splitlines()):
                if trace["trace_id"] == trace_id and trace["verdict"]["kind"] != "provisional":
                    return dict(trace)

    def check(self, application: Container) -> None:
        """What it triggers arrives whole."""
        trace_id = application.ask("write")
        assert application.ask(f"fire {trace_id}") == trace_id
        assert self.collected(trace_id)["verdict"]["kind"] == "coherent"


@pytest.fixture(scope="module")
def site(
    repository: Path,
    dist: Path,
    application_image: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    kubernetes = repository / "packaging/kubernetes"
    deployed = list(yaml.safe_load_all(kustomize(kubernetes / "example")))
    application = yaml.safe_load((kubernetes / "application.yaml").read_text())
    for name in (
        "run",
        "DaemonSet/config",
        "Deployment/config",
        "Deployment/store",
        "Deployment/temporary",
        "Deployment/access",
    ):
        (directory / name).mkdir(parents=True)
    for item in deployed:
        if item["kind"] == "ConfigMap":
            for file, text in item["data"].items():
                kind = "DaemonSet" if file == "node.yaml" else "Deployment"
                (directory / kind / "config" / file).write_text(text)
    with Network("containers") as network:
        coordinator_host, node_host = network.host("coordinator"), network.host("node")
        (directory / "hosts").write_text(
            f"127.0.0.1 localhost\n{coordinator_host.address} backsight-coordinator\n"
        )
        site = Site(
            directory,
            deployed,
            application["spec"]["template"]["spec"],
            coordinator_host,
            node_host,
            unpacked(image(dist, "backsight-node"), directory / "node"),
            unpacked(application_image, directory / "application"),
            unpacked(application_image, directory / "mapped", FIRST_ID),
        )
        fs_group = site.pod("Deployment")["securityContext"]["fsGroup"]
        for name in ("store", "temporary", "access"):
            os.chown(directory / "Deployment" / name, -1, fs_group)
            (directory / "Deployment" / name).chmod(0o2775)
        coordinator = unpacked(image(dist, "backsight-coordinator"), directory / "coordinator")
        probes = unpacked(image(dist, "backsight-node"), directory / "probes")
        with site.container("DaemonSet", "folder", probes, node_host) as folder:
            assert folder.process.wait() == 0, folder.log()
        with (
            site.container("Deployment", "coordinator", coordinator, coordinator_host),
            site.container("DaemonSet", "probes", probes, node_host),
        ):
            site.await_ready("Deployment", "coordinator", coordinator_host)
            yield site


@pytest.fixture
def node(site: Site) -> Iterator[Container]:
    """One with an empty pool, that the probes and the coordinator know."""
    with site.node() as node:
        site.await_ready("DaemonSet", "node", site.node_host)
        node.await_said("probes have connected")
        yield node


# As application.yaml has it, and with a user namespace: as another user there, and as its root.
PODS: list[dict[str, Any]] = [
    {},
    {"first_id": FIRST_ID, "groups": []},
    {"first_id": FIRST_ID, "groups": [], "user": 0},
]


@pytest.mark.parametrize("pod", PODS)
def test_a_trace_of_another_container_arrives(
    site: Site, node: Container, pod: dict[str, Any]
) -> None:
    with site.application(**pod) as application:
        assert application.hear() == "True", application.log()
        site.check(application)


def test_the_kernel_fires_for_a_process_of_another_container(site: Site, node: Container) -> None:
    with site.application(first_id=FIRST_ID) as application:
        assert application.hear() == "True", application.log()
        while site.status()["probes_watched"] != 1:
            time.sleep(LOOK_EVERY_S)
        trace = site.collected(application.ask("crash"))
        assert "kernel.crash" in {trigger["name"] for trigger in trace["triggers"]}, node.log()


def test_who_may_not_attach_is_told_as_whom_the_node_knows_it(site: Site, node: Container) -> None:
    with site.application(2.0, groups=[], user=10002) as application:
        assert application.hear() == "False"
        assert "user 10002 may not attach; the node's `allow` names who may" in application.log()
    assert "of user 10002 may not attach" in node.log()


def test_a_node_outside_of_the_pid_namespace_says_what_to_do(site: Site) -> None:
    with site.node(sees_all=False) as node:
        site.await_ready("DaemonSet", "node", site.node_host)
        with site.application(2.0) as application:
            assert application.hear() == "False", node.log()
            assert (
                "pid namespace lacks the process; run the node in the machine's"
                in application.log()
            )


def test_a_killed_daemon_leaves_its_pool_to_the_next(site: Site, node: Container) -> None:
    with site.application() as application:
        assert application.hear() == "True", application.log()
        trace_id = application.ask("write")
        holder = node.pid
        (daemon,) = Path(f"/proc/{holder}/task/{holder}/children").read_text().split()
        os.kill(int(daemon), signal.SIGKILL)
        node.await_said("took up 1 clients of before the restart")
        application.ask(f"fire {trace_id}")
        assert site.collected(trace_id)["verdict"]["kind"] == "coherent"


def test_a_new_container_has_an_empty_pool_and_the_applications_go_on(
    site: Site, node: Container
) -> None:
    with site.application() as application:
        assert application.hear() == "True", application.log()
        trace_id = application.ask("write")
        node.close()
        node.open()
        site.await_ready("DaemonSet", "node", site.node_host)
        assert application.ask("attachments 2") == "2"
        application.ask(f"fire {trace_id}")
        assert site.collected(trace_id)["span_count"] == 0
        # For minutes it may have missed the beginning of what is written, as far as the node can know.
        trace_id = application.ask("write")
        application.ask(f"fire {trace_id}")
        assert site.collected(trace_id)["span_count"] == 1


def test_what_an_application_records_is_charged_to_it(site: Site, node: Container) -> None:
    with site.application() as application:
        assert application.hear() == "True", application.log()
        node_before = node.memory.shared_memory_bytes()
        application.ask(f"fill {3 * site.arena_bytes}")
        charged = application.memory.shared_memory_bytes()
        node_charged = node.memory.shared_memory_bytes() - node_before
    print(
        f"of an arena of {site.arena_bytes} bytes, {charged} are charged to the application,"
        f" {node_charged} to the node"
    )
    assert 0.9 * site.arena_bytes < charged < 1.1 * site.arena_bytes, node.log()
    assert node_charged < 0.1 * site.arena_bytes


def test_an_application_with_less_memory_than_its_arena_is_killed(
    site: Site, node: Container
) -> None:
    with site.application(memory_bytes=site.arena_bytes * 3 // 4) as application:
        assert application.hear() == "True", application.log()
        assert application.memory.oom_kills() == 0
        assert application.ask(f"fill {3 * site.arena_bytes}") == ""
        assert application.process.wait() != 0
        assert application.memory.oom_kills() > 0, application.log()
    assert site.status()["attach"]["attached"] >= 1, node.log()


@pytest.mark.parametrize("name", ["backsight-node", "backsight-coordinator"])
def test_an_image_has_nothing_for_an_init_and_no_rights_of_others(
    dist: Path, tmp_path: Path, name: str
) -> None:
    files = unpacked(image(dist, name), tmp_path / name) / "rootfs"
    systemd = [files / folder for folder in ("usr/lib/systemd/system", "etc/systemd/system")]
    assert [path for folder in systemd for path in folder.rglob("*")] == []
    mode = stat.S_ISUID | stat.S_ISGID
    plain = [path for path in files.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(plain) > 1000
    assert [path for path in plain if path.stat().st_mode & mode] == []


def test_two_builds_are_the_same_and_say_what_they_are(
    repository: Path, dist: Path, tmp_path: Path
) -> None:
    for package in dist.glob("*.deb"):
        shutil.copy(package, tmp_path)
        # Of another architecture, which is not that of the images.
        if not package.name.endswith("_all.deb"):
            (tmp_path / f"{package.name.rpartition('_')[0]}_riscv64.deb").touch()
    said = subprocess.run(
        [repository / "packaging/oci/build", tmp_path, "bookworm"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    for name in ("backsight-node", "backsight-coordinator"):
        index = json.loads((tmp_path / "oci" / name / "index.json").read_text())
        (manifest,) = index["manifests"]
        assert f"{image(tmp_path, name)}@{manifest['digest']}\n" in said
    done = subprocess.run(
        ["diff", "--recursive", "--brief", dist / "oci", tmp_path / "oci"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
