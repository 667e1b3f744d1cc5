"""Reflection in both of its versions: `grpc.reflection.v1`, and `v1alpha` for older tools.

grpcio has the older one alone. Their messages are the same but for the package's name, so that one servicer answers
both; the newer file is made of the older one, for tools that ask what the service is that they ask
(https://github.com/grpc/grpc-proto/blob/master/grpc/reflection/v1/reflection.proto).
"""

from collections.abc import Iterable

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

_OLD_PACKAGE, _PACKAGE = "grpc.reflection.v1alpha", "grpc.reflection.v1"
_NAME = f"{_PACKAGE}.ServerReflection"
_FILE = "grpc/reflection/v1/reflection.proto"
REFLECTION_NAMES = (_NAME, reflection.SERVICE_NAME)


def add_reflection(service_names: Iterable[str], server: grpc.aio.Server) -> None:
    """Of the services that are named, and of reflection itself; `server` is not started yet."""
    names = (*service_names, *REFLECTION_NAMES)
    _add_file(descriptor_pool.Default())
    reflection.enable_server_reflection(names, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_NAME, {"ServerReflectionInfo": handler}),),
    )


def _add_file(pool: descriptor_pool.DescriptorPool) -> None:
    """The same file may be added again."""
    made = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(made)
    made.name, made.package = _FILE, _PACKAGE
    fields = [field for message in made.message_type for field in message.field if field.type_name]
    for field in fields:
        field.type_name = _renamed(field.type_name)
    for method in made.service[0].method:
        method.input_type, method.output_type = _renamed(method.input_type), _renamed(method.output_type)
    pool.AddSerializedFile(made.SerializeToString())


def _renamed(type_name: str) -> str:
    return type_name.replace(f".{_OLD_PACKAGE}.", f".{_PACKAGE}.")
