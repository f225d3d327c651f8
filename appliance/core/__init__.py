# SPDX-License-Identifier: Apache-2.0
"""The node's decisions, without IO: events and a clock in, actions out."""
