# SPDX-License-Identifier: Apache-2.0
"""The live demo: a small shop (``testbed/apps/shop``) on three nodes, with real trouble in it."""
