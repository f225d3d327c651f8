# SPDX-License-Identifier: Apache-2.0
"""How ``opentelemetry-instrument`` finds all of this; see the package."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from opentelemetry import propagate
from opentelemetry.instrumentation import propagators
from opentelemetry.instrumentation.distro import BaseDistro  # type: ignore[attr-defined]
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk._configuration import _OTelSDKConfigurator
from opentelemetry.sdk.trace.sampling import DEFAULT_OFF, DEFAULT_ON
from opentelemetry.trace import get_tracer_provider

from backsight.otel import _hooks
from backsight.otel._firing import Rules
from backsight.otel._processor import BacksightSpanProcessor
from backsight.otel._propagator import (
    BacksightPropagator,
    BacksightResponsePropagator,
    Current,
    propagates,
)
from backsight.otel._rules import from_environment
from backsight.otel._sampler import AlwaysRecordSampler

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import Sampler

_log = logging.getLogger("backsight")

_DEFAULTS = {
    # Nothing leaves the node but what is triggered, unless somebody asks for more.
    "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    "OTEL_TRACES_EXPORTER": "none",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_LOGS_EXPORTER": "none",
}


def install(provider: TracerProvider, rules: Rules | None = None) -> BacksightSpanProcessor:
    """Have a tracer provider of the SDK write all spans to the pool of this node.

    What ``opentelemetry-instrument`` does by itself with this package installed. Call it before
    the first tracer is made, since tracers keep the sampler of their beginning.

    The provider's sampler decides what is exported and triggered as ``sampled``. That of a
    provider of which nobody chose one would be the SDK's ``parentbased_always_on``, and all
    would be collected: it becomes ``parentbased_always_off``, unless OTEL_TRACES_SAMPLER
    says otherwise. Who wants all gives the provider a ``ParentBased(ALWAYS_ON)``.
    """
    if rules is None:
        rules = Rules(from_environment(os.environ, lambda text: _log.warning("%s", text)))
    processor = BacksightSpanProcessor(rules)
    sampler = DEFAULT_OFF if _is_default(provider.sampler) else provider.sampler
    provider.sampler = AlwaysRecordSampler(sampler)
    provider.add_span_processor(processor)
    Current.processor = processor
    # Not by OTEL_PROPAGATORS: who reads it may have been imported before us.
    if not propagates(propagate.get_global_textmap()):
        propagate.set_global_textmap(
            CompositePropagator([propagate.get_global_textmap(), BacksightPropagator()])
        )
    propagators.set_global_response_propagator(  # type: ignore[no-untyped-call]
        BacksightResponsePropagator(propagators.get_global_response_propagator())  # type: ignore[no-untyped-call]
    )
    return processor


def _is_default(sampler: Sampler) -> bool:
    """Whether nobody chose it."""
    # With OTEL_CONFIG_FILE, which does without the environment's.
    declared = sys.modules.get("opentelemetry.configuration._tracer_provider")
    if declared is not None and sampler is getattr(declared, "_DEFAULT_SAMPLER", None):
        return True
    return sampler is DEFAULT_ON and not os.environ.get("OTEL_TRACES_SAMPLER")


class BacksightConfigurator(_OTelSDKConfigurator):
    """The SDK's own, and then ours on top of whatever it made."""

    def _configure(self, **kwargs: Any) -> None:  # noqa: ANN401 # the SDK's
        super()._configure(**kwargs)  # type: ignore[no-untyped-call]
        provider = get_tracer_provider()
        if hasattr(provider, "add_span_processor"):
            install(provider)  # type: ignore[arg-type]


class BacksightDistro(BaseDistro):  # type: ignore[misc]
    """The environment, where it says nothing else, and hooks for instrumentations."""

    def _configure(self, **kwargs: Any) -> None:  # noqa: ANN401 # the SDK's
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        # What the node calls this process, too.
        service = os.environ.get("OTEL_SERVICE_NAME")
        if service:
            os.environ.setdefault("BACKSIGHT_SERVICE", service)

    def load_instrumentor(self, entry_point: EntryPoint, **kwargs: Any) -> None:  # noqa: ANN401
        """As the base does, with what we want to know of responses."""
        # Before the instrumentation's own patches, so that ours are inside.
        _hooks.patch(entry_point.name)
        super().load_instrumentor(
            entry_point, **{**_hooks.instrumentor_arguments(entry_point.name), **kwargs}
        )
