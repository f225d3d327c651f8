# SPDX-License-Identifier: Apache-2.0
"""What is secret in a configuration stands in no message about it."""

from __future__ import annotations

import pytest

from coordinator.otlp_export.exporter import _Receiver
from runtime.printable import without_secrets
from runtime.schema import ConfigError, loads
from runtime.settings.coordinator import ExportSettings, Settings

SECRET = "s3cr3t-of-ours"
# Of it: enough to be of use to somebody.
PART = "cr3t"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # A value, that somehow got a character which is not allowed.
        (
            f'export: {{headers: {{Authorization: "Bearer {SECRET}\\u00e9"}}}}',
            (
                "c:1: export.headers.Authorization: a secret of 22 characters, wrong from character 22 on;"
                " allowed: printable ASCII"
            ),
        ),
        (
            "export: {headers: {Authorization: 73737373}}",
            "c:1: export.headers.Authorization: a secret of 8 characters; allowed: printable ASCII, in quotes",
        ),
        # As OpenTelemetry's variables have it.
        (
            f"export: {{headers: {{Authorization=Bearer {SECRET}}}}}",
            (
                "c:1: export.headers (a name): a secret of 35 characters, wrong from character 14 on;"
                " allowed: letters, digits and _.-"
            ),
        ),
        (
            f"export: {{headers: {{a={SECRET}, a={SECRET}}}}}",
            "c:1: export.headers (a name): stands in line 1 already",
        ),
        (
            f"export: {{headers: 'Authorization: Bearer {SECRET}'}}",
            "c:1: export.headers: a secret of 36 characters; allowed: a section of names",
        ),
        (
            f"export: {{headers: {{Authorization: [{SECRET}]}}}}",
            "c:1: export.headers.Authorization: a list; allowed: printable ASCII",
        ),
        (
            f"export: https://us:{SECRET}@collector",
            "c:1: export: a secret of 35 characters; allowed: a section with endpoint, ",
        ),
        (f"Authorization {SECRET}", "c:1: a secret of 28 characters; allowed: a section with "),
        # Not in quotes, and so an alias.
        (
            f"export: {{headers: {{Authorization: *{SECRET}}}}}",
            "c:1: no valid YAML: found undefined alias '…'",
        ),
        # URLs.
        (
            f"export: {{endpoint: 'https://us:{SECRET}@collector:1/p?key={SECRET}'}}",
            "c:1: export.endpoint: https://…@collector:1/p?…; allowed: a URL",
        ),
        (
            f"export: {{endpoint: 'https://collector/v1?key={SECRET}'}}",
            "c:1: export.endpoint: https://collector/v1?… has a path, ",
        ),
        (
            f"export: {{endpoint: 'http://collector/v1?key={SECRET}'}}",
            "c:1: export.endpoint: http://collector/v1?… is in clear text",
        ),
        (
            f"export: {{endpoint: 'https://collector:0/v1?key={SECRET}'}}",
            "c:1: export.endpoint: https://collector:0/v1?…; allowed: a port from 1",
        ),
        (
            f"export: {{endpoint: 'https://a..b/v1?key={SECRET}'}}",
            "c:1: export.endpoint: https://a..b/v1?…; allowed: a URL with",
        ),
        (
            "priority_seed: 73737373737373737373737373",
            "c:1: priority_seed: a secret of 26 characters; allowed: a whole number from 1 to",
        ),
    ],
)
def test_a_message_shows_no_secret(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loads(text, Settings, "c")
    assert any(problem.startswith(said) for problem in refused.value.problems)
    assert not any(PART in problem or "7373" in problem for problem in refused.value.problems)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://collector:4318/v1/traces", "https://collector:4318/v1/traces"),
        ("https://[::1]:4318", "https://[::1]:4318"),
        ("https://collector?key=s3cr3t", "https://collector?…"),
        ("https://collector#s3cr3t", "https://collector?…"),
        ("https://us:s3cr3t@collector", "https://…@collector"),
        ("https://us:s3cr@3t@collector", "https://…@collector"),
        ("us:s3cr3t@collector:4317", "…@collector:4317"),
        # With what ends a host in them.
        ("https://us:s3?cr3t@collector", "https://…"),
        ("https://us:s3/cr3t@collector", "https://…"),
        ("https://us:s3#cr3t@collector?to=a@b", "https://…"),
    ],
)
def test_a_url_is_shown_without_what_is_secret_in_it(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_who_exports_names_no_secret() -> None:
    endpoint = "http://127.0.0.1:9/v1?key=s3cr3t"
    receiver = _Receiver(ExportSettings(endpoint, protocol="http/protobuf"))
    assert receiver.endpoint == "http://127.0.0.1:9/v1?…"
    receiver.close()
