# SPDX-License-Identifier: Apache-2.0
"""Checks configuration files as the daemons would, without being one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

import runtime.settings.coordinator
import runtime.settings.node
from runtime.schema import ConfigError, load

SCHEMAS: dict[str, type[Any]] = {
    "node": runtime.settings.node.Settings,
    "coordinator": runtime.settings.coordinator.Settings,
}


def check(path: Path, kind: str | None) -> list[str]:
    """For which daemons a file is valid; ConfigError names what is wrong with it.

    ``kind`` is the one it is meant for. None: of those that know most of its keys.
    """
    if kind is not None:
        load(path, SCHEMAS[kind])
        return [kind]
    likely = _likely(path)
    valid = []
    for candidate in likely:
        try:
            load(path, SCHEMAS[candidate])
            valid.append(candidate)
        except ConfigError:
            if len(likely) == 1:
                raise
    if not valid:
        raise ConfigError(
            [f"{path}: may be meant for a node or for a coordinator; say which: --kind"]
        )
    return valid


def has_keys(path: Path) -> bool:
    """Whether any is in force in a file that is valid: else all of it may be comments."""
    return bool(_names(path))


def _names(path: Path) -> set[str]:
    root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    keys = root.value if isinstance(root, yaml.MappingNode) else []
    return {name.value for name, _ in keys if isinstance(name, yaml.ScalarNode)}


def _likely(path: Path) -> list[str]:
    """The kinds that know most of a file's keys; all where it cannot be read, to say so."""
    try:
        names = _names(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        # What is wrong is the same for all.
        return [next(iter(SCHEMAS))]
    known = {
        kind: len(names & {field.name for field in dataclasses.fields(schema)})
        for kind, schema in SCHEMAS.items()
    }
    return [kind for kind, count in known.items() if count == max(known.values())]
