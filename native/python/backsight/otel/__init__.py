# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry on Backsight: spans go to the pool of this node instead of over the network.

Without a change of the application, whose environment has ``pip install 'backsight[otel]'``:

    BACKSIGHT_SERVICE=shop OTEL_SERVICE_NAME=shop opentelemetry-instrument python app.py

``opentelemetry-instrument`` finds the distro and configurator of this package by itself;
where others are installed too, choose with ``OTEL_PYTHON_DISTRO=backsight
OTEL_PYTHON_CONFIGURATOR=backsight``. All spans are recorded, whatever the sampler
says, which decides what is exported, and is ``parentbased_always_off`` unless
``OTEL_TRACES_SAMPLER`` says otherwise; a positive decision made here is a trigger.
What else fires is told by ``BACKSIGHT_TRIGGERS`` (``backsight.otel._rules``).

In a program that makes its own tracer provider, call ``install(provider)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backsight.otel._firing import Rules
from backsight.otel._processor import BacksightSpanProcessor
from backsight.otel._propagator import BacksightPropagator, BacksightResponsePropagator
from backsight.otel._rules import RuleSet, from_environment
from backsight.otel._sampler import AlwaysRecordSampler

if TYPE_CHECKING:
    from backsight.otel._distro import BacksightConfigurator, BacksightDistro, install

_OF_THE_DISTRO = ("BacksightConfigurator", "BacksightDistro", "install")


def __getattr__(name: str) -> object:
    # Imported late: OTEL_PROPAGATORS=...,backsight has our propagator imported in the middle
    # of opentelemetry.instrumentation, which the distro needs whole.
    if name in _OF_THE_DISTRO:
        from backsight.otel import _distro

        return getattr(_distro, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AlwaysRecordSampler",
    "BacksightConfigurator",
    "BacksightDistro",
    "BacksightPropagator",
    "BacksightResponsePropagator",
    "BacksightSpanProcessor",
    "RuleSet",
    "Rules",
    "from_environment",
    "install",
]
