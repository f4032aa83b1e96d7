"""Records the command line of the Python SDK.

    python cli.py FIXTURES FOLDER [CASE...]

Runs the commands of FIXTURES/cli/index.json against a scripted server on the loopback interface and
writes the same cases with new outputs, exit codes and requests to FOLDER. `cli_startup` says what
is changed in the process of a command. The responses (`<case>.reply.json`) are written by hand.
"""

import collections
import concurrent.futures
import datetime
import fcntl
import http.server
import itertools
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.parse

import common

HERE = os.path.dirname(os.path.abspath(__file__))
# Port in the fixtures. The server uses a free port of as many digits, so that tables have the same width.
RECORDED_PORT = "18765"
LIMIT_SECONDS = 240
ATTEMPTS = 10
# The waits of a script are divided by this; `cli_startup` divides the timeouts of the SDK.
SCALE = 20
# How many commands run at the same time. Most of their time is start-up.
WORKERS = 4
RECORDED_HEADERS = ("x-api-key", "x-sdk-method", "x-sdk-version")
# How often these are sent depends on time.
BACKGROUND = ("/api/v1/telemetry", "/api/v1/session_heartbeat")
INPUTS = ("argv", "env", "stdin", "credentials_before", "files_before", "replies", "terminal_columns",
          "typed", "interrupt_at", "kept", "note")


class Script:
    """Responses for the requests of one command, and the requests."""

    def __init__(self, replies):
        self.replies = replies
        self.used = collections.Counter()
        self.requests = []
        self.lock = threading.Lock()
        self.slow_request = threading.Event()

    def respond(self, method, path, query, body):
        for number, route in enumerate(self.replies):
            wanted = {**{("query", k): v for k, v in route.get("query", {}).items()},
                      **{("match", k): v for k, v in route.get("match", {}).items()}}
            fields = {"query": query, "match": body if isinstance(body, dict) else {}}
            if (route["method"], route["path"]) != (method, path):
                continue
            if any(str(fields[kind].get(name)) != str(value) for (kind, name), value in wanted.items()):
                continue
            if "sleep" in route:
                self.slow_request.set()
            replies = route.get("replies", [route])
            reply = replies[min(self.used[number], len(replies) - 1)]
            self.used[number] += 1
            return reply, route.get("sleep", 0)
        if path in ("/api/v1/client/config", "/api/v1/client/dynamic_config"):
            return {"status": 200, "body": {}}, 0
        if path == "/api/v1/telemetry":
            return {"status": 200, "body": {"status": "accepted"}}, 0
        return {"status": 404, "body": {"detail": f"mock: no route {path}"}}, 0

    def handle(self, handler, path):
        target = urllib.parse.urlsplit(path)
        query = dict(urllib.parse.parse_qsl(target.query))
        raw = handler.body
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = f"<{len(raw)} bytes>"
        with self.lock:
            reply, wait = self.respond(handler.command, target.path, query, body)
            if target.path not in BACKGROUND:
                headers = {name: handler.headers[name] for name in RECORDED_HEADERS if name in handler.headers}
                request = {"method": handler.command, "path": target.path, "query": query, "body": body,
                           "status": reply["status"], "headers": headers}
                self.requests.append({k: v for k, v in request.items() if v is not None and (v or k == "body")})
        time.sleep(wait / SCALE)
        text = reply["text"] if "text" in reply else "" if "body" not in reply else json.dumps(reply["body"])
        handler.send(reply["status"], reply.get("content_type", "application/json"), reply.get("headers", {}), text)


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves each script under the name of its case."""

    protocol_version = "HTTP/1.1"
    scripts = {}

    def log_message(self, *_):
        pass

    def serve(self):
        _, name, path = self.path.split("/", 2)
        self.body = self.read_body()
        Handler.scripts[name].handle(self, "/" + path)

    def read_body(self):
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def send(self, status, content_type, headers, text):
        raw = text.replace(f"127.0.0.1:{RECORDED_PORT}", self.server.address).encode()
        try:
            self.send_response(status)
            self.send_header("content-type", content_type)
            for name, value in headers.items():
                self.send_header(name, str(value))
            if status != 204:
                self.send_header("content-length", str(len(raw)))
            self.end_headers()
            if self.command != "HEAD" and status != 204:
                self.wfile.write(raw)
        except OSError:
            pass  # The command ended, or gave up waiting.

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = serve


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        assert len(self.address) == len(f"127.0.0.1:{RECORDED_PORT}"), self.address
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_):
        pass  # A command that ends closes its connections at any time.


def short_folder():
    """Creates a folder whose path is as long as `/home/me`, so that tables have the recorded width."""
    for _ in range(1000):
        path = tempfile.mktemp(prefix="", dir="/tmp")
        path = "/tmp/" + os.path.basename(path)[-3:]
        try:
            os.mkdir(path)
            return path
        except FileExistsError:
            continue
    raise SystemExit("cannot create a folder with a name of three characters in /tmp")


class Run:
    """One execution of a command in a mode: table, json or tty."""

    def __init__(self, server, fixtures, name, case, mode):
        self.server, self.case, self.mode, self.name = server, case, mode, name
        self.scenario = f"{name}.{mode}"
        replies = []
        if "replies" in case:
            text = open(os.path.join(fixtures, "cli", case["replies"])).read()
            # The responses name the mode that they were first written for.
            text = re.sub(rf"(127\.0\.0\.1:{RECORDED_PORT}/)[\w-]+\.(?:table|json|tty)\b", rf"\g<1>{self.scenario}", text)
            replies = json.loads(text)["replies"]
        self.script = Handler.scripts[self.scenario] = Script(replies)
        self.work, self.home = short_folder(), tempfile.mkdtemp()

    def environment(self):
        environment = {
            "HOME": self.home, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "COLUMNS": "160",
            "PYTHONPATH": os.path.join(HERE, "cli_startup"), "PYTHONDONTWRITEBYTECODE": "1",
            "TINKER_API_KEY": "tml-test-0000", "HF_HUB_OFFLINE": "0",
            "TINKER_BASE_URL": f"http://{self.server.address}/{self.scenario}",
        }
        if any("sleep" in route for route in self.script.replies):
            environment["RECORD_SHORT_TIMEOUTS"] = "1"
        if self.mode == "tty":
            environment |= {"TERM": "xterm-256color"}
            del environment["COLUMNS"]
        for name, value in self.case.get("env", {}).items():
            environment.pop(name, None)
            if value is not None:
                value = value.replace("{SCEN}", self.scenario)
                environment[name] = value.replace(f"127.0.0.1:{RECORDED_PORT}", self.server.address)
        return environment

    def prepare(self):
        for name in self.case.get("files_before", []):
            path = os.path.join(self.work, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write("old")
        if (before := self.case.get("credentials_before")) is not None:
            folder = os.path.join(self.home, ".tinker")
            os.mkdir(folder, 0o700)
            path = os.path.join(folder, "credentials.json")
            with open(path, "w") as file:
                file.write(before if isinstance(before, str) else json.dumps(before, indent=2))
            os.chmod(path, 0o600)

    def argv(self):
        argv = list(self.case["argv"])
        if self.mode == "json" and "json" not in argv:
            argv[1:1] = ["--format", "json"]
        return [os.path.join(os.path.dirname(sys.executable), "tinker"), *argv[1:]]

    def execute(self):
        self.prepare()
        try:
            return self.in_terminal() if self.mode == "tty" else self.with_pipes()
        finally:
            shutil.rmtree(self.work, ignore_errors=True)
            shutil.rmtree(self.home, ignore_errors=True)

    def with_pipes(self):
        pipe = subprocess.PIPE
        process = subprocess.Popen(self.argv(), env=self.environment(), cwd=self.work, stdin=pipe, stdout=pipe, stderr=pipe)
        before = b""
        if at := self.case.get("interrupt_at"):
            if at == "slow response":
                self.script.slow_request.wait(LIMIT_SECONDS)
            else:
                while not before.endswith(at.encode()):
                    before += process.stdout.read(1)
            process.send_signal(signal.SIGINT)
        try:
            stdin = None if at else self.case.get("stdin", "").encode()
            out, err = process.communicate(stdin, LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise TimeoutError(f"{self.scenario} did not end within {LIMIT_SECONDS} seconds")
        return self.outcome(process.returncode, self.normalized(before + out), self.normalized(err))

    def in_terminal(self):
        """Runs the command in a terminal and types after each expected text."""
        controller, terminal = pty.openpty()
        size = struct.pack("HHHH", 40, self.case["terminal_columns"], 0, 0)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
        process = subprocess.Popen(self.argv(), env=self.environment(), cwd=self.work, stdin=terminal, stdout=terminal,
                                   stderr=terminal, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(terminal)
        shown, typed = b"", list(self.case.get("typed", []))
        while True:
            try:
                part = os.read(controller, 65536)
            except OSError:
                break  # The other side is closed: the command ended.
            if not part:
                break
            shown += part
            while typed and shown.decode(errors="ignore").rstrip(" ").endswith(typed[0]["after"].rstrip(" ")):
                time.sleep(0.3)  # The prompt is shown before the terminal is in raw mode.
                for key in typed.pop(0)["keys"]:
                    os.write(controller, key.encode())
                    time.sleep(0.05)
        os.close(controller)
        return self.outcome(process.wait(), self.normalized(shown), "")

    def normalized(self, raw):
        text = raw.decode()
        prefix = os.path.realpath(sys.prefix)
        packages = os.path.join(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
        standard = os.path.dirname(os.__file__)
        for found, shown in ((packages, "<site-packages>"), (os.path.join(sys.prefix, "bin"), "<bin>"), (standard, "<python>"),
                             (prefix, "<prefix>"), (self.work, "/home/me"), (self.home, "<home>"),
                             (self.server.address, f"127.0.0.1:{RECORDED_PORT}")):
            text = text.replace(found, shown)
        return re.sub(r"/tmp/tmp[\w-]+", "<tmpdir>", text)

    def outcome(self, code, out, err):
        found = {"exit_code": code, "stdout": out, "stderr": err}
        files = {}
        for folder, _, names in os.walk(self.work):
            for name in names:
                path = os.path.join(folder, name)
                is_table = name.endswith(".csv")
                files[os.path.relpath(path, self.work)] = open(path).read() if is_table else os.path.getsize(path)
        if files:
            found["files_after"] = dict(sorted(files.items()))
        path = os.path.join(self.home, ".tinker", "credentials.json")
        if os.path.exists(path):
            mode = lambda of: oct(os.stat(of).st_mode & 0o777)
            found["credentials_after"] = {"file_mode": mode(path), "dir_mode": mode(os.path.dirname(path)), "text": open(path).read()}
        if self.mode != "tty":
            found["requests"] = merged([self.request(request) for request in self.script.requests])
        return found

    def request(self, request):
        return json.loads(json.dumps(request).replace(self.server.address, f"127.0.0.1:{RECORDED_PORT}"))


def run(server, fixtures, name, case, mode):
    """Runs a case in a mode. The interpreter sometimes aborts when it exits, after everything was printed."""
    for _ in range(ATTEMPTS):
        outcome = Run(server, fixtures, name, case, mode).execute()
        if outcome["exit_code"] != -signal.SIGABRT:
            return outcome
    raise ChildProcessError(f"{name}.{mode} aborted {ATTEMPTS} times")


def merged(requests):
    """Merges a request that is sent several times in a row, and orders deletions, which are concurrent."""
    shown = []
    is_deletion = lambda request: request["method"] == "DELETE"
    groups = itertools.groupby(requests, key=is_deletion)
    ordered = [request for deletions, group in groups for request in (sorted(group, key=str) if deletions else group)]
    for request in ordered:
        if shown and {k: v for k, v in shown[-1].items() if k != "repeated"} == request:
            shown[-1]["repeated"] = shown[-1].get("repeated", 1) + 1
        else:
            shown.append(request)
    return shown


def write_case(folder, name, case, outcomes):
    """Writes the outputs of a case and returns its entry of the index."""

    def keep(file, text):
        if not text:
            return {}
        with open(os.path.join(folder, file[1]), "w", newline="") as output:
            output.write(text)
        return {file[0]: file[1]}

    modes = {}
    for mode in sorted(outcomes):
        found = outcomes[mode]
        entry = {"exit_code": found["exit_code"]}
        out, err = found["stdout"], found["stderr"]
        if mode == "tty":
            entry |= keep(("stdout", f"{name}.txt"), out)
        elif mode == "table":
            entry |= keep(("stdout", f"{name}.table.txt"), out)
            entry |= keep(("stderr", f"{name}.err.txt"), err)
        else:
            try:
                is_document = json.loads(out) is not None
            except ValueError:
                is_document = False
            if out and not is_document:
                entry["note"] = "stdout is not one JSON document"
            entry |= keep(("stdout", f"{name}.json" if is_document else f"{name}.json-mode.txt"), out)
            same = err == outcomes.get("table", {}).get("stderr")
            entry |= keep(("stderr", f"{name}.err.txt" if same else f"{name}.json-mode.err.txt"), err)
        entry |= {key: found[key] for key in ("files_after", "credentials_after", "requests") if key in found}
        modes[mode] = entry
    return {"modes": modes, **{key: case[key] for key in INPUTS if key in case}}


def formatting(fixtures):
    """Formats the sizes, times and flags of formatting.json with the functions of the command line."""
    from tinker.cli import output

    cases = common.load(fixtures, "cli", "formatting.json")
    now = datetime.datetime.fromisoformat(cases["now"])

    class FixedClock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return now

    # The functions import the class when they are called.
    datetime.datetime = FixedClock
    for case in cases["timestamps"]:
        case["text"] = output.format_timestamp(FixedClock.fromisoformat(case["time"]))
    for case in cases["timestamp_strings"]:
        case["text"] = output.format_timestamp(case["input"])
    for case in cases["sizes"]:
        case["text"] = output.format_size(case["bytes"])
    cases["bools"] = {"true": output.format_bool(True), "false": output.format_bool(False)}
    cases["optional_none"] = output.format_optional(None)
    return cases


def main(fixtures, folder, *only):
    cases = common.load(fixtures, "cli", "index.json")
    os.makedirs(folder, exist_ok=True)
    server = Server()
    failures = {}
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        runs = {
            (name, mode): pool.submit(run, server, fixtures, name, case, mode)
            for name, case in cases.items() if not only or name in only
            for mode in case["modes"] if "kept" not in case
        }
        index = {}
        for name, case in cases.items():
            if only and name not in only:
                continue
            if "kept" in case:
                index[name] = case
                continue
            try:
                outcomes = {mode: runs[name, mode].result() for mode in case["modes"]}
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
                continue
            index[name] = write_case(folder, name, case, outcomes)
    if not only:
        with open(os.path.join(folder, "help.table.txt"), "w") as file:
            file.write(run(server, fixtures, "help", {"argv": ["tinker", "--help"]}, "table")["stdout"])
    common.save(folder, "index.json", index)
    common.save(folder, "formatting.json", formatting(fixtures))
    common.finish(folder, failures, f"{len(index)} commands")


if __name__ == "__main__":
    main(*sys.argv[1:])
