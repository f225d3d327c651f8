# SPDX-License-Identifier: Apache-2.0
"""What node and coordinator agree on: messages, wire format, hashes."""
