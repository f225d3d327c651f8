# SPDX-License-Identifier: Apache-2.0
"""What Python reads of what others send, under a fuzzer that follows its branches."""
