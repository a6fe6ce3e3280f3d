"""An OpenAI server without a model: it plays the environments of v1_environments by rules."""

import base64
import json
import re
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LETTERS = {(255, 0, 0): "A", (0, 255, 0): "B", (0, 0, 255): "C", (255, 255, 0): "D"}
PROGRAMS = {"sum": "print(sum(range(101)))", "HELLO": "print('HELLO'[::-1])"}


def read_letter(url):
    """Return the letter of an image's color, from a PNG of color_codeword.py."""
    png = base64.b64decode(url.partition(",")[2])
    size = int.from_bytes(png[33:37], "big")
    pixels = zlib.decompress(png[41 : 41 + size])
    return LETTERS[tuple(pixels[1:4])]


def build_message(messages, tools):
    """Return the assistant's message to a chat request."""
    last = messages[-1]
    if tools and last["role"] != "tool":
        function = tools[0]["function"]
        (argument,) = function["parameters"]["properties"]
        call = {"name": function["name"], "arguments": json.dumps({argument: last["content"]})}
        calls = [{"id": "call_1", "type": "function", "function": call}]
        return {"role": "assistant", "content": None, "tool_calls": calls}
    return {"role": "assistant", "content": build_text(messages, last["content"])}


def build_text(messages, asked):
    if isinstance(asked, list):
        parts = [part for message in messages for part in message["content"] or []]
        images = [part for part in parts if isinstance(part, dict) and part["type"] == "image_url"]
        return "".join(read_letter(image["image_url"]["url"]) for image in images)
    if messages[-1]["role"] == "tool":
        return asked
    if asked.startswith("moves: "):  # bet with the king alone, and fold without it
        return "b" if messages[0]["content"] == "card K" else "p"
    for word, program in PROGRAMS.items():
        if re.match(f"Print .*{word}", asked):
            return f"```python\n{program}\n```"
    return asked[::-1]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_json({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = build_message(body["messages"], body.get("tools"))
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        used = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "scripted"}
        self.send_json({**head, "choices": [choice], "usage": used})

    def send_json(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def start_server():
    """Return a running server; its URL is `http://127.0.0.1:{server.server_port}/v1`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
