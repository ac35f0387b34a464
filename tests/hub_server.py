"""A small Hub for tests: the requests that huggingface_hub makes to create, fill and read model repositories.

    with HubServer() as server:
        subprocess.run([sys.executable, script], env=server.env(tmp_path))

It listens on the loopback address, keeps everything in memory and follows the answers of huggingface.co: error codes in
`X-Error-Code`, large files by the LFS batch API, commits as lines of JSON. Writing needs `server.token`.
"""

import base64
import hashlib
import json
import os
import re
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LARGE = (".safetensors", ".msgpack", ".bin")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@dataclass(frozen=True)
class File:
    content: bytes
    large: bool

    @property
    def oid(self) -> str:
        """The SHA-256 of a large file, the git blob id of a small one."""
        if self.large:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})
    commits: dict[str, dict[str, File]] = field(default_factory=lambda: {"0" * 40: {}})

    def commit_of(self, revision: str) -> str:
        return self.refs.get(revision, revision)

    def files(self, revision: str = "main") -> dict[str, File]:
        return self.commits[self.commit_of(revision)]


class HubServer:
    """The server, running between `__enter__` and `__exit__`; `requests` lists (method, path) as they came."""

    def __init__(self, token: str = "hf_test", user: str = "tester"):
        self.token, self.user = token, user
        self.repos: dict[str, Repo] = {}
        self.large_files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *_exc) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def env(self, home: Path, *, token: str | None = "hf_test", **more: str) -> dict[str, str]:
        """Return an environment for a process that shall use this server, with its cache under `home`."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and key not in PROXIES}
        env.update(HF_ENDPOINT=self.url, HF_HOME=str(home), HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_XET="1")
        env.update(HF_HUB_DISABLE_PROGRESS_BARS="1", **more)
        return env | ({"HF_TOKEN": token} if token else {})

    def add(self, repo_id: str, files: dict[str, bytes], **flags: bool) -> Repo:
        """Put a repository with `files` on its main branch."""
        repo = self.repos.setdefault(repo_id, Repo(**flags))
        self.commit(repo, {name: File(content, name.endswith(LARGE)) for name, content in files.items()}, "main")
        return repo

    def commit(self, repo: Repo, files: dict[str, File], branch: str) -> str:
        parts = [repo.commit_of(branch), *(f"{name} {file.oid}" for name, file in sorted(files.items()))]
        commit = hashlib.sha1("\n".join(parts).encode()).hexdigest()
        repo.commits[commit] = files
        repo.refs[branch] = commit
        return commit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format, *args):
        pass

    def answer(self, body: bytes | dict | list, code: int = 200, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for key, value in {"Content-Length": str(len(content)), "X-Request-Id": "test", **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, code: int, error: str, message: str | None = None, headers: dict[str, str] | None = None) -> None:
        named = {"X-Error-Code": error, "X-Error-Message": message or error}
        self.answer({"error": message or error}, code, named | (headers or {}))

    def body(self) -> bytes:
        if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().strip(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def handle_request(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        body = self.body()
        self.hub.requests.append((self.command, path))
        authorization = self.headers.get("Authorization")
        if authorization and authorization != f"Bearer {self.hub.token}":
            return self.refuse(401, "Unauthorized", "Invalid credentials in Authorization header")
        for method, pattern, function, writes in ROUTES:
            match = re.fullmatch(pattern, path)
            if match is None or (method != self.command and not (method == "GET" and self.command == "HEAD")):
                continue
            if writes and not authorization:
                return self.refuse(401, "Unauthorized", "Invalid username or password.")
            return function(self, *match.groups(), body=body)
        return self.refuse(404, "NotFound", f"This test server does not know {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def readable(self, repo_id: str, revision: str = "main") -> Repo | None:
        """Return a repository that the caller may read, or refuse as the Hub does and return None."""
        repo, known = self.hub.repos.get(repo_id), bool(self.headers.get("Authorization"))
        if repo is None or (repo.private and not known):
            self.refuse(404 if known else 401, "RepoNotFound", "Repository not found")
        elif repo.gated and not known:
            self.refuse(401, "GatedRepo", "Access to this repository is restricted")
        elif repo.commit_of(revision) not in repo.commits:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo
        return None

    def whoami(self, body: bytes) -> None:
        self.answer({"name": self.hub.user, "type": "user", "orgs": []})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo_id = f"{asked.get('organization') or self.hub.user}/{asked['name']}"
        exists = repo_id in self.hub.repos
        if not exists:
            self.hub.repos[repo_id] = Repo(private=asked.get("private") is True or asked.get("visibility") == "private")
        self.answer({"url": f"{self.hub.url}/{repo_id}", "name": repo_id, "id": repo_id}, 409 if exists else 200)

    def preupload(self, repo_id: str, revision: str, body: bytes) -> None:
        def choose(path: str) -> dict:
            return {"path": path, "uploadMode": "lfs" if path.endswith(LARGE) else "regular", "shouldIgnore": False}

        if self.readable(repo_id, revision):
            self.answer({"files": [choose(file["path"]) for file in json.loads(body)["files"]]})

    def lfs_batch(self, repo_id: str, body: bytes) -> None:
        def offer(asked: dict) -> dict:
            url = f"{self.hub.url}/lfs/{asked['oid']}"
            new = {} if asked["oid"] in self.hub.large_files else {"actions": {"upload": {"href": url}}}
            return {"oid": asked["oid"], "size": asked["size"], **new}

        self.answer({"transfer": "basic", "objects": [offer(asked) for asked in json.loads(body)["objects"]]})

    def lfs_put(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.refuse(400, "BadRequest", "The content does not have this SHA-256")
        self.hub.large_files[oid] = body
        return self.answer({})

    def commit(self, repo_id: str, branch: str, body: bytes) -> None:
        repo = self.readable(repo_id, branch)
        if repo is None:
            return
        files = dict(repo.files(branch))
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile":
                files[value["path"]] = File(self.hub.large_files[value["oid"]], True)
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.hub.commit(repo, files, branch)
        self.answer({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{commit}"})

    def info(self, repo_id: str, revision: str | None, body: bytes) -> None:
        if repo := self.readable(repo_id, revision or "main"):
            commit = repo.commit_of(revision or "main")
            names = [{"rfilename": name} for name in repo.commits[commit]]
            self.answer({"id": repo_id, "sha": commit, "private": repo.private, "tags": [], "siblings": names})

    def tree(self, repo_id: str, revision: str, body: bytes) -> None:
        if repo := self.readable(repo_id, revision):
            self.answer([_tree_entry(name, file) for name, file in repo.files(revision).items()])

    def download(self, repo_id: str, revision: str, name: str, body: bytes) -> None:
        repo = self.readable(repo_id, revision)
        if repo is None:
            return None
        commit = {"X-Repo-Commit": repo.commit_of(revision)}
        file = repo.files(revision).get(name)
        if file is None:
            return self.refuse(404, "EntryNotFound", headers=commit)
        headers = {"ETag": f'"{file.oid}"', "Accept-Ranges": "bytes", **commit}
        if file.large:
            headers |= {"X-Linked-Etag": f'"{file.oid}"', "X-Linked-Size": str(len(file.content))}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            return self.answer(file.content, 200, headers)
        start, stop = int(wanted[1]), int(wanted[2]) + 1 if wanted[2] else len(file.content)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(file.content)}"
        return self.answer(file.content[start:stop], 206, headers)


def _tree_entry(name: str, file: File) -> dict:
    entry = {"type": "file", "path": name, "size": len(file.content), "oid": file.oid}
    return entry | ({"lfs": {"oid": file.oid, "size": len(file.content), "pointerSize": 130}} if file.large else {})


REPO = r"((?:[^/]+/)?[^/]+)"
ROUTES = [  # method, path, function, whether it writes
    ("GET", "/api/whoami-v2", _Handler.whoami, True),
    ("POST", "/api/repos/create", _Handler.create, True),
    ("POST", "/api/validate-yaml", lambda handler, body: handler.answer({"errors": [], "warnings": []}), False),
    ("POST", rf"/api/models/{REPO}/preupload/([^/]+)", _Handler.preupload, True),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch, True),
    ("PUT", r"/lfs/([0-9a-f]{64})", _Handler.lfs_put, False),  # the address itself is the permission
    ("POST", rf"/api/models/{REPO}/commit/([^/]+)", _Handler.commit, True),
    ("GET", rf"/api/models/{REPO}/tree/([^/]+)", _Handler.tree, False),
    ("GET", rf"/api/models/{REPO}(?:/revision/([^/]+))?", _Handler.info, False),
    ("GET", rf"/{REPO}/resolve/([^/]+)/(.+)", _Handler.download, False),
]
