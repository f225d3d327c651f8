# SPDX-License-Identifier: Apache-2.0
"""The .rpm: what they have, and how they get on, on a Debian in place of a Fedora (fedora.spec)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from testbed.machines import Machine, plain_tree
from tests.packaging.installed import (
    SERVICES,
    check_services,
    check_traces,
    configure,
    files,
    kill_node,
    restart_node,
    users,
)

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1800)]

# What has another name at Debian.
DEB_NAMES = {"backsight-libs": "libbacksight0", "backsight-devel": "libbacksight-dev"}

# What each of the two has besides, of its own.
RPM_ONLY = re.compile(r"/usr/lib/\.build-id/|/usr/share/(doc|licenses)/|.*/__pycache__/")
DEB_ONLY = re.compile(r"/usr/share/(doc|lintian|python3/runtime\.d)/|.*\.dist-info/INSTALLER$")

# The same of what they depend on.
DEPENDENCY_NAMES = DEB_NAMES | {
    "backsight-libs": "libbacksight0",
    "/usr/bin/python3": "python3",
    "libbpf.so.1": "libbpf1",
    "libc.so.6": "libc6",
    "python3-bcc": "python3-bpfcc",
    "python3-cffi": "python3-cffi-backend",
    "python3-prometheus_client": "python3-prometheus-client",
    "python3-pyyaml": "python3-yaml",
}

# For scriptlets; what rpm finds by itself: of its own, and where a package is required besides.
RPM_ONLY_DEPENDENCIES = re.compile(
    r"/bin/sh$|systemd$|user$|group$|rpmlib$|rtld$|config$|/usr/bin/pkg-config$|libbacksight\.so\.0$"
)
# For scripts that remove users, and that make them; by Debian's cffi, which has no stable ABI.
DEB_ONLY_DEPENDENCIES = re.compile(r"passwd$|systemd$|python3-cffi-backend-api-(min|max)$")

UNITS = {
    "backsight-node": "backsight-node.socket backsight-node.service",
    "backsight-probes": "backsight-probes.service",
    "backsight-coordinator": "backsight-coordinator.service",
}

SCRIPTLET = """
if [ $1 {when} ] && [ -x /usr/lib/systemd/systemd-update-helper ]; then
/usr/lib/systemd/systemd-update-helper {verb} {units} || :
fi
"""


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def suite(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build(repository: Path, dist: Path, suite: str, *options: str) -> dict[str, Path]:
    """By the name of the package."""
    subprocess.run([repository / "packaging/build-rpm", dist, suite, *options], check=True)
    built = sorted(path for path in dist.glob("*.rpm") if not path.name.endswith(".src.rpm"))
    return {query(path, "%{NAME}"): path for path in built}


@pytest.fixture(scope="module")
def packages(
    repository: Path, suite: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    return build(repository, tmp_path_factory.mktemp("dist"), suite)


@pytest.fixture(scope="module")
def newer(
    repository: Path, suite: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The same as the next release of the package."""
    return build(repository, tmp_path_factory.mktemp("newer"), suite, "--define=dist .next")


@pytest.fixture(scope="module")
def debs(suite: str, debs_of: Callable[[str], list[Path]]) -> dict[str, Path]:
    return {deb.name.partition("_")[0]: deb for deb in debs_of(suite)}


def query(package: Path, format_: str) -> str:
    """What a package says of itself, in rpm's format."""
    command = ["rpm", "--query", "--package", f"--queryformat={format_}", str(package)]
    return subprocess.check_output(command, text=True)


def files_of_rpm(package: Path) -> set[str]:
    listed = query(package, "[%{FILEMODES:perms} %{FILENAMES}\n]").splitlines()
    return {line.split()[1] for line in listed if not line.startswith("d")}


def files_of_deb(package: Path) -> set[str]:
    listed = subprocess.check_output(["dpkg-deb", "--contents", package], text=True).splitlines()
    return {line.split()[5].removeprefix(".") for line in listed if not line.startswith("d")}


def as_in_rpm(path: str) -> str:
    path = re.sub("^/usr/lib/[^/]+-linux-gnu/", "/usr/lib64/", path)
    return re.sub("^/lib/", "/usr/lib/", path)


def test_rpmlint_finds_nothing(repository: Path, packages: dict[str, Path]) -> None:
    folder = repository / "packaging/rpm"
    (source,) = packages["backsight-node"].parent.glob("*.src.rpm")
    checked = [folder / "backsight.spec", source, *packages.values()]
    done = subprocess.run(
        ["rpmlint", "--config", folder / "rpmlint.toml", *checked],
        capture_output=True,
        text=True,
        check=False,
    )
    found = f"{len(packages) + 1} packages and 1 specfiles checked; 0 errors, 0 warnings, "
    assert found in done.stdout, done.stdout


def test_each_package_has_what_its_deb_has(
    packages: dict[str, Path], debs: dict[str, Path]
) -> None:
    assert {DEB_NAMES.get(name, name) for name in packages} == debs.keys()
    for name, package in packages.items():
        deb = debs[DEB_NAMES.get(name, name)]
        in_deb = {as_in_rpm(path) for path in files_of_deb(deb) if not DEB_ONLY.match(path)}
        in_rpm = {path for path in files_of_rpm(package) if not RPM_ONLY.match(path)}
        assert in_rpm == in_deb, name


@pytest.mark.parametrize("kind", ["Requires", "Recommends", "Suggests"])
def test_each_package_depends_on_what_its_deb_does(
    packages: dict[str, Path], debs: dict[str, Path], kind: str
) -> None:
    for name, package in packages.items():
        deb = debs[DEB_NAMES.get(name, name)]
        of_deb = deb_relations(deb, "Depends" if kind == "Requires" else kind)
        of_rpm = {entry.split()[0].partition("(")[0] for entry in relations(package, kind)}
        if name == "python3-backsight":
            # On Fedora rpm finds by the path of the modules which Python they are for.
            of_deb.discard("python3")
        wanted = {entry for entry in of_deb if not DEB_ONLY_DEPENDENCIES.match(entry)}
        found = {entry for entry in of_rpm if not RPM_ONLY_DEPENDENCIES.match(entry)}
        assert {DEPENDENCY_NAMES.get(entry, entry) for entry in found} == wanted, name


def test_what_packages_require_of_ours_is_there(packages: dict[str, Path]) -> None:
    required, provided = (
        set[str]().union(*(relations(package, kind) for package in packages.values()))
        for kind in ("Requires", "Provides")
    )
    # Whoever requires it in no version takes it in any.
    provided |= {entry.split()[0] for entry in provided}
    ours = {entry for entry in required if "backsight" in entry}
    # What rpm finds by itself is among them.
    assert [entry for entry in ours if entry.startswith("libbacksight.so.0(")]
    assert ours - provided == set()


def deb_relations(deb: Path, field: str) -> set[str]:
    """By name, without a version; of alternatives the first."""
    said = subprocess.check_output(["dpkg-deb", "--field", deb, field], text=True)
    return set(re.findall(r"(?:^|, )([a-z0-9.+-]+)", said))


def relations(package: Path, kind: str) -> set[str]:
    """To others, each with its version, as rpm prints them."""
    command = ["rpm", "--query", "--package", f"--{kind.lower()}", str(package)]
    return set(subprocess.check_output(command, text=True).splitlines())


def test_all_python_is_compiled(packages: dict[str, Path]) -> None:
    everything = set[str]().union(*map(files_of_rpm, packages.values()))
    sources = {path for path in everything if path.endswith(".py")}
    assert len(sources) > 100
    for suffix in (r"\.cpython-\d+\.pyc", r"\.cpython-\d+\.opt-1\.pyc"):
        pattern = re.compile(rf"(.*)/__pycache__/(\w+){suffix}")
        compiled = {
            found.expand(r"\1/\2.py") for found in map(pattern.fullmatch, everything) if found
        }
        assert compiled == sources


def test_rpm_keeps_configurations_that_were_changed(packages: dict[str, Path]) -> None:
    flags = "".join(query(rpm, "[%{FILENAMES} %{FILEFLAGS:fflags}\n]") for rpm in packages.values())
    assert set(re.findall(r"^\S+ \w*c\w*$", flags, re.MULTILINE)) == {
        "/etc/backsight/coordinator.yaml cn",
        "/etc/backsight/node.yaml cn",
    }


def test_scriptlets_restart_services_and_leave_the_socket(packages: dict[str, Path]) -> None:
    for name, package in packages.items():
        units = UNITS.get(name)
        wanted = dict.fromkeys(
            ("PRETRANS", "PREIN", "POSTIN", "PREUN", "POSTUN", "POSTTRANS"), "(none)"
        )
        if units:
            service = units.split()[-1]
            wanted |= {
                "POSTIN": SCRIPTLET.format(when="-eq 1", verb="install-system-units", units=units),
                "PREUN": SCRIPTLET.format(when="-eq 0", verb="remove-system-units", units=units),
                "POSTUN": SCRIPTLET.format(
                    when="-ge 1", verb="mark-restart-system-units", units=service
                ),
            }
        for scriptlet, text in wanted.items():
            assert query(package, f"%{{{scriptlet}}}").split() == text.split(), (name, scriptlet)


@pytest.fixture(scope="module")
def machine(
    repository: Path,
    suite: str,
    packages: dict[str, Path],
    newer: dict[str, Path],
    debs: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Machine]:
    """With what they depend on, of Debian, and with what else they find on a Fedora."""
    directory = tmp_path_factory.mktemp("machine")
    tree = directory / "tree"
    subprocess.run(["cp", "--archive", "--reflink=auto", plain_tree(suite), tree], check=True)
    for words in (["update"], ["install", "rpm"], ["satisfy", *depends(debs.values())]):
        apt = ["apt-get", "--quiet", "--yes", "--no-install-recommends", *words]
        subprocess.run([repository / "packaging/in-tree", tree, *apt], check=True)
    here = Path(__file__).parent
    defines = (f"--define=_topdir {directory}", f"--define=_sourcedir {here}")
    subprocess.run(["rpmbuild", "-bb", *defines, here / "fedora.spec"], check=True)
    for name, built in (
        ("dist", packages.values()),
        ("newer", newer.values()),
        ("fedora", directory.glob("RPMS/*/*.rpm")),
    ):
        (tree / name).mkdir()
        for package in built:
            shutil.copy(package, tree / name)
    with Machine("web-1", tree, directory) as machine:
        machine.sh("rpm --install --nodeps /fedora/*.rpm")
        yield machine


def depends(debs: Iterable[Path]) -> list[str]:
    """What of Debian packages of ours depend on."""
    wanted: set[str] = set()
    for deb in debs:
        field = subprocess.check_output(["dpkg-deb", "--field", deb, "Depends"], text=True)
        wanted.update(field.strip().split(", "))
    return sorted(package for package in wanted if "backsight" not in package)


def upgrade(machine: Machine) -> None:
    """All services are other processes afterwards, the node with what it held; the socket is as it was."""

    def show(unit: str, property_: str) -> str:
        return machine.run("systemctl", "show", "--value", f"--property={property_}", unit)

    socket = show("backsight-node.socket", "ActiveEnterTimestampMonotonic")
    processes = [show(service, "MainPID") for service in SERVICES]
    machine.sh("rpm --upgrade --nodeps /newer/*.rpm")
    assert machine.run("rpm", "--query", "--queryformat=%{RELEASE}", "backsight-node") == "1.next"
    assert show("backsight-node.socket", "ActiveEnterTimestampMonotonic") == socket
    for service, process in zip(SERVICES, processes, strict=True):
        machine.run("systemctl", "is-active", service)
        assert show(service, "MainPID") != process
    invocation = show("backsight-node", "InvocationID").strip()
    log = machine.run("journalctl", f"_SYSTEMD_INVOCATION_ID={invocation}", "-o", "cat")
    assert "clients of before the restart" in log


def test_from_installation_to_removal(machine: Machine, packages: dict[str, Path]) -> None:
    files_before, users_before = files(machine), users(machine)
    machine.sh("rpm --install --nodeps /dist/*.rpm")
    # As Fedora's presets have it.
    for service in SERVICES:
        assert machine.run("systemctl", "is-enabled", service, check=False) == "disabled\n"
    machine.run("systemctl", "enable", "--now", *SERVICES)
    check_services(machine)
    configure(machine)
    check_traces(machine, (kill_node, restart_node, upgrade))
    machine.halt()
    machine.boot()
    check_services(machine)
    # Whoever runs Python as root makes a .pyc anew that is of no use.
    changed = machine.run("rpm", "--verify", "--nodeps", *packages, check=False)
    assert [line.split()[-1] for line in changed.splitlines()] == ["/etc/backsight/node.yaml"]
    machine.run("rpm", "--erase", *packages)
    # Fedora leaves what others may own or refer to: the users, and with the coordinator its traces.
    left = files(machine) - files_before
    assert {path for path in left if not path.startswith("/var/lib/backsight/")} == {
        "/etc/backsight",
        "/etc/backsight/node.yaml.rpmsave",
        "/var/lib/backsight",
    }
    created = set(users(machine)) - set(users_before)
    assert {entry.partition(":")[0] for entry in created} == {"backsight", "backsight-coordinator"}
    assert "backsight" not in machine.run("systemctl", "list-unit-files")
