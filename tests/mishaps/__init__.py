# SPDX-License-Identifier: Apache-2.0
"""``make demo-probes``: the shop of the demo with probes, and what breaks below it, for real."""
