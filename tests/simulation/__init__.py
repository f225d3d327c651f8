# SPDX-License-Identifier: Apache-2.0
"""The cores in virtual time: a model of the data plane, networks and faults."""
