# SPDX-License-Identifier: Apache-2.0
"""Kernel probes: each is tested by causing what it looks for."""
