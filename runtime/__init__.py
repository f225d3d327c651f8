# SPDX-License-Identifier: Apache-2.0
"""What the daemons share beside their cores: configuration, command line, log, HTTP, metrics."""

VERSION = "0.1.0"
"""Of Backsight, as in meson.build."""
