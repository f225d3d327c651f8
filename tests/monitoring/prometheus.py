# SPDX-License-Identifier: Apache-2.0
"""A Prometheus of its own, on this machine."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from testbed.daemons import bound
from testbed.topology import Opened

_STOP_TIMEOUT_S = 20.0


class Prometheus(Opened):
    """Entered, it scrapes; ``query`` asks it. It listens on a port of loopback that is free."""

    def __init__(self, directory: Path, port: int, configuration: Mapping[str, Any]) -> None:
        self._directory = directory
        self._url = f"http://127.0.0.1:{port}"
        self._address = f"127.0.0.1:{port}"
        self._configuration = configuration
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        path = self._directory / "prometheus.yml"
        path.write_text(yaml.safe_dump(dict(self._configuration)))
        command = [
            "prometheus",
            f"--config.file={path}",
            f"--storage.tsdb.path={self._directory / 'tsdb'}",
            f"--web.listen-address={self._address}",
        ]
        with (self._directory / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(bound(command, None), stdout=log, stderr=log)
        while not self._is_ready():
            if self._process.poll() is not None:
                said = (self._directory / "prometheus.log").read_text()
                raise RuntimeError(f"prometheus ended at its start:\n{said}")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready") as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def ask(self, path: str, **parameters: str) -> Any:
        """What its API has there."""
        with urllib.request.urlopen(
            f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        ) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that there are of an expression now; HTTPError if it is none."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(_STOP_TIMEOUT_S)
            self._process = None
