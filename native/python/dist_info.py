# SPDX-License-Identifier: Apache-2.0
"""What says that the Python package is installed: ``dist_info.py PYPROJECT VERSION METADATA ENTRY_POINTS``.

Python finds a package's version by it, and OpenTelemetry our distro. A wheel gets its own from
meson-python. Formats: packaging.python.org, core metadata and entry points.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

Project = dict[str, Any]


def metadata(project: Project, version: str) -> str:
    """METADATA, without what only an index of packages shows."""
    extras = project["optional-dependencies"]
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {project['name']}",
        f"Version: {version}",
        f"Summary: {project['description']}",
        f"License: {project['license']}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {needed}" for needed in project["dependencies"]),
    ]
    for extra, dependencies in extras.items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {needed}; extra == "{extra}"' for needed in dependencies]
    return "\n".join(lines) + "\n"


def entry_points(project: Project) -> str:
    """The file entry_points.txt."""
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {what}\n" for name, what in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    return "\n".join(sections)


def main() -> None:
    """Write both."""
    pyproject, version, metadata_file, entry_points_file = sys.argv[1:]
    project = tomllib.loads(Path(pyproject).read_text(encoding="utf-8"))["project"]
    Path(metadata_file).write_text(metadata(project, version), encoding="utf-8")
    Path(entry_points_file).write_text(entry_points(project), encoding="utf-8")


if __name__ == "__main__":
    main()
