"""A server on this machine that stands for the official places of data: ranges, cuts, refusals."""

import http.server
import threading


class Server(http.server.ThreadingHTTPServer):
    """Serve one file whatever is asked, or files by their names; cut or refuse the first answers, with ranges or
    without."""

    def __init__(self, content, *, name="cifar-10-binary.tar.gz", ranges=True, cut=None, length=True, refuse=()):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.content, self.name, self.ranges, self.cut, self.length = content, name, ranges, cut, length
        self.asked, self.refuse = [], list(refuse)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    @property
    def address(self):
        return self.address_of(self.name)

    def address_of(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.server.ranges else 0
        if self.server.refuse:
            self.send_error(self.server.refuse.pop(0))
            return
        content = self.server.content
        if isinstance(content, dict):
            content = content.get(self.path.removeprefix("/"))
        if content is None:
            self.send_error(404)
            return
        if start >= len(content):
            self.send_error(416)
            return
        body = content[start:]
        self.send_response(206 if start else 200)
        if self.server.length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut, self.server.cut = self.server.cut, None
        self.wfile.write(body if cut is None else body[:cut])

    def log_message(self, *_):
        pass
