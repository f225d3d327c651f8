# SPDX-License-Identifier: Apache-2.0
"""A daemon of another release, as its peers see it: with other versions of the protocol than ours.

    /usr/bin/python3 -m tests.cluster.release FILE appliance --config node.yaml

FILE has the oldest and the newest version, and the features: ``3 4 0``. It is read at each start.
"""

from __future__ import annotations

import sys
from pathlib import Path

import appliance.__main__
import coordinator.__main__
from protocol.versions import Feature, Versions
from testbed.topology import PYTHON, Coordinator, Daemon, Node

_MAINS = {"appliance": appliance.__main__.main, "coordinator": coordinator.__main__.main}


class _Release(Daemon):
    """Mixed into a daemon."""

    versions: Versions

    def command(self) -> list[str]:
        self._write_versions()
        _, _, *rest = super().command()
        return [PYTHON, "-m", "tests.cluster.release", str(self._versions_path), *rest]

    def upgrade(self, versions: Versions) -> None:
        """Replace it by another release, which goes on with what the holder kept."""
        self.versions = versions
        self._write_versions()
        self.kill_daemon()

    def _write_versions(self) -> None:
        said = (self.versions.oldest, self.versions.newest, int(self.versions.features))
        self._versions_path.write_text(" ".join(map(str, said)))

    @property
    def _versions_path(self) -> Path:
        return self.directory / f"{self.name}.versions"


class OtherCoordinator(_Release, Coordinator):
    """A coordinator of another release."""


class OtherNode(_Release, Node):
    """A node of another release."""


def main() -> int:
    versions_path, module, *arguments = sys.argv[1:]
    oldest, newest, features = map(int, Path(versions_path).read_text().split())
    return _MAINS[module](arguments, Versions(oldest, newest, Feature(features)))


if __name__ == "__main__":
    sys.exit(main())
