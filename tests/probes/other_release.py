# SPDX-License-Identifier: Apache-2.0
"""A daemon that speaks another version to the node, or to probes: ``other_release.py MODULE ...``."""

from __future__ import annotations

import runpy
import sys

from appliance import probes_packets

probes_packets.VERSION += 1
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
