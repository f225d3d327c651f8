# SPDX-License-Identifier: Apache-2.0
"""``backsightctl pki``: what is asked of the CA of ctl.pki."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.printable import printable

if TYPE_CHECKING:
    from ctl.pki import Issued


def make_authority(arguments: argparse.Namespace) -> int:
    """``pki init``."""
    # Here and below: no other command shall wait for the library.
    from ctl.pki import CA_DAYS, Authority, Issued

    def make() -> Issued:
        made = Authority.create(
            arguments.directory,
            arguments.domain,
            days=arguments.days or CA_DAYS,
            replace=arguments.replace,
        )
        return Issued(arguments.directory, f"spiffe://{made.domain}", made.expires_at)

    return _said(arguments, make)


def make_coordinator(arguments: argparse.Namespace) -> int:
    """``pki coordinator``."""
    if not arguments.dns and not arguments.ip:
        raise ValueError(
            "pki coordinator: give all names and addresses by which nodes and people call it: --dns"
            " NAME, --ip ADDRESS"
        )
    return _issued(arguments, "coordinator", arguments.dns, arguments.ip, is_server=True)


def make_client(arguments: argparse.Namespace) -> int:
    """``pki node``, ``operator``, ``viewer``."""
    role = arguments.command.partition(" ")[2]
    dns = arguments.dns if role == "node" else []
    return _issued(arguments, f"{role}/{arguments.name}", dns, [], is_server=False)


def _issued(
    arguments: argparse.Namespace,
    path: str,
    dns: list[str],
    addresses: list[str],
    *,
    is_server: bool,
) -> int:
    from ctl.pki import DAYS, Authority

    return _said(
        arguments,
        lambda: Authority(arguments.directory).issue(
            path,
            is_server=is_server,
            dns=dns,
            addresses=addresses,
            days=arguments.days or DAYS,
            replace=arguments.replace,
        ),
    )


def _said(arguments: argparse.Namespace, make: Callable[[], Issued]) -> int:
    """Make it, and say what was made, or why not."""
    from ctl.pki import PkiError

    try:
        made = make()
    except (PkiError, OSError) as error:
        sys.stderr.write(f"backsightctl: {printable(str(error))}\n")
        return 1
    if arguments.json:
        said = {
            "directory": str(made.directory),
            "identity": made.identity,
            "expires": made.expires_at.isoformat(timespec="seconds"),
        }
        print(json.dumps(said))
    else:
        print(f"{made.directory}: {made.identity}, valid until {made.expires_at:%Y-%m-%d}")
    return 0
