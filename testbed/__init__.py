# SPDX-License-Identifier: Apache-2.0
"""What tests, demos and benchmarks run on: daemons in network namespaces, databases, services, virtual environments."""
