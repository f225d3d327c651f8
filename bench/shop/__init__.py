# SPDX-License-Identifier: Apache-2.0
"""``make bench-shop``: what Backsight and a Collector with tail sampling cost beside the same shop."""
