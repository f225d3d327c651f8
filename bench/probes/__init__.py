# SPDX-License-Identifier: Apache-2.0
"""What the kernel probes cost: ``make bench-probes``."""
