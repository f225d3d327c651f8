# SPDX-License-Identifier: Apache-2.0
"""The demo: recorded traffic replayed by real processes on ten nodes."""
