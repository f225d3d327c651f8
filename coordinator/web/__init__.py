# SPDX-License-Identifier: Apache-2.0
"""Jaeger's HTTP API, for Jaeger UI and Grafana: who may ask, and what is answered."""
