# SPDX-License-Identifier: Apache-2.0
"""Traces that other people's tools read."""
