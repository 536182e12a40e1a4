"""A Hub on this machine: the endpoints that huggingface_hub uses for repositories, commits, large files and downloads.

Commits are atomic, as on the real one. `before` sees every request first and may answer it with an error, close the
connection, or wait.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "localtoken" * 2
CLOSE = "close"
LARGE = (".safetensors", ".bin", ".pt", ".pth", ".keras", ".h5")

Answer = int | str | None
"""A status to answer with, CLOSE to close the connection, or None to do what was requested."""


@dataclass
class Commit:
    oid: str
    message: str
    branch: str
    files: dict[str, bytes]


@dataclass
class Repo:
    private: bool = False
    commits: list[Commit] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)
    """Branch -> id of its newest commit."""

    def at(self, revision: str) -> Commit | None:
        oid = self.branches.get(revision, revision)
        return next((each for each in reversed(self.commits) if each.oid == oid), None)

    def head(self, branch: str = "main") -> dict[str, bytes]:
        found = self.at(branch)
        return {} if found is None else found.files


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.stored: dict[str, bytes] = {}
        """Large files by their sha256."""
        self.seen: list[tuple[str, str]] = []
        """Method and path of every request."""
        self.uploads: list[str] = []
        """The sha256 of every large file that was sent."""
        self.before: Callable[[str, str], Answer] = lambda method, path: None
        self.lost_answers = 0
        """Commits that are made and whose answer is then lost."""
        self.lock = threading.RLock()
        self.casdir: str | None = None
        """With a folder, large files go through xet's local store."""
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def repo(self, name: str = "me/model") -> Repo:
        with self.lock:
            return self.repos[name]

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed, or that closed its connection, is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # the text of an answer would wait 40 ms for the client to confirm its headers
    server: HubServer

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        self._handle("GET")

    def do_HEAD(self) -> None:
        self._handle("HEAD")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_PUT(self) -> None:
        self._handle("PUT")

    # ---- answers -----------------------------------------------------------------------------------------------------

    def _handle(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        with self.server.lock:
            self.server.seen.append((method, path))
        answer = self.server.before(method, path)
        if answer == CLOSE:
            self.close_connection = True
            self.connection.close()
            return
        if isinstance(answer, int):
            self._send(answer, {"error": f"refused with {answer}"})
            return
        if path.startswith("/api/") and path not in ("/api/agent-harnesses",) and not self._is_known():
            self._send(401, {"error": "Invalid user token."})
            return
        self._route(method, path, body)

    def _is_known(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {TOKEN}"

    def _send(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        given = {"Content-Length": str(len(data)), "Content-Type": "application/json", **(headers or {})}
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _missing(self, kind: str) -> None:
        self._send(404, {"error": f"{kind} not found"}, {"X-Error-Code": kind})

    def _route(self, method: str, path: str, body: bytes) -> None:
        if path == "/api/agent-harnesses":
            self._send(200, {})
        elif path == "/api/whoami-v2":
            self._send(200, {"name": "me", "type": "user", "orgs": [], "auth": {}})
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.startswith("/store/"):
            self._store(path.removeprefix("/store/"), body)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif path.startswith("/api/models/"):
            self._model(path.removeprefix("/api/models/"), body)
        elif "/resolve/" in path:
            self._resolve(*path.strip("/").split("/resolve/", 1))
        else:
            self._send(404, {"error": f"no such endpoint: {method} {path}"})

    # ---- repositories ------------------------------------------------------------------------------------------------

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request.get('organization') or 'me'}/{request['name']}"
        with self.server.lock:
            exists = name in self.server.repos
            if not exists:
                private = bool(request.get("private")) or request.get("visibility") == "private"
                repo = self.server.repos[name] = Repo(private)
                self._add(repo, "main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self._send(409 if exists else 200, {"url": f"{self.server.url}/{name}", "error": "exists", "id": name})

    def _add(self, repo: Repo, branch: str, message: str, files: dict[str, bytes]) -> str:
        oid = hashlib.sha1(f"{len(repo.commits)} {branch} {message}".encode()).hexdigest()
        repo.commits.append(Commit(oid, message, branch, files))
        repo.branches[branch] = oid
        return oid

    def _model(self, rest: str, body: bytes) -> None:
        owner, name, *words = rest.split("/")
        repo = self.server.repos.get(f"{owner}/{name}")
        if repo is None:
            self._missing("RepoNotFound")
        elif not words or words[0] == "revision":
            self._info(f"{owner}/{name}", repo, "/".join(words[1:]) or "main")
        elif words[0] == "branch":
            with self.server.lock:
                exists = "/".join(words[1:]) in repo.branches
                repo.branches.setdefault("/".join(words[1:]), repo.branches["main"])
            self._send(409 if exists else 200, {})
        elif words[0] == "preupload":
            self._preupload(repo, words[1], json.loads(body))
        elif words[0] == "commit":
            self._commit(f"{owner}/{name}", repo, words[1], body)
        elif words[0] == "tree":
            self._tree(repo, words[1], "/".join(words[2:]))
        elif words[0] == "xet-write-token":
            self._send(200, {"accessToken": "x", "exp": 4102444800, "casUrl": f"local://{self.server.casdir}"})
        else:
            self._send(404, {"error": rest})

    def _info(self, name: str, repo: Repo, revision: str) -> None:
        commit = repo.at(revision)
        if commit is None:
            self._missing("RevisionNotFound")
            return
        siblings = [{"rfilename": path} for path in commit.files]
        self._send(
            200, {"id": name, "sha": commit.oid, "siblings": siblings, "tags": ["license:mit"], "private": False}
        )

    def _preupload(self, repo: Repo, branch: str, request: dict[str, Any]) -> None:
        if branch not in repo.branches:
            self._missing("RevisionNotFound")
            return
        ignored = repo.head(branch).get(".gitignore", b"").decode().split()
        if "gitIgnore" in request:
            ignored = request["gitIgnore"].split()
        files = [
            {
                "path": each["path"],
                "uploadMode": "lfs" if each["path"].endswith(LARGE) else "regular",
                "shouldIgnore": each["path"].split("/")[-1] in ignored,
                "oid": None,
            }
            for each in request["files"]
        ]
        self._send(200, {"files": files})

    def _commit(self, name: str, repo: Repo, branch: str, body: bytes) -> None:
        entries = [json.loads(line) for line in body.splitlines() if line.strip()]
        with self.server.lock:
            files = dict(repo.head(branch))
            message = ""
            for entry in entries:
                value = entry["value"]
                if entry["key"] == "header":
                    message = value["summary"]
                elif entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    if value["oid"] not in self.server.stored and self.server.casdir is None:
                        self._send(400, {"error": f"{value['path']} was not sent"})
                        return
                    files[value["path"]] = self.server.stored.get(value["oid"], value["oid"].encode())
                elif entry["key"] == "deletedFile":
                    files.pop(value["path"])
            oid = self._add(repo, branch, message, files)
            self.server.lost_answers -= 1
            if self.server.lost_answers >= 0:
                self.close_connection = True
                self.connection.close()
                return
        self._send(200, {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})

    def _tree(self, repo: Repo, revision: str, folder: str) -> None:
        commit = repo.at(revision)
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        prefix = f"{folder}/" if folder else ""
        found = {} if commit is None else {p: c for p, c in commit.files.items() if p.startswith(prefix)}
        if commit is None or (folder and not found):
            self._missing("EntryNotFound")
            return
        entries = []
        for path, content in found.items():
            if recursive or "/" not in path.removeprefix(prefix):
                entries.append({"type": "file", "path": path, "size": len(content), "oid": blob_id(content)})
        self._send(200, entries)

    # ---- large files and downloads -----------------------------------------------------------------------------------

    def _batch(self, request: dict[str, Any]) -> None:
        objects = []
        for each in request["objects"]:
            entry = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.server.stored:
                entry["actions"] = {"upload": {"href": f"{self.server.url}/store/{each['oid']}"}}
            objects.append(entry)
        self._send(200, {"transfer": "basic", "objects": objects})

    def _store(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._send(400, {"error": "the content does not match"})
            return
        with self.server.lock:
            self.server.stored[oid] = body
            self.server.uploads.append(oid)
        self._send(200, {})

    def _resolve(self, name: str, rest: str) -> None:
        repo = self.server.repos.get(name)
        revision, _, path = rest.partition("/")
        commit = None if repo is None else repo.at(revision)
        if commit is None:
            self._missing("RepoNotFound" if repo is None else "RevisionNotFound")
        elif path not in commit.files:
            self._missing("EntryNotFound")
        else:
            content = commit.files[path]
            self._send(200, content, {"X-Repo-Commit": commit.oid, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'})


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
