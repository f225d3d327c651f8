# SPDX-License-Identifier: Apache-2.0
"""``make hostile``: hostile processes beside honest ones, and what became of the honest ones."""
