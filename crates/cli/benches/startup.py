"""Compares start-up time and peak memory of two command-line tools, alternating between them.

Usage: python startup.py OURS PEER

OURS and PEER are the paths of the programs. Both use a mock server in this process. The script fails if
`--help` or `version` of OURS takes more than MAX_MS milliseconds.
"""

import http.server
import os
import signal
import statistics
import sys
import tempfile
import threading
import time

ROUNDS = 15
# Maximum median start-up time of `--help` and `version`, in milliseconds.
MAX_MS = 20.0

RUNS = b"""{"training_runs":[{"training_run_id":"run-1","base_model":"m","model_owner":"me",
"is_lora":true,"lora_rank":32,"last_request_time":"2024-03-01T12:31:00Z"}],
"cursor":{"offset":0,"limit":20,"total_count":1}}"""


class MockServer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def respond(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = RUNS if "training_runs" in self.path else b"{}"
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = respond

    def log_message(self, *_):
        pass


def measure(command, env):
    """Runs a command once and returns its time in milliseconds and its peak memory in KiB.

    Returns None if the command aborted.
    """
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.execve(command[0], command, env)
    _, status, usage = os.wait4(child, 0)
    elapsed = (time.perf_counter() - start) * 1000
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGABRT:
        # The Python interpreter of the peer sometimes aborts at exit, after its output.
        return None
    if status != 0:
        sys.exit(f"{' '.join(command)} failed: {status}")
    return elapsed, usage.ru_maxrss


def main():
    ours, peer = sys.argv[1:]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), MockServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    size = os.path.getsize(ours) / 1e6
    print(f"binary: {size:.1f} MB")
    too_slow = False
    with tempfile.TemporaryDirectory() as home:
        env = {
            "HOME": home,
            "PATH": os.environ["PATH"],
            "TINKER_API_KEY": "tml-0",
            "TINKER_BASE_URL": f"http://127.0.0.1:{server.server_port}",
            "TINKER_TELEMETRY": "0",
        }
        for arguments in (["--help"], ["version"], ["run", "list"]):
            results = {ours: [], peer: []}
            for _ in range(ROUNDS):
                for program, runs in results.items():
                    run = measure([program, *arguments], env)
                    if run is None and program == ours:
                        sys.exit(f"{' '.join([program, *arguments])} was aborted")
                    if run is not None:
                        runs.append(run)
            summary = []
            for program, runs in results.items():
                median = statistics.median(elapsed for elapsed, _ in runs)
                summary += [median, max(memory for _, memory in runs) / 1024]
            our_ms, our_mb, peer_ms, peer_mb = summary
            print(
                f"{' '.join(arguments)}: {our_ms:.1f} ms, {our_mb:.1f} MB; "
                f"peer: {peer_ms:.0f} ms, {peer_mb:.0f} MB; 1/{peer_ms / our_ms:.0f} of the time"
            )
            too_slow |= arguments[0] != "run" and our_ms > MAX_MS
    if too_slow:
        sys.exit(f"start-up takes more than {MAX_MS:.0f} ms")


main()
