# SPDX-License-Identifier: Apache-2.0
"""Debian's cloud kernels, of this release and of its backports, as apt offers them.

Nothing is installed, and apt's own lists stay as they are: what is asked of the backports is
kept in a directory of the build, and so are the kernels.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_SOURCES = Path("/etc/apt")
_PACKAGE = re.compile(r"linux-image-(\d+\.\d+)\.\S+-cloud-amd64")


class KernelsError(RuntimeError):
    """No kernel can be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that can be booted."""

    package: str
    image: Path


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode:
        raise KernelsError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _deb822() -> Iterator[str]:
    """The paragraphs of this machine's own sources that have suites."""
    for path in sorted((_SOURCES / "sources.list.d").glob("*.sources")):
        yield from (part for part in re.split(r"\n\s*\n", path.read_text()) if "Suites:" in part)
    # deb [options] URI SUITE COMPONENTS
    for path in (_SOURCES / "sources.list", *(_SOURCES / "sources.list.d").glob("*.list")):
        for line in path.read_text().splitlines() if path.exists() else ():
            if found := re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s+(.+)", line):
                yield "Types: deb\nURIs: {}\nSuites: {}\nComponents: {}".format(*found.groups())


def backports(paragraphs: Iterable[str], release: str) -> str:
    """The source of that release's backports, from where the release itself comes."""
    for paragraph in paragraphs:
        suites = re.search(r"^Suites:(.*)$", paragraph, re.MULTILINE)
        if suites and release in suites.group(1).split():
            return re.sub(
                r"^Suites:.*$", f"Suites: {release}-backports", paragraph, flags=re.MULTILINE
            )
    raise KernelsError(f"apt's sources have no {release}")


class Apt:
    """apt with the backports too, and with a state of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        sources = directory / "sources"
        for path in (sources, directory / "lists/partial", directory / "cache/archives/partial"):
            path.mkdir(parents=True, exist_ok=True)
        release = _run("sh", "-c", ". /etc/os-release; echo $VERSION_CODENAME").strip()
        paragraphs = list(_deb822())
        text = "\n\n".join([*paragraphs, backports(paragraphs, release)])
        (sources / "all.sources").write_text(text + "\n")
        self._options = [
            "--option=Dir::Etc::SourceList=/dev/null",
            f"--option=Dir::Etc::SourceParts={sources}",
            f"--option=Dir::State::Lists={directory / 'lists'}",
            f"--option=Dir::Cache={directory / 'cache'}",
            # Else it would look for a user of its own, who may not come here.
            "--option=APT::Sandbox::User=root",
        ]

    def update(self) -> None:
        _run("apt-get", *self._options, "update")

    def search(self) -> list[str]:
        listed = _run("apt-cache", *self._options, "search", "--names-only", "^linux-image-")
        return [line.split()[0] for line in listed.splitlines()]

    def download(self, package: str) -> Path:
        """Its file."""
        _run("apt-get", *self._options, "download", package, cwd=self._directory)
        (found,) = self._directory.glob(f"{package}_*.deb")
        return found


def _version(package: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", package)))


def newest_of_each(packages: Iterable[str]) -> list[str]:
    """Of each series (6.1, 6.12) the last one."""
    series: dict[str, str] = {}
    for package in packages:
        found = _PACKAGE.fullmatch(package)
        if found is None or found.group(1) == package.split("-")[2]:
            continue
        known = series.get(found.group(1))
        if known is None or _version(package) > _version(known):
            series[found.group(1)] = package
    return [series[name] for name in sorted(series, key=_version)]


def kernels(directory: Path) -> list[Kernel]:
    """Fetch them; those that are there are not fetched again."""
    apt = Apt(directory)
    apt.update()
    found = []
    for package in newest_of_each(apt.search()):
        unpacked = directory / package
        if not unpacked.exists():
            file = apt.download(package)
            partial = directory / f"{package}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _run("dpkg-deb", "--extract", str(file), str(partial))
            file.unlink()
            # What is not booted: hundreds of megabytes of modules.
            shutil.rmtree(partial / "lib", ignore_errors=True)
            shutil.rmtree(partial / "usr", ignore_errors=True)
            partial.rename(unpacked)
        (image,) = (unpacked / "boot").glob("vmlinuz-*")
        found.append(Kernel(package, image))
    if not found:
        raise KernelsError("apt offers no kernel of Debian's for clouds")
    return found
