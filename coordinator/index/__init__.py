# SPDX-License-Identifier: Apache-2.0
"""What searches look at, so that they need to read no trace: a file beside the store.

It says nothing that the store does not, and is made anew when it is lost.
"""
