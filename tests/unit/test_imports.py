# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, and what an application sees of all that."""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ALLOWED: dict[str, frozenset[str]] = {
    package: frozenset(allowed.split())
    for package, allowed in {
        # What others stand on.
        "protocol": "",
        "formats": "protocol",
        "counting": "protocol",
        "runtime": "protocol",
        # Decisions, without anything that opens, waits or asks the time.
        "appliance.core": "protocol counting",
        "coordinator.core": "protocol counting formats",
        # Programs; none knows another.
        "appliance": "appliance.core protocol counting runtime",
        "coordinator": "coordinator.core protocol counting formats runtime",
        "ctl": "protocol formats runtime",
        # What applications import, and what an application is.
        "native": "",
        # Builds programs for the kernel.
        "bpf": "",
        "testbed.apps": "",
        "vagrant": "native",
        # Asks programs how they are called.
        "packaging": "appliance ctl runtime",
        # What drives the programs from outside.
        "testbed": "protocol formats ctl",
        "bench": "protocol formats coordinator coordinator.core native testbed",
        "tests": (
            "protocol formats counting runtime appliance appliance.core coordinator"
            " coordinator.core ctl native testbed testbed.apps bench"
        ),
    }.items()
}
"""By package or, where one is in another, by the longer name. Each may import itself."""

# Built, and importable by a name of its own: of which package each is.
BUILT = {
    "backsight": "native",
    "backsight_pb2": "protocol",
    "backsight_pb2_grpc": "protocol",
    "health_pb2": "protocol",
    "perfetto_pb2": "formats",
    "rpc_status_pb2": "formats",
    "opentelemetry.proto": "formats",
    "backsight_decode_native": "formats",
    "backsight_node_native": "appliance",
    "backsight_probes_native": "appliance",
}

# A viewer's print; a change of one must not change what is in the store.
VIEWERS = {"formats.jaeger", "formats.otlp_json", "formats.perfetto"}
STORED = tuple(f"coordinator.{name}" for name in ("store.reader", "store.writer", "index.indexer"))


@dataclass(frozen=True, slots=True)
class Import:
    path: Path
    line: int
    module: str


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def package_of(module: str) -> str | None:
    """The longest known name that a module is within; None for what is not of this tree."""
    names = {**BUILT, **{package: package for package in ALLOWED}}
    found = [name for name in names if is_within(module, name)]
    return names[max(found, key=len)] if found else None


def sources(root: Path) -> Iterator[Path]:
    """The Python of the tree, relative to its root; scripts too."""
    for folder in sorted(root.iterdir()):
        if not folder.is_dir() or folder.name == "build" or folder.name.startswith("."):
            continue
        for path in sorted(folder.rglob("*")):
            if path.suffix == ".py" or (path.is_file() and not path.suffix and is_python(path)):
                yield path.relative_to(root)


def is_python(path: Path) -> bool:
    with path.open("rb") as file:
        line = file.readline()
    return line.startswith(b"#!") and b"python" in line


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(root: Path, path: Path) -> Iterator[Import]:
    """All of a source, wherever in it: at its top, in functions, for types, by name."""
    # What a relative import counts from.
    parts = module_of(path).split(".")
    package = parts if path.name == "__init__.py" else parts[:-1]
    for node in ast.walk(ast.parse((root / path).read_text("utf-8"))):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(path, node.lineno, alias.name)
            case ast.ImportFrom():
                base = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                # Any of the names may be a module.
                for alias in node.names:
                    yield Import(path, node.lineno, f"{module}.{alias.name}")
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(path, node.lineno, module)
            case _:
                pass


def forbidden(root: Path) -> list[str]:
    """What breaks the rules, a line each."""
    found = []
    for path in sources(root):
        importer = package_of(module_of(path))
        if importer is None:
            found.append(f"{path}: its package has no rule; give it one in ALLOWED")
            continue
        for one in imports(root, path):
            imported = package_of(one.module)
            if imported not in (None, importer, *ALLOWED[importer]):
                found.append(
                    f"{path}:{one.line}: {importer} imports {one.module}; allowed:"
                    f" {', '.join(sorted(ALLOWED[importer])) or 'none'} of this tree"
                )
    return found


def reached(root: Path, module: str) -> set[str]:
    """The modules of this tree that a module imports, and all that they do."""
    by_module = {module_of(path): path for path in sources(root)}
    found: set[str] = set()
    waiting = [module]
    while waiting:
        for one in imports(root, by_module[waiting.pop()]):
            # `from a import b`: the module is a.b or a.
            for name in (one.module, one.module.rpartition(".")[0]):
                if name in by_module and name not in found:
                    found.add(name)
                    waiting.append(name)
    return found


def test_imports_go_in_the_allowed_directions(repository: Path) -> None:
    assert forbidden(repository) == []


@pytest.mark.parametrize(
    ("path", "text", "what"),
    [
        ("appliance/core/node.py", "from runtime.log import Log", "runtime.log.Log"),
        ("coordinator/core/a.py", "import runtime.http", "runtime.http"),
        ("coordinator/core/a.py", "from ..store import Store", "coordinator.store.Store"),
        ("appliance/core/a.py", "import backsight_node_native", "backsight_node_native"),
        ("protocol/a.py", "from backsight_decode_native import lib", "backsight_decode_native.lib"),
        ("ctl/a.py", "def f():\n    import appliance.settings", "appliance.settings"),
        ("ctl/a.py", "if TYPE_CHECKING:\n    from coordinator import store", "coordinator.store"),
        ("ctl/a.py", 'importlib.import_module("coordinator.store")', "coordinator.store"),
        ("bench/run", "#!/usr/bin/python3\nfrom tests.replay import x", "tests.replay.x"),
        ("bench/a.py", "from ctl.node import NodeClient", "ctl.node.NodeClient"),
        ("testbed/a.py", "import tests.conftest", "tests.conftest"),
        ("testbed/apps/shop/a.py", "import backsight", "backsight"),
        ("native/python/backsight/a.py", "import protocol.wire", "protocol.wire"),
        ("protocol/a.py", "from opentelemetry.proto.x import y", "opentelemetry.proto.x.y"),
        ("appliance/a.py", "from coordinator.core.verdict import V", "coordinator.core.verdict.V"),
    ],
)
def test_an_import_in_another_direction_is_found(
    tmp_path: Path, path: str, text: str, what: str
) -> None:
    source = tmp_path / path
    source.parent.mkdir(parents=True)
    source.write_text(text)
    (found,) = forbidden(tmp_path)
    assert found.startswith(path)
    assert f" imports {what};" in found


def test_a_package_without_a_rule_is_found(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.py").write_text("")
    assert forbidden(tmp_path) == ["other/a.py: its package has no rule; give it one in ALLOWED"]


def test_what_is_not_of_this_tree_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "protocol").mkdir()
    (tmp_path / "protocol/a.py").write_text("import grpc\nfrom opentelemetry import trace\n")
    assert forbidden(tmp_path) == []


@pytest.mark.parametrize("module", STORED)
def test_what_is_stored_does_not_depend_on_a_viewer(repository: Path, module: str) -> None:
    found = reached(repository, module)
    assert "protocol.messages" in found
    assert found & VIEWERS == set()


def test_applications_see_backsight_and_nothing_else(build: Path) -> None:
    """The wheel as well: tests/packaging."""
    folder = build / "native/python"
    seen = {module.name for module in pkgutil.iter_modules([str(folder)])}
    assert seen == {"backsight"}, f"what else is in {folder} is left from before: make clean build"
