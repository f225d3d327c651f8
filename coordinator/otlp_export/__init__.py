# SPDX-License-Identifier: Apache-2.0
"""Traces on their way to an OTLP receiver."""
