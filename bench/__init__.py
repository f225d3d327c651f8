# SPDX-License-Identifier: Apache-2.0
"""What tracing costs, measured (docs/benchmarks.md)."""
