# SPDX-License-Identifier: Apache-2.0
"""The coordinator's decisions, without IO: events and a clock in, actions out."""
