"""A round as OpenTelemetry's spans: one for the round, below it each node, below that what the node did.

Ids follow from the swarm, the round and the node, so that a round that is sent twice is the same spans.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from protocol.v1 import status_pb2 as pb

TRACE_BYTES, SPAN_BYTES = 16, 8

Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What took from `begin` to `end`, in seconds since 1970."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes  # empty for the round itself
    name: str
    begin: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    trouble: str = ""  # why it did not go as planned, in words


def spans_of(
    told: pb.GetRoundResponse, *, swarm_id: str, run_name: str, closed_at: float
) -> Iterator[Span]:
    """A closed round. `closed_at` is about when, where the coordinator does not know it exactly."""
    summary = told.summary
    key = f"{swarm_id} {summary.round} {summary.incarnation}"
    trace_id = blake3(key.encode()).digest(length=TRACE_BYTES)
    seconds = told.seconds if told.HasField("seconds") else summary.seconds
    is_exact = told.HasField("opened_unix_seconds")
    opened = told.opened_unix_seconds if is_exact else closed_at - seconds
    root_id = _id_of(trace_id, "round")
    yield Span(
        trace_id=trace_id,
        span_id=root_id,
        parent_id=b"",
        name="round",
        begin=opened,
        end=opened + seconds,
        attributes={
            "atoll.run": run_name,
            "atoll.swarm_id": swarm_id,
            "atoll.round": summary.round,
            "atoll.incarnation": summary.incarnation,
            "atoll.tokens": summary.tokens,
            "atoll.loss": summary.loss,
            "atoll.participants": summary.num_participants,
            "atoll.contributors": summary.num_contributors,
            "atoll.slices": summary.num_slices,
            "atoll.void_slices": summary.num_slices - summary.num_committed_slices,
            "atoll.reason": summary.reason,
            "atoll.waited_for": told.waited_for,
            "atoll.times_are_exact": is_exact,
        },
        trouble="" if summary.num_committed_slices else summary.reason or "no slice is committed",
    )
    committed = told.committed_seconds if told.HasField("committed_seconds") else None
    for node in told.nodes:
        if stages := tuple(stages_of(node, committed)):  # else nothing is known of when
            yield from _spans_of_node(node, stages, trace_id, root_id, opened)


def _spans_of_node(
    node: pb.NodeInRound,
    stages: Sequence[tuple[str, float, float]],
    trace_id: bytes,
    round_id: bytes,
    opened: float,
) -> Iterator[Span]:
    """What a node did in the round with this span, and below it each stage of that."""
    name = node.node_name or node.node_id[:8]
    node_id = _id_of(trace_id, node.node_id)
    is_late = bool(node.inner_steps) and not node.HasField("trained_seconds")
    yield Span(
        trace_id=trace_id,
        span_id=node_id,
        parent_id=round_id,
        name=name,
        begin=opened,
        end=opened + max(end for _, _, end in stages),
        attributes={
            "atoll.node": name,
            "atoll.node_id": node.node_id,
            "atoll.inner_steps": node.trained_inner_steps,
            "atoll.inner_steps_asked": node.inner_steps,
            "atoll.tokens": node.trained_tokens,
            "atoll.slices_reduced": node.num_slices_reduced,
            "atoll.contributions_left_out": node.screening.num_left_out,
            "atoll.contributions_clipped": node.screening.num_clipped,
        },
        trouble="it did not finish training in time" if is_late else "",
    )
    for stage, begin, end in stages:
        yield Span(
            trace_id=trace_id,
            span_id=_id_of(trace_id, f"{node.node_id} {stage}"),
            parent_id=node_id,
            name=stage,
            begin=opened + begin,
            end=opened + end,
        )


def stages_of(
    node: pb.NodeInRound, committed_seconds: float | None
) -> Iterator[tuple[str, float, float]]:
    """What a node did from when to when, in seconds since the plan; only what is known to be over."""
    at = 0.0
    for stage, field_name, is_its in (
        ("train", "trained_seconds", bool(node.inner_steps)),
        ("send and reduce", "reduced_seconds", bool(node.num_slices_reduced)),
        ("send and receive", "held_seconds", True),
        ("apply", "applied_seconds", True),
    ):
        if not is_its or not node.HasField(field_name):  # type: ignore[arg-type] # a name from above
            continue
        if stage == "apply":
            at = max(at, committed_seconds or 0.0)
        end = max(at, float(getattr(node, field_name)))
        yield stage, at, end
        at = end


def _id_of(trace_id: bytes, path: str) -> bytes:
    return blake3(trace_id + path.encode()).digest(length=SPAN_BYTES)


def request_of(spans: Iterable[Span], *, run_name: str, version: str) -> bytes:
    """The body of OTLP's request for traces, in protocol buffers."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
    from opentelemetry.proto.common.v1 import common_pb2
    from opentelemetry.proto.resource.v1 import resource_pb2
    from opentelemetry.proto.trace.v1 import trace_pb2

    def any_value(value: Value) -> common_pb2.AnyValue:
        match value:
            case bool():  # before int, which it is too
                return common_pb2.AnyValue(bool_value=value)
            case int():
                return common_pb2.AnyValue(int_value=value)
            case float():
                return common_pb2.AnyValue(double_value=value)
        return common_pb2.AnyValue(string_value=value)

    def listed(attributes: Mapping[str, Value]) -> list[common_pb2.KeyValue]:
        return [
            common_pb2.KeyValue(key=key, value=any_value(value))
            for key, value in attributes.items()
        ]

    told = [
        trace_pb2.Span(
            trace_id=span.trace_id,
            span_id=span.span_id,
            parent_span_id=span.parent_id,
            name=span.name,
            kind=trace_pb2.Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=round(span.begin * 1e9),
            end_time_unix_nano=round(span.end * 1e9),
            attributes=listed(span.attributes),
            status=trace_pb2.Status(code=trace_pb2.Status.STATUS_CODE_ERROR, message=span.trouble)
            if span.trouble
            else None,
        )
        for span in spans
    ]
    scope = common_pb2.InstrumentationScope(name="atoll", version=version)
    resource = resource_pb2.Resource(
        attributes=listed({"service.name": "atoll", "service.instance.id": run_name})
    )
    request = trace_service_pb2.ExportTraceServiceRequest(
        resource_spans=[
            trace_pb2.ResourceSpans(
                resource=resource,
                scope_spans=[trace_pb2.ScopeSpans(scope=scope, spans=told)],
            )
        ]
    )
    body: bytes = request.SerializeToString()
    return body


def refused_by(answer: bytes) -> tuple[int, str]:
    """How many spans a receiver says that it has not taken, and why; raises DecodeError for other bytes."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    told = trace_service_pb2.ExportTraceServiceResponse.FromString(answer).partial_success
    return told.rejected_spans, told.error_message
