# SPDX-License-Identifier: Apache-2.0
"""Independent judge of what the coordinator collected from a replay; see README.md beside this file."""
