"""What a server tells tools of itself, as `grpcurl` asks it: in both versions of reflection, down to a call without
generated code."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from weir.rpc.reflection import add_reflection
from weir.rpc.server import make_server

VERSIONS = ("v1", "v1alpha")


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = make_server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    add_reflection([health.SERVICE_NAME], server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def asked(channel: grpc.aio.Channel, version: str, **question: Any) -> reflection_pb2.ServerReflectionResponse:
    call: Any = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    async with asyncio.timeout(30):
        answers = [one async for one in call(iter([reflection_pb2.ServerReflectionRequest(**question)]))]
    (answer,) = answers
    return answer  # type: ignore[no-any-return]


async def pool_of(channel: grpc.aio.Channel, version: str, symbol: str) -> descriptor_pool.DescriptorPool:
    """Of nothing but what the server says."""
    answer = await asked(channel, version, file_containing_symbol=symbol)
    pool = descriptor_pool.DescriptorPool()
    for file in reversed(answer.file_descriptor_response.file_descriptor_proto):
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
    return pool


@pytest.mark.parametrize("version", VERSIONS)
async def test_services_are_listed_with_reflection_itself(channel: grpc.aio.Channel, version: str) -> None:
    answer = await asked(channel, version, list_services="")
    assert {one.name for one in answer.list_services_response.service} == {
        health.SERVICE_NAME,
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }


@pytest.mark.parametrize("described", VERSIONS)
@pytest.mark.parametrize("version", VERSIONS)
async def test_each_version_is_described_with_its_own_messages(
    channel: grpc.aio.Channel, version: str, described: str
) -> None:
    package = f"grpc.reflection.{described}"
    pool = await pool_of(channel, version, f"{package}.ServerReflection")
    (method,) = pool.FindServiceByName(f"{package}.ServerReflection").methods
    assert method.input_type.full_name == f"{package}.ServerReflectionRequest"
    response = method.output_type
    assert response.full_name == f"{package}.ServerReflectionResponse"
    listed = response.fields_by_name["list_services_response"].message_type
    assert listed is not None
    assert listed.full_name == f"{package}.ListServiceResponse"


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_method_is_called_by_what_the_server_says_of_it(channel: grpc.aio.Channel, version: str) -> None:
    pool = await pool_of(channel, version, health.SERVICE_NAME)
    method = pool.FindServiceByName(health.SERVICE_NAME).methods_by_name["Check"]
    request, answer = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))
    check: Any = channel.unary_unary(
        f"/{health.SERVICE_NAME}/Check",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=answer.FromString,
    )
    found = await check(request(service=""), timeout=30)
    assert found.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_symbol_that_is_not_there_is_not_found(channel: grpc.aio.Channel, version: str) -> None:
    answer = await asked(channel, version, file_containing_symbol="weir.v1.Nothing")
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
