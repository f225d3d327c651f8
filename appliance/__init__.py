# SPDX-License-Identifier: Apache-2.0
"""The node appliance: ``python3 -m appliance`` runs ``backsight-node``."""
