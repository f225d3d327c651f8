# SPDX-License-Identifier: Apache-2.0
"""``backsight-node``: keeps what the processes of this machine record, and reports what is triggered."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from appliance import starts
from protocol.versions import OURS, Versions
from runtime.log import Log
from runtime.service_manager import ServiceManager, take_stored_fds
from runtime.settings.node import NODE_PROGRAM


def main(argv: Sequence[str] | None = None, versions: Versions = OURS) -> int:
    """Run until told to end. Exit status 2 for a bad configuration, 1 for other failures."""
    # Until it is heeded: to be ended by it would be to end well, and to lose the pool.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    given = take_stored_fds(os.environ)
    log = Log.of(NODE_PROGRAM)
    with ServiceManager.from_environment(os.environ) as manager:
        stored = starts.take_turn(manager, given, log)
        # Only now, so that a library that cannot be imported makes a failed start: it waits too.
        from appliance.serve import run

        if not run(__doc__.splitlines()[0], argv, manager, stored, versions):
            return 1
        starts.end_well(manager, log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
