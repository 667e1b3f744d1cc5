"""A stream over the raw gRPC stubs: python grpc_stream.py [HOST:PORT [FILE of the gateway's authority: TLS]]

The stubs of other languages come from proto/weir/v1. In Python `weir.client` has all of this behind plain dataclasses.
"""

import sys
from pathlib import Path

import grpc

from weir.wire.v1 import inference_pb2, inference_pb2_grpc, types_pb2


def open_channel(address: str, ca: str) -> grpc.Channel:
    if not ca:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(Path(ca).read_bytes()))


def main(address: str, ca: str = "") -> int:
    request = inference_pb2.GenerateRequest(
        text="The capital of France is",
        options=inference_pb2.RequestOptions(
            sampling=types_pb2.SamplingParams(temperature=0),
            stop_conditions=inference_pb2.StopConditions(max_tokens=24),
        ),
    )
    with open_channel(address, ca) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            for response in stub.Generate(request, timeout=60):
                print(response.text, end="", flush=True)
        except grpc.RpcError as error:  # a grpc.Call too: code, details, and google.rpc details in the trailers
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    # The last response has the counts, and says why the answer ended.
    reason = types_pb2.FinishReason.Name(response.finish_reason)
    print(f"\n{response.usage.num_output_tokens} tokens, {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
