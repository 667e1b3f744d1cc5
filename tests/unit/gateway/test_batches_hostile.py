"""Files, ids and lines that somebody made to do harm: each is refused by its name, and nothing is written."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.unit.gateway.test_batches_api import CHAT
from tests.unit.gateway.world import open_world, with_batches

from weir_gateway.batches.lines import BadLine, BatchLine, LineBounds, TooManyLines, read_lines

PATHS = (
    "../../etc/passwd",
    "..%2F..%2Fetc%2Fpasswd",
    "%00",
    "file-%00",
    "%ED%A0%80",
    "x" * 2000,
    "'%20OR%201=1%20--",
    "%",
)


def others_than_the_database(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if path.name != "state")


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        open_world(with_batches(tmp_path, max_file_bytes=1 << 16)) as world,
        world.http_client(timeout=60) as client,
    ):
        yield client
        counted = world.metric("batch_store_failures_total"), world.metric("http_internal_errors_total")
        assert counted == (0, 0), "the database was asked for nothing that it does not know"


async def test_ids_that_were_never_given_are_404_whatever_is_in_them(http: httpx.AsyncClient) -> None:
    for path in PATHS:
        for method, url in (
            ("GET", f"/v1/files/{path}"),
            ("GET", f"/v1/files/{path}/content"),
            ("DELETE", f"/v1/files/{path}"),
            ("GET", f"/v1/batches/{path}"),
            ("POST", f"/v1/batches/{path}/cancel"),
        ):
            answer = await http.request(method, url)
            assert answer.status_code == 404, (method, url, answer.text)
            assert "error" in answer.json()
    for file_id in ("\ud800", "\0", "x" * 10_000, "../x"):
        body = json.dumps({"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"})
        answer = await http.post("/v1/batches", content=body)
        assert answer.status_code in (400, 404), answer.text
        assert "input_file_id" in answer.json()["error"]["message"] or answer.status_code == 400
    for query in (
        "/v1/files?after=%00",
        "/v1/batches?after=..%2F",
        "/v1/files?purpose=%00",
        "/v1/files?limit=99999999999",
    ):
        assert (await http.get(query)).status_code == 400


async def test_the_name_of_a_file_is_only_a_name(http: httpx.AsyncClient, tmp_path: Path) -> None:
    before = others_than_the_database(tmp_path)
    for name in ("../../../../tmp/escaped", "/etc/cron.d/x", "a\x7fb", "n" * 5000):
        answer = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, b"x")})
        if answer.status_code != 200:  # a head of the form that is too long is no form
            assert answer.status_code == 400
            continue
        made = answer.json()
        assert len(made["filename"]) <= 255
        assert made["filename"].isprintable()
        assert (await http.get(f"/v1/files/{made['id']}/content")).content == b"x"
    assert others_than_the_database(tmp_path) == before
    assert others_than_the_database(Path("/tmp"), "escaped") == []


async def test_sizes_that_a_client_claims_do_not_matter(http: httpx.AsyncClient) -> None:
    head = {"Content-Type": "multipart/form-data; boundary=b"}
    form = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        + b"x" * (1 << 18)
        + b"\r\n--b--\r\n"
    )

    async def pieces() -> AsyncIterator[bytes]:  # without a length
        for at in range(0, len(form), 1 << 14):
            yield form[at : at + (1 << 14)]

    assert (await http.post("/v1/files", content=pieces(), headers=head)).status_code == 413
    for broken in (b"", b"--b\r\n", b"--c--", b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx'):
        assert (await http.post("/v1/files", content=broken, headers=head)).status_code == 400
    many = [("purpose", (None, b"batch"))] * 50
    assert (await http.post("/v1/files", files=many)).status_code == 400


def read(*raw: bytes, bounds: LineBounds | None = None) -> list[BatchLine | BadLine]:
    return list(read_lines([b"\n".join(raw)], CHAT, bounds or LineBounds()))


def line(custom_id: str, body: str = "{}") -> bytes:
    return f'{{"custom_id": {json.dumps(custom_id)}, "url": "{CHAT}", "body": {body}}}'.encode()


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (line("\ud800"), "invalid_custom_id"),
        (line("a\0b"), "invalid_custom_id"),
        (line("x" * 513), "missing_required_parameter"),
        (line("deep", "[" * 100_000), "invalid_json_line"),
        (line("deep", '{"a":' * 985 + "1" + "}" * 985), None),
        (line("long number", '{"n": ' + "9" * 5000 + "}"), "invalid_json_line"),
        (b"\xff\xfe\x00", "invalid_json_line"),
        (line("empty lists", '{"x": [' + "[]," * 100_000 + "[]]}"), "invalid_json_line"),
        (line("large", json.dumps({"x": "y" * (1 << 20)})), "line_too_long"),
    ],
)
def test_a_line_that_is_made_to_do_harm_is_a_bad_one(raw: bytes, code: str | None) -> None:
    found, good = read(raw, line("good"))
    assert isinstance(good, BatchLine)
    if code is None:  # which of both it is depends on how deep Python may go
        assert isinstance(found, BatchLine) or found.code == "invalid_json_line"
    else:
        assert isinstance(found, BadLine)
        assert (found.number, found.code) == (1, code)
        found.message.encode()  # what a database takes


def test_a_file_of_too_many_lines_is_none() -> None:
    with pytest.raises(TooManyLines):
        read(*[b"{}"] * 11, bounds=LineBounds(max_lines=10))
