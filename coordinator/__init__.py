# SPDX-License-Identifier: Apache-2.0
"""The coordinator: ``python3 -m coordinator`` runs ``backsight-coordinator``."""
