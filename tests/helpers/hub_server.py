"""A server on 127.0.0.1 that speaks the interface of the Hugging Face Hub, for files made by a test."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import attrs

LARGE = 1 << 10
"""Bytes from which a file is stored as a large one, with a SHA-256."""


@attrs.define
class Hub:
    """What the server answers.

    Attributes:
        revisions: the files of each revision, by path, and those of ``main``.
        status: the HTTP status of every answer, other than 200, and the reason in the hub's header.
        absent: the paths of files that are listed, and that do not arrive.
        truncated: the paths of files of which only a half arrives.
        changed: the paths of files of which another byte arrives than was listed.
        requests: the requests so far, as method and path.
    """

    name: str
    revisions: dict[str, dict[str, bytes]]
    address: str = ""
    status: tuple[int, str] | None = None
    absent: frozenset[str] = frozenset()
    truncated: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    requests: list[tuple[str, str]] = attrs.field(factory=list)

    def commit(self, revision: str | None) -> str | None:
        """Return the commit of a revision."""
        known = {
            name: hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
            for name, files in self.revisions.items()
        }
        return revision if revision in known.values() else known.get(revision or "main")

    def files(self, commit: str) -> dict[str, bytes]:
        """Return the files of a commit."""
        return next(files for each, files in self.revisions.items() if self.commit(each) == commit)

    def downloads(self) -> list[str]:
        """Return the paths of the files that were downloaded."""
        found = (
            re.fullmatch(rf"/{self.name}/resolve/\w+/(.*)", path) for method, path in self.requests if method == "GET"
        )
        return sorted(each[1] for each in found if each)


def listed(path: str, content: bytes) -> dict[str, Any]:
    """Return a file's entry in a listing."""
    git = hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()
    entry: dict[str, Any] = {"type": "file", "oid": git, "size": len(content), "path": path}
    if len(content) >= LARGE:
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Answer requests in the block; sets the hub's ``address``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            if hub.status is not None:
                code, reason = hub.status
                return self.send(code, b'{"error": "refused"}', {"X-Error-Code": reason} if reason else {})
            if found := re.fullmatch(rf"/api/models/{hub.name}(?:/revision/(.+))?", path):
                commit = hub.commit(found[1])
                if commit is None:
                    return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return self.json({"id": hub.name, "sha": commit, "siblings": []})
            if found := re.fullmatch(rf"/api/models/{hub.name}/tree/(\w+)", path):
                files = hub.files(found[1])
                return self.json([listed(name, content) for name, content in files.items()])
            if found := re.fullmatch(rf"/{hub.name}/resolve/(\w+)/(.*)", path):
                return self.file(found[1], found[2])
            return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def file(self, revision: str, path: str) -> None:
            commit = hub.commit(revision)
            content = hub.files(commit).get(path) if commit else None
            if commit is None or content is None or path in hub.absent:
                return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            entry = listed(path, content)
            etag = entry.get("lfs", entry)["oid"]
            headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
            if path in hub.changed:
                content = bytes([content[0] ^ 1]) + content[1:]
            start = int((re.findall(r"bytes=(\d+)-", self.headers.get("Range", "")) or ["0"])[0])
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            sent = content[start : len(content) // 2] if path in hub.truncated else content[start:]
            return self.send(206 if start else 200, sent, headers, length=len(content) - start)

        def json(self, content: Any) -> None:
            self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def send(self, status: int, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body) if length is None else length)}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            if length is not None and length != len(body):
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
