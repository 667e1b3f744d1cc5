"""A stream over the raw gRPC stubs: python grpc_stream.py [HOST:PORT]

The stubs of other languages come from proto/weir/v1. In Python `weir.client` has all of this behind plain dataclasses.
"""

import sys

import grpc

from weir.wire.v1 import inference_pb2, inference_pb2_grpc, types_pb2


def main(address: str) -> int:
    request = inference_pb2.GenerateRequest(
        text="The capital of France is",
        options=inference_pb2.RequestOptions(
            sampling=types_pb2.SamplingParams(temperature=0),
            stop_conditions=inference_pb2.StopConditions(max_tokens=24),
        ),
    )
    with grpc.insecure_channel(address) as channel:
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
