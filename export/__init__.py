# SPDX-License-Identifier: Apache-2.0
"""Collected traces in the formats of other people's tools, for ``backsightctl`` and the coordinator."""
