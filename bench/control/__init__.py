# SPDX-License-Identifier: Apache-2.0
"""``make bench-control``: what a coordinator costs, and how fast it is, under a fleet of nodes."""
