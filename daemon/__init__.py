# SPDX-License-Identifier: Apache-2.0
"""What both daemons are made of beside their cores: command line, log, HTTP, metrics."""

VERSION = "0.1.0"
"""Of Backsight, as in meson.build."""
