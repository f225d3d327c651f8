# SPDX-License-Identifier: Apache-2.0
"""What is left of a trace when its trigger comes late, by what its writers know that they wrote."""
