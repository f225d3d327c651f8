# SPDX-License-Identifier: Apache-2.0
"""Starts ``backsight-probes`` (appliance.probes.program) with as little memory as it needs."""

from __future__ import annotations

import sys

# asyncio takes TLS along where there is any: 4 MiB for what this process never speaks.
sys.modules["ssl"] = None  # type: ignore[assignment]

from appliance.probes.program import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
