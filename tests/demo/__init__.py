# SPDX-License-Identifier: Apache-2.0
"""The live demo: a small shop (``shop``) on three nodes, with real trouble in it."""
