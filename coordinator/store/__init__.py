# SPDX-License-Identifier: Apache-2.0
"""Where the coordinator keeps what is durable: one writer, any number of readers."""
