"""Start-up time and peak memory of two command lines, in turns: ours first, then the peer's.

Usage: python startup.py OURS PEER

Both talk to a server in this process that answers at once. Fails if ours misses its bar.
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
BAR_MS = 20.0

RUNS = b"""{"training_runs":[{"training_run_id":"run-1","base_model":"m","model_owner":"me",
"is_lora":true,"lora_rank":32,"last_request_time":"2024-03-01T12:31:00Z"}],
"cursor":{"offset":0,"limit":20,"total_count":1}}"""


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = RUNS if "training_runs" in self.path else b"{}"
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


def once(line, env):
    """Milliseconds and kilobytes of one run."""
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        os.execve(line[0], line, env)
    _, status, usage = os.wait4(child, 0)
    took = (time.perf_counter() - start) * 1000
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGABRT:
        # The reference's interpreter aborts now and then, after it has said everything.
        return None
    if status != 0:
        sys.exit(f"{' '.join(line)} failed: {status}")
    return took, usage.ru_maxrss


def main():
    ours, peer = sys.argv[1:]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    size = os.path.getsize(ours) / 1e6
    print(f"binary: {size:.1f} MB")
    missed = False
    with tempfile.TemporaryDirectory() as home:
        env = {
            "HOME": home,
            "PATH": os.environ["PATH"],
            "TINKER_API_KEY": "tml-0",
            "TINKER_BASE_URL": f"http://127.0.0.1:{server.server_port}",
            "TINKER_TELEMETRY": "0",
        }
        for words in (["--help"], ["version"], ["run", "list"]):
            figures = {ours: [], peer: []}
            for _ in range(ROUNDS):
                for program, runs in figures.items():
                    run = once([program, *words], env)
                    if run is None and program == ours:
                        sys.exit(f"{' '.join([program, *words])} was aborted")
                    if run is not None:
                        runs.append(run)
            told = []
            for program, runs in figures.items():
                median = statistics.median(took for took, _ in runs)
                told += [median, max(memory for _, memory in runs) / 1024]
            a, a_memory, b, b_memory = told
            print(
                f"{' '.join(words)}: {a:.1f} ms, {a_memory:.1f} MB; "
                f"peer: {b:.0f} ms, {b_memory:.0f} MB; 1/{b / a:.0f} of the time"
            )
            missed |= words[0] != "run" and a > BAR_MS
    if missed:
        sys.exit(f"the bar of {BAR_MS:.0f} ms is missed")


main()
