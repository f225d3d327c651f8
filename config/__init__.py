# SPDX-License-Identifier: Apache-2.0
"""Strict YAML configuration, described by dataclasses; for both daemons."""
