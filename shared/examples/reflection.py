"""What a server can do, asked of the server itself: python reflection.py [HOST:PORT]

As `grpcurl -plaintext HOST:PORT list`, and then `grpcurl -plaintext -d '{"text": "…"}' HOST:PORT METHOD`, do.
Nothing of Weir is imported, nothing is generated: messages are made from what the server says of them.
"""

import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


def main(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        for name in sorted(database.get_services()):
            print(name)
        inference = DescriptorPool(database).FindServiceByName("weir.v1.Inference")
        for method in inference.methods:
            stream = "stream " if method.server_streaming else ""
            print(f"  {method.name}({method.input_type.name}) returns ({stream}{method.output_type.name})")
        tokenize = inference.methods_by_name["Tokenize"]
        call: grpc.UnaryUnaryMultiCallable[Message, Message] = channel.unary_unary(
            f"/{inference.full_name}/{tokenize.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(tokenize.output_type).FromString,
        )
        request = GetMessageClass(tokenize.input_type)(text="The capital of France is")
        print(MessageToJson(call(request, timeout=30), indent=None))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
