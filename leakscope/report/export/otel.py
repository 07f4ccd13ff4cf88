"""OpenTelemetry metrics as a line of OTLP/JSON, as the collector's ``otlpjsonfile`` receiver reads it.

https://opentelemetry.io/docs/specs/otel/protocol/file-exporter: each line is one message of the protocol in its JSON
encoding, enums as numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

from leakscope import __version__
from leakscope.errors import NotCapableError
from leakscope.report.export.metrics import PREFIX, Metric


def otel(metrics: Iterable[Metric], now_ns: int) -> bytes:
    """The line; ``now_ns``: UTC that the data points carry. Raises NotCapableError without opentelemetry-proto."""
    try:
        from google.protobuf.json_format import MessageToJson
        from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
    except ImportError:
        raise NotCapableError("--to otel needs opentelemetry-proto: pip install 'leakscope[otel]'") from None

    data = MetricsData()
    resource = data.resource_metrics.add()
    _attribute(resource.resource.attributes, "service.name", PREFIX)
    scope = resource.scope_metrics.add()
    scope.scope.name, scope.scope.version = PREFIX, __version__
    for metric in metrics:
        if not metric.samples:
            continue
        objects = ".objects" if metric.unit == "{object}" else ""
        one = scope.metrics.add(name=f"{PREFIX}.{metric.name}{objects}", description=metric.help, unit=metric.unit)
        for labels, value in metric.samples:
            point = one.gauge.data_points.add(time_unix_nano=now_ns, as_double=value)
            for key, text in zip(metric.labels, labels, strict=True):
                _attribute(point.attributes, key, text)
    text = MessageToJson(data, indent=None, use_integers_for_enums=True)
    return text.encode() + b"\n"


def _attribute(attributes: object, key: str, text: str) -> None:
    one = attributes.add(key=key)  # type: ignore[attr-defined]
    one.value.string_value = text
