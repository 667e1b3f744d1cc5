"""What stands in for Jaeger where its image cannot be had: OTLP/gRPC in, and two paths of Jaeger's HTTP API out.

Runs in a container of Weir's own image, which has the receiver. Traces are in memory and go with it.
"""

import json
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from weir.testing.otlp import OtlpReceiver, ReceivedSpan

OTLP_PORT, QUERY_PORT, HEALTH_PORT = 4317, 16686, 13133


def jaeger_json(trace_id: str, spans: list[ReceivedSpan]) -> dict[str, object]:
    """A trace in the form of Jaeger's `GET /api/traces/ID`, without tags, logs and links."""
    processes = {name: {"serviceName": name} for name in sorted({span.service for span in spans})}
    shown = [
        {
            "traceID": trace_id,
            "spanID": span.span_id,
            "operationName": span.name,
            "references": [{"refType": "CHILD_OF", "spanID": span.parent_id}] if span.parent_id else [],
            "startTime": span.start_ns // 1000,
            "duration": (span.end_ns - span.start_ns) // 1000,
            "processID": span.service,
        }
        for span in spans
    ]
    return {"traceID": trace_id, "spans": shown, "processes": processes}


def answer(receiver: OtlpReceiver, path: str) -> tuple[int, dict[str, object]]:
    """Status and body."""
    if path == "/status":
        return 200, {"status": "StatusOK"}
    trace_id = path.removeprefix("/api/traces/")
    spans = [span for span in receiver.spans if span.trace_id == trace_id]
    if not spans:
        return 404, {"errors": [{"code": 404, "msg": f"{path}: no such trace"}]}
    return 200, {"data": [jaeger_json(trace_id, spans)]}


def serve(receiver: OtlpReceiver, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answer(receiver, self.path)
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
            """Probes come every few seconds."""

    server = ThreadingHTTPServer(("0.0.0.0", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> int:
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: ended.set())
    with OtlpReceiver(f"0.0.0.0:{OTLP_PORT}") as receiver:
        servers = [serve(receiver, port) for port in (QUERY_PORT, HEALTH_PORT)]
        while not ended.wait(1):
            pass
        for server in servers:
            server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
