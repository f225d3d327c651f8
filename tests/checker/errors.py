# SPDX-License-Identifier: Apache-2.0
"""The checker's one error."""


class BadInput(Exception):
    """A file cannot be used; the message says which, where, and what is allowed. The program exits with status 2."""
