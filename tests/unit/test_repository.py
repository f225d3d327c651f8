# SPDX-License-Identifier: Apache-2.0
"""What holds for every file that is tracked, whoever writes it."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

# Suffixes and names of what a person writes and a tool reads. Prose (*.md) and
# data carry their licence in a file beside them.
SOURCE_SUFFIXES = frozenset(
    [
        ".build",
        ".c",
        ".h",
        ".proto",
        ".py",
        ".pyi",
        ".service",
        ".sh",
        ".socket",
        ".spec",
        ".toml",
        ".txt",
        ".yaml",
        ".yml",
    ]
)
SOURCE_NAMES = frozenset((".clang-format", ".clang-tidy", ".gitignore", "Makefile", "Vagrantfile"))

# The licences by folder: BPF programs are loaded into the kernel, which grants
# some helpers to GPL-compatible programs only.
DEFAULT_LICENSE = "Apache-2.0"
BPF_LICENSE = "(GPL-2.0-only OR BSD-2-Clause)"
# Headers that BPF C includes too.
SHARED_WITH_BPF = {
    Path("bpf/interface.h"),
    Path("native/src/abi/context.h"),
    Path("native/src/abi/kernel_event.h"),
    Path("native/src/abi/trigger_queue.h"),
    Path("native/src/abi/types.h"),
    Path("native/src/barrier.h"),
}

# Written as expressions so that this file does not match itself.
REGISTRY_HOST = re.compile(
    r"pypi\.org|pythonhosted\.org|deb\.debian\.org|security\.debian\.org|registry\.npmjs|docker\.io"
    r"|ghcr\.io|quay\.io|gcr\.io|crates\.io|\.pkg\.dev\b|proxy\.golang\.org"
)
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:(?:work|farm|root|tmp/b(?:s|ash_jobs))\b|(?:home|Users)/\w)"
)
UNFINISHED = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X])\b")

LARGEST_SOURCE_BYTES = 256 * 1024


def tracked(repository: Path) -> list[Path]:
    """Every tracked file that is in the tree, relative to its root."""
    # As root under sudo the tree belongs to somebody else, which git would refuse.
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = [Path(name) for name in listing.split("\0") if name]
    return [path for path in paths if (repository / path).is_file()]


def is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def is_data(path: Path) -> bool:
    return path.is_relative_to("tests/data") or is_vendored(path)


def is_vendored(path: Path) -> bool:
    """As published by others; what is ours beside it says from where."""
    return path.is_relative_to("formats/opentelemetry") and path.suffix == ".proto"


def texts(repository: Path) -> dict[Path, str]:
    return {
        path: (repository / path).read_text("utf-8")
        for path in tracked(repository)
        if not is_data(path)
    }


def sources(repository: Path) -> dict[Path, str]:
    return {
        path: text
        for path, text in texts(repository).items()
        if path.suffix in SOURCE_SUFFIXES or path.name in SOURCE_NAMES or text.startswith("#!")
    }


def matches(pattern: re.Pattern[str], files: dict[Path, str]) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in files.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_every_source_names_its_licence(repository: Path) -> None:
    found = sources(repository)
    assert Path("tests/unit/test_repository.py") in found
    wrong = []
    for path, text in found.items():
        in_kernel = path.name.endswith(".bpf.c") or (
            path.is_relative_to("bpf") and path.suffix in (".c", ".h")
        )
        licence = BPF_LICENSE if in_kernel else DEFAULT_LICENSE
        if path in SHARED_WITH_BPF:
            licence = f"{BPF_LICENSE} OR {DEFAULT_LICENSE}"
        wanted = f"SPDX-License-Identifier: {licence}"
        # The first line, or the second after a script's interpreter.
        head = text.splitlines()[:2]
        named = any(line.strip(" #/*") == wanted for line in head)
        if not named:
            wrong.append(f"{path}: want {wanted!r} in its first two lines")
    assert wrong == []


def test_no_registry_host_is_named(repository: Path) -> None:
    assert matches(REGISTRY_HOST, texts(repository)) == []


def test_no_path_of_one_machine_is_named(repository: Path) -> None:
    assert matches(MACHINE_PATH, texts(repository)) == []


def test_nothing_is_marked_unfinished(repository: Path) -> None:
    assert matches(UNFINISHED, texts(repository)) == []


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (REGISTRY_HOST, "index-url = https://py" + "pi.org/simple"),
        (REGISTRY_HOST, "FROM docker." + "io/library/debian:12"),
        (MACHINE_PATH, "see /wo" + "rk/notes.md"),
        (MACHINE_PATH, "cd /ro" + "ot/.cache"),
        (MACHINE_PATH, 'open("/ho' + 'me/ann/x")'),
        (UNFINISHED, "/* FIX" + "ME: later */"),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern: re.Pattern[str], line: str) -> None:
    assert matches(pattern, {Path("a"): line}) == [f"a:1: {line}"]


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (MACHINE_PATH, "the docs folder framework/root/x"),
        (MACHINE_PATH, "/run/backsight/node.sock"),
        (REGISTRY_HOST, "https://www.apache.org/licenses/"),
    ],
)
def test_the_patterns_leave_the_rest_alone(pattern: re.Pattern[str], line: str) -> None:
    assert matches(pattern, {Path("a"): line}) == []


def test_texts_end_with_a_newline_and_have_no_trailing_blanks(repository: Path) -> None:
    wrong = [
        f"{path}:{number}"
        for path, text in texts(repository).items()
        for number, line in enumerate(text.split("\n"), 1)
        if line != line.rstrip()
    ]
    wrong += [str(path) for path, text in texts(repository).items() if text and text[-1] != "\n"]
    assert wrong == []


def test_scripts_can_be_run_and_only_they(repository: Path) -> None:
    wrong = [
        f"{path}: {'a script, not executable' if is_script(repository / path) else 'executable, no script'}"
        for path in tracked(repository)
        if is_script(repository / path) != os.access(repository / path, os.X_OK)
    ]
    assert wrong == []


def test_no_source_is_large(repository: Path) -> None:
    sizes = {
        path: (repository / path).stat().st_size
        for path in tracked(repository)
        if not is_data(path)
    }
    assert {path: size for path, size in sizes.items() if size > LARGEST_SOURCE_BYTES} == {}


def test_recorded_data_has_its_licence_beside_it(repository: Path) -> None:
    folders = {
        Path("formats/opentelemetry") if is_vendored(path) else path.parent
        for path in tracked(repository)
        if is_data(path)
    }
    # What we made ourselves.
    folders -= {Path("tests/data", name) for name in (".", "config", "frozen", "fuzz")}
    assert folders
    assert [folder for folder in folders if not (repository / folder / "LICENSE").is_file()] == []


def test_debian_copyright_names_whoever_has_a_licence_here(repository: Path) -> None:
    copyright_ = (repository / "packaging/debian/copyright").read_text("utf-8")
    stanzas = dict(re.findall(r"^Files: (.+)\nCopyright: (.+)$", copyright_, re.MULTILINE))
    licences = [path for path in tracked(repository) if path.name == "LICENSE"]
    others = [path for path in licences if path.parent != Path()]
    assert {f"{path.parent}/*" for path in others} <= stanzas.keys()
    for path in others:
        holders = re.findall(
            r"^Copyright \(c\) (.+)$", (repository / path).read_text(), re.MULTILINE
        )
        holders += [
            re.sub(r"Copyright (\d+), ", r"\1 ", line)
            for source in (repository / path.parent).rglob("*.proto")
            for line in re.findall(r"^// (Copyright .+)$", source.read_text(), re.MULTILINE)
        ]
        assert set(holders) == {stanzas[f"{path.parent}/*"]}, path


def test_python_paths_are_the_same_everywhere(repository: Path) -> None:
    makefile = (repository / "Makefile").read_text("utf-8")
    exported = re.search(r"^export PYTHONPATH := (.*)$", makefile, re.MULTILINE)
    assert exported is not None
    from_make = [
        entry.removeprefix("$(CURDIR)").strip("/") or "." for entry in exported[1].split(":")
    ]
    project = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))
    assert from_make == project["tool"]["pytest"]["ini_options"]["pythonpath"]


def test_tools_from_outside_debian_are_pinned(repository: Path) -> None:
    lines = (repository / "scripts/lint-requirements.txt").read_text("utf-8").splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    assert requirements
    assert [line for line in requirements if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []


def test_packages_are_named_once(repository: Path) -> None:
    lines = (repository / "scripts/packages.txt").read_text("utf-8").splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert len(packages) == len(set(packages))
    assert [name for name in packages if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", name)] == []


def test_packages_have_the_version_of_the_build(repository: Path) -> None:
    def found(pattern: str, path: str) -> str:
        match = re.search(pattern, (repository / path).read_text("utf-8"), re.MULTILINE)
        assert match is not None, path
        return match[1]

    version = found(r"^  version: '(.+)',$", "meson.build")
    assert found(r"^backsight \((.+)-\d+\)", "packaging/debian/changelog") == version
    spec = "packaging/rpm/backsight.spec"
    assert found(r"^Version: +(.+)$", spec) == version
    assert found(r"^%changelog\n\* .* - (.+)-\d+$", spec) == version


def test_setup_without_anything_missing_needs_no_rights(repository: Path) -> None:
    """Whoever runs the tests has the packages, so set-up must end at once and silently."""
    run = subprocess.run(
        [repository / "scripts/setup"], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("df", "where"),
    [
        ("echo Avail; echo 100000000000", "/dev/shm"),
        ("echo Avail; echo 1000", "/tmp"),
        # What df does where /dev/shm is no tmpfs.
        ("echo 'df: no file systems processed' >&2; exit 1", "/tmp"),
    ],
)
def test_temporary_files_are_in_memory_only_where_there_is_enough(
    repository: Path, tmp_path: Path, df: str, where: str
) -> None:
    stub = tmp_path / "df"
    stub.write_text(f"#!/bin/sh\n{df}\n")
    stub.chmod(0o755)
    run = subprocess.run(
        [repository / "scripts/with-tmp", "--memory", "sh", "-c", "dirname $TMPDIR"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, f"{where}\n", "")


SKIPPING_TEST = """
import pytest

@pytest.mark.bpf
def test_probe() -> None:
    pytest.skip("this kernel has no BTF")
"""


@pytest.mark.parametrize(("required", "outcome"), [("0", "1 skipped"), ("1", "1 failed")])
def test_a_skipped_ebpf_test_fails_where_ebpf_is_required(
    repository: Path, tmp_path: Path, required: str, outcome: str
) -> None:
    (tmp_path / "conftest.py").write_text((repository / "tests/conftest.py").read_text("utf-8"))
    (tmp_path / "test_probe.py").write_text(SKIPPING_TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = bpf\n")
    run = subprocess.run(
        ["/usr/bin/python3", "-m", "pytest", "-p", "no:cacheprovider", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "BACKSIGHT_REQUIRE_EBPF": required},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome in run.stdout.splitlines()[-1]
    assert (run.returncode == 0) == (required == "0")
