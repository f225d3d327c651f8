# SPDX-License-Identifier: Apache-2.0
"""The coordinator's gRPC: who may connect, and what nodes say."""
