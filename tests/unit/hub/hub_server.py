"""A server that answers as the Hugging Face Hub does: what a model is, its files, and a store on another port that the
large ones are redirected to. It can refuse, cut lines, be slow, and serve wrong bytes; and keeps what it was asked.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 20_000
"""From here on a file is kept by its SHA-256 in the store, as with Git LFS."""


@dataclass(frozen=True)
class Asked:
    """One request. `at`: "hub" or "store"."""

    at: str
    method: str
    path: str
    range: str
    has_token: bool


@dataclass
class Behaviour:
    """What is out of order; by default nothing."""

    cut_after: list[int] = field(default_factory=list)
    """Bytes of the store's next answers after which it closes the connection, one number an answer."""
    pause_s: float = 0.0
    """Before each piece of the store's answers."""
    piece_bytes: int = 1 << 14
    ignores_ranges: bool = False
    wrong_bytes: bool = False
    gated: bool = False
    etag: str = ""
    """Instead of the digest, as of a store that was put before the hub's, or of one that means harm."""
    status: int = 0
    """Of every answer of the store."""
    api_body: bytes | None = None
    """Instead of what a model is."""


@dataclass
class LocalHub:
    """`repositories`: name -> file -> bytes."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str = ""
    """That alone may read; empty: everybody may."""
    behaviour: Behaviour = field(default_factory=Behaviour)
    asked: list[Asked] = field(default_factory=list)
    hub_port: int = 0
    store_port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.hub_port}"

    def add_folder(self, name: str, folder: Path) -> None:
        self.repositories[name] = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    def commit(self, name: str) -> str:
        """Changes with the content."""
        files = self.repositories[name]
        return hashlib.sha1(repr(sorted((path, sha256(data)) for path, data in files.items())).encode()).hexdigest()

    def downloads(self) -> list[Asked]:
        """Requests for the bytes of large files."""
        return [asked for asked in self.asked if asked.at == "store" and asked.method == "GET"]

    def described(self, name: str) -> dict[str, Any]:
        files = self.repositories[name]
        siblings = [sibling(path, data) for path, data in files.items()]
        return {"id": name, "modelId": name, "sha": self.commit(name), "private": False, "siblings": siblings}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sibling(path: str, data: bytes) -> dict[str, Any]:
    described: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": git_sha1(data)}
    if len(data) >= LARGE_BYTES:
        described["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 130}
    return described


@contextmanager
def running_hub() -> Iterator[LocalHub]:
    hub = LocalHub()
    servers = [HttpServer(handler, hub) for handler in (HubAnswering, StoreAnswering)]
    hub.hub_port, hub.store_port = (server.server_address[1] for server in servers)
    threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


class HttpServer(ThreadingHTTPServer):
    def __init__(self, handler: "type[Answering]", hub: LocalHub) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.hub = hub


class Answering(BaseHTTPRequestHandler):
    """HTTP/1.1 as far as both need it."""

    protocol_version = "HTTP/1.1"
    server: HttpServer
    at: str

    @property
    def hub(self) -> LocalHub:
        return self.server.hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        authorization = self.headers.get("Authorization", "")
        split = urlsplit(self.path)
        self.hub.asked.append(
            Asked(self.at, self.command, unquote(split.path), self.headers.get("Range", ""), bool(authorization))
        )
        self.answer_to(unquote(split.path), authorization.removeprefix("Bearer "))

    def answer_to(self, path: str, token: str) -> None:
        raise NotImplementedError

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


class HubAnswering(Answering):
    at = "hub"

    def answer_to(self, path: str, token: str) -> None:
        if path.startswith("/api/models/"):
            self.describe(path.removeprefix("/api/models/"), token)
            return
        name, _, rest = path.removeprefix("/").partition("/resolve/")
        revision, _, filename = rest.partition("/")
        self.resolve(name, revision, filename, token)

    def describe(self, path: str, token: str) -> None:
        name, _, revision = path.partition("/revision/")
        if self.hub.behaviour.api_body is not None:
            self.answer(200, {}, self.hub.behaviour.api_body)
        elif self.may_read(name, token) and self.has(name, revision):
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(self.hub.described(name)).encode())

    def resolve(self, name: str, revision: str, filename: str, token: str) -> None:
        if not (self.may_read(name, token) and self.has(name, revision)):
            return
        if self.hub.behaviour.gated:
            self.refuse(403 if token else 401, "GatedRepo")
            return
        data = self.hub.repositories[name].get(filename)
        commit = {"X-Repo-Commit": self.hub.commit(name)}
        if data is None:
            self.refuse(404, "EntryNotFound")
        elif len(data) < LARGE_BYTES:
            self.answer(200, commit | {"ETag": f'"{git_sha1(data)}"', "Content-Length": str(len(data))}, data)
        else:
            where = f"http://127.0.0.1:{self.hub.store_port}/{name}/{filename}?X-Amz-Signature=secret"
            tag = self.hub.behaviour.etag or sha256(data)
            linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{tag}"', "Location": where}
            self.answer(302, commit | linked)

    def may_read(self, name: str, token: str) -> bool:
        """As there: who may not know of it is told that there is none."""
        is_known = name in self.hub.repositories
        if is_known and (not self.hub.token or token == self.hub.token):
            return True
        self.refuse(404 if token else 401, "RepoNotFound")
        return False

    def has(self, name: str, revision: str) -> bool:
        if revision in ("", "main", self.hub.commit(name)):
            return True
        self.refuse(404, "RevisionNotFound")
        return False

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, {"X-Error-Code": code, "X-Error-Message": code})


class StoreAnswering(Answering):
    at = "store"

    def answer_to(self, path: str, token: str) -> None:
        assert not token  # a signed address: the hub's token is none of the store's business
        if self.hub.behaviour.status:
            self.answer(self.hub.behaviour.status, {})
            return
        org, name, filename = path.removeprefix("/").split("/", 2)
        data = self.hub.repositories[f"{org}/{name}"][filename]
        if self.hub.behaviour.wrong_bytes:
            data = data[:-1] + bytes([data[-1] ^ 1])
        asked = self.headers.get("Range")
        if asked is None or self.hub.behaviour.ignores_ranges:
            self.send(200, {"Content-Length": str(len(data))}, data)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        part = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send(206, {"Content-Length": str(len(data) - start), "Content-Range": part}, data[start:])

    def send(self, status: int, headers: dict[str, str], data: bytes) -> None:
        end = self.hub.behaviour.cut_after.pop(0) if self.hub.behaviour.cut_after else len(data)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            piece_bytes = self.hub.behaviour.piece_bytes
            for start in range(0, min(end, len(data)), piece_bytes):
                self.wfile.write(data[start : min(start + piece_bytes, end)])
                self.wfile.flush()
                time.sleep(self.hub.behaviour.pause_s)
        except ConnectionError:  # the client was interrupted
            pass
        self.close_connection = end < len(data)
