# SPDX-License-Identifier: Apache-2.0
"""Recorded traffic replayed by real processes on ten nodes."""
