"""A hub on this machine: what huggingface_hub asks when it makes a repository, reads a card and commits files."""

import base64
import hashlib
import http.server
import json
import threading


class Hub(http.server.ThreadingHTTPServer):
    """Keep the files of repositories by name; `files["me/model"]["README.md"]` is bytes."""

    def __init__(self, files=None):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files, self.private, self.messages = files or {}, {}, []

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, hub = self.path.split("?")[0], self.server
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            hub.files.setdefault(name, {})
            hub.private[name] = asked.get("visibility", "public")
            self.tell({"url": f"{hub.address}/{name}", "name": name, "id": name})
        elif path == "/api/validate-yaml":
            self.tell({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            names = [one["path"] for one in json.loads(body)["files"]]
            self.tell({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        elif "/commit/" in path:
            name = "/".join(path.split("/")[3:5])
            files = hub.files[name]
            for line in body.decode().splitlines():
                one = json.loads(line)
                if one["key"] == "header":
                    hub.messages.append(one["value"]["summary"])
                elif one["key"] == "file":
                    files[one["value"]["path"]] = base64.b64decode(one["value"]["content"])
                elif one["key"] == "deletedFile":
                    del files[one["value"]["path"]]
            oid = f"{len(hub.messages):040x}"
            self.tell({"success": True, "commitOid": oid, "commitUrl": f"{hub.address}/{name}/commit/{oid}"})
        else:
            self.send_error(404)

    def do_GET(self, body=True):
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[0] == "api":
            files = self.server.files.get("/".join(parts[2:4]), {})
            sizes = [{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in files.items()]
            self.tell(sizes)
            return
        content = self.server.files.get("/".join(parts[:2]), {}).get(parts[-1])
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def do_HEAD(self):
        self.do_GET(body=False)

    def tell(self, value):
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass
