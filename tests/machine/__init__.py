# SPDX-License-Identifier: Apache-2.0
"""Symptoms of the machine that its counters tell, each caused for real."""
