# SPDX-License-Identifier: Apache-2.0
"""What cores count with. Without I/O, and known to both."""
