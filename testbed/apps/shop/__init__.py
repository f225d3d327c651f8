# SPDX-License-Identifier: Apache-2.0
"""A small shop, as anybody might write one: it knows nothing of tracing."""
