# SPDX-License-Identifier: Apache-2.0
"""What programs agree on: messages, wire format, hashes, verdicts, the node's control socket."""
