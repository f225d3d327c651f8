# SPDX-License-Identifier: Apache-2.0
"""What `meson install` gives: programs that need nothing of the tree, wherever they are."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime import VERSION
from testbed.daemons import anywhere, coordinator_on
from testbed.probes import Probes
from testbed.topology import PYTHON, Daemon, Node, await_settled
from testbed.venvs import clean_environment

PROGRAMS = (
    "sbin/backsight-node",
    "sbin/backsight-holder",
    "sbin/backsight-probes",
    "sbin/backsight-coordinator",
    "bin/backsightctl",
)

FOLDERS = ("appliance", "coordinator", "counting", "ctl", "formats", "protocol", "runtime")

# They build what is installed.
OF_THE_TREE = {
    "appliance/native_build.py",
    "appliance/probes_build.py",
    "formats/native_build.py",
}

# Whoever runs a program of ours there must not run this.
HOSTILE = "raise SystemExit('taken from the current directory')\n"

IMPORT_ALL = """
import importlib, pkgutil, sys
root = sys.argv[1]
sys.path.insert(0, root)
for module in pkgutil.walk_packages([root]):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


INSTALLING = Path(__file__).parents[2] / "docs/installing.md"

PICKED_UP = re.compile(r"^pick_up +(.+)$", re.MULTILINE)

APPLICATION = """
import sys, time
import backsight

assert backsight.wait_attached(30.0)
with backsight.Trace(sys.argv[1]) as trace:
    trace.span_start(1, 0, time.time_ns(), "GET /cart")
    trace.span_end(1, time.time_ns())
    trace.trigger("by-hand", "it is to be collected")
"""


@pytest.fixture(scope="module")
def prefix(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that is installed, below a directory that nobody told Meson of."""
    directory = tmp_path_factory.mktemp("root")
    done = subprocess.run(
        ["/usr/bin/meson", "install", "-C", build, "--no-rebuild", "--destdir", directory],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    options = json.loads((build / "meson-info/intro-buildoptions.json").read_text("utf-8"))
    (told,) = (option["value"] for option in options if option["name"] == "prefix")
    return directory / Path(told).relative_to("/")


def libraries(prefix: Path) -> str:
    """Where libbacksight is, which the probes write with; of /usr the loader knows by itself."""
    (library,) = prefix.glob("lib/**/libbacksight.so.0")
    return str(library.parent)


def environment(prefix: Path) -> dict[str, str]:
    """Ours, without what leads into the tree."""
    return {**clean_environment(), "LD_LIBRARY_PATH": libraries(prefix)}


def application_environment(prefix: Path) -> dict[str, str]:
    """What leads an application's Python to the client that is installed."""
    (package,) = prefix.glob("lib/python3*/*-packages/backsight")
    return {**environment(prefix), "PYTHONPATH": str(package.parent)}


def ctl(prefix: Path, *words: str) -> str:
    """What the installed backsightctl says."""
    done = subprocess.run(
        [prefix / "bin/backsightctl", *words],
        env=environment(prefix),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def private(prefix: Path) -> Path:
    return prefix / "lib" / "backsight"


def test_all_python_of_the_programs_is_installed_and_nothing_else(
    prefix: Path, repository: Path
) -> None:
    sources = {
        str(path.relative_to(repository))
        for folder in FOLDERS
        for path in (repository / folder).rglob("*.py")
    } - OF_THE_TREE
    installed = {
        str(path.relative_to(private(prefix)))
        for path in private(prefix).rglob("*")
        if path.is_file()
    }
    assert sources <= installed
    built = installed - sources
    assert {path for path in built if not path.endswith(("_pb2.py", "_pb2_grpc.py"))} == {
        "backsight_decode_native.abi3.so",
        "backsight_node_native.abi3.so",
        "backsight_probes_native.abi3.so",
    }


def test_all_of_it_can_be_imported(prefix: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-I", "-c", IMPORT_ALL, private(prefix)],
        env=environment(prefix),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def packages_with(package: str, control: str) -> set[str]:
    """A package of ours, and those of ours that it depends on, as packaging/debian/control has it."""
    (paragraph,) = re.findall(rf"^Package: {package}\n(?:.+\n?)+", control, re.MULTILINE)
    depends = re.search(r"^Depends:((?:.*\n)(?: .*\n)*)", paragraph, re.MULTILINE)
    assert depends is not None
    needed = set(re.findall(r"\bbacksight-[a-z]+", depends[1]))
    return {package}.union(*(packages_with(other, control) for other in needed))


@pytest.mark.parametrize(
    "package", ["backsight-node", "backsight-probes", "backsight-coordinator", "backsight-tools"]
)
def test_a_package_has_all_that_it_imports(
    build: Path, repository: Path, tmp_path: Path, prefix: Path, package: str
) -> None:
    control = (repository / "packaging/debian/control").read_text()
    rules = (repository / "packaging/debian/rules").read_text()
    tags = dict(re.findall(r"^tag_(\S+) := (\S+)$", rules, re.MULTILINE))
    chosen = ",".join(tags[name] for name in packages_with(package, control))
    install = ["/usr/bin/meson", "install", "-C", str(build), "--no-rebuild", "--tags", chosen]
    subprocess.run([*install, "--destdir", str(tmp_path)], stdout=subprocess.DEVNULL, check=True)
    (folder,) = tmp_path.glob("**/lib/backsight")
    done = subprocess.run(
        [PYTHON, "-I", "-c", IMPORT_ALL, folder],
        env=environment(prefix),  # for libbacksight, a package of its own
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_takes_nothing_of_where_it_is_called(
    prefix: Path, tmp_path: Path, program: str
) -> None:
    for name in ("runtime", "yaml", "argparse", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    done = subprocess.run(
        [prefix / program, "--help"],
        cwd=tmp_path,
        env={**environment(prefix), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {Path(program).name} ")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_says_which_version_it_is(prefix: Path, program: str) -> None:
    said = subprocess.check_output(
        [prefix / program, "--version"], env=environment(prefix), text=True
    )
    assert said == f"{Path(program).name} {VERSION}\n"


def manual(prefix: Path, page: str) -> str:
    """A page as a terminal shows it; that it is right, too."""
    section = page.rpartition(".")[2]
    done = subprocess.run(
        ["man", "--warnings", "--local-file", prefix / f"share/man/man{section}/{page}"],
        env={**environment(prefix), "MANWIDTH": "500", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_manual_has_each_command_and_option(prefix: Path, program: str) -> None:
    name = Path(program).name
    page = manual(prefix, f"{name}.1" if program.startswith("bin/") else f"{name}.8")
    wanted = {"--version"}
    if name == "backsightctl":
        wanted |= {"snapshot [", "config check", "--verdict", "coherent", "TRACE"}
    elif name == "backsight-holder":
        wanted |= {"--watchdog-s SECONDS", "SIGUSR1", "after --"}
    else:
        wanted |= {"--config FILE", "SIGHUP", "/etc/backsight/"}
    assert {text for text in wanted if text not in page} == set()


@pytest.mark.parametrize("kind", ["node", "coordinator"])
def test_the_manual_has_each_key_with_its_default(
    prefix: Path, repository: Path, kind: str
) -> None:
    page = manual(prefix, f"backsight-{kind}.yaml.5")
    example = (repository / f"packaging/{kind}.yaml").read_text("utf-8")
    keys = re.findall(r"(?m)^#(?:  )*([a-z_]+(?:: .+)?):?$", example)
    assert len(keys) > 30
    # Alone in its line, or before a description, if it is short.
    where = r"(?m)^ +(?:[a-z_]+\.)*{}(?: |$)"
    assert {key for key in keys if not re.search(where.format(re.escape(key)), page)} == set()


def completions(prefix: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    script = f"""
        source '{prefix}/share/bash-completion/completions/backsightctl'
        COMP_WORDS=(backsightctl "$@") COMP_CWORD=$#
        _backsightctl
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", script, "bash", *words], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_bash_completes_commands_options_and_files(prefix: Path, tmp_path: Path) -> None:
    assert completions(prefix, "tra") == ["traces"]
    assert completions(prefix, "config", "") == ["check"]
    assert completions(prefix, "traces", "--verd") == ["--verdict"]
    assert set(completions(prefix, "traces", "--verdict", "")) >= {"coherent", "partial"}
    assert completions(prefix, "traces", "--limit", "") == []
    assert set(completions(prefix, "--node", "/x", "")) >= {"traces", "show"}
    (tmp_path / "traces.json").touch()
    assert completions(prefix, "export", "--output", f"{tmp_path}/tr") == [
        f"{tmp_path}/traces.json"
    ]


def test_what_documents_link_to_is_installed_too(prefix: Path) -> None:
    documents = prefix / "share/doc/backsight-tools"
    links = [
        (page, link)
        for page in documents.rglob("*.md")
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert len(links) > 30
    assert [str(page) for page, link in links if not (page.parent / link).exists()] == []


def installed(prefix: Path, program: str) -> Sequence[str | Path]:
    """What runs a program that knows neither the tree nor, by itself, where our libraries are."""
    return ("env", "-u", "PYTHONPATH", f"LD_LIBRARY_PATH={libraries(prefix)}", prefix / program)


def files_of(daemon: Daemon) -> str:
    return Path(f"/proc/{daemon.daemon_pid()}/maps").read_text()


@pytest.mark.root
@pytest.mark.bpf
@pytest.mark.parametrize("loader", ["core", "bcc"])
def test_they_run_and_a_trace_is_collected(prefix: Path, tmp_path: Path, loader: str) -> None:
    machine = anywhere()
    coordinator = coordinator_on(machine, tmp_path)
    coordinator.program = installed(prefix, "sbin/backsight-coordinator")
    settings = {"metrics": {"listen": None}, "probes": {"loader": loader}}
    node = Node(machine, "web-1", tmp_path, coordinator, settings)
    node.program = installed(prefix, "sbin/backsight-node")
    probes = Probes(node)
    probes.program = installed(prefix, "sbin/backsight-probes")
    trace_id = secrets.token_hex(16)
    (first,) = re.findall(
        r"^```python\n(.*?)^```", INSTALLING.read_text(), re.MULTILINE | re.DOTALL
    )
    with coordinator, node, probes:
        assert f"{private(prefix)}/backsight_node_native.abi3.so" in files_of(node)
        assert f"{private(prefix)}/backsight_probes_native.abi3.so" in files_of(probes)
        probes.await_watched(0)
        # Only the probes, which are none of them.
        before = ctl(prefix, "--node", str(node.socket_path), "status")
        assert re.search(r"^clients_in_pool +1$", before, re.MULTILINE)
        assert re.search(r"^dataplane.clients +0$", before, re.MULTILINE)
        subprocess.run(
            [PYTHON, "-c", APPLICATION, trace_id],
            cwd=tmp_path,
            env={**application_environment(prefix), **node.client_environment("shop")},
            check=True,
        )
        first_id = subprocess.run(
            [PYTHON, "-c", first],
            cwd=tmp_path,
            env={**application_environment(prefix), **node.client_environment("shop")},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        assert await_settled(coordinator, [node])
        status = ctl(prefix, "--node", str(node.socket_path), "status")
        traces = ctl(prefix, "--coordinator", coordinator.endpoint, "traces")
        shown = ctl(prefix, "--coordinator", coordinator.endpoint, "show", trace_id, "--json")
    assert re.search(r"^connected +yes$", status, re.MULTILINE)
    assert sum(map(int, re.findall(r"(\d+) up to", PICKED_UP.findall(status)[0]))) == 2
    assert json.loads(shown)["verdict"]["kind"] == "coherent"
    assert re.search(rf"{first_id}.* coherent", traces)
    assert "GET /cart" in shown
    assert f"the loader is {loader}" in probes.log_path.read_text()


@pytest.mark.root
@pytest.mark.bpf
def test_the_doctor_asks_the_probes_that_are_installed(prefix: Path) -> None:
    checks = {
        check["id"]: check
        for check in map(json.loads, ctl(prefix, "doctor", "--json").splitlines())
    }
    assert checks["loader.core"]["ok"]
    assert checks["loader.bcc"]["ok"]
    assert checks["probe.run_queue"]["ok"]
