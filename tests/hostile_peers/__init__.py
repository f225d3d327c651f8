# SPDX-License-Identifier: Apache-2.0
"""Peers of the coordinator that mean no good, as programs of their own."""
