"""Many connections, many samples, large bodies. Needs nothing but Python.

    python load.py BASE_URL MODEL

Prints requests per second and checks that nothing is refused, lost or answered twice, and that
the server says it is well throughout.
"""

import asyncio
import json
import sys
import time
import urllib.parse

BASE_URL, MODEL = sys.argv[1:3]
HOST = urllib.parse.urlsplit(BASE_URL)
JSON, PROTO = "application/json", "application/x-protobuf"


class Connection:
    """One kept-alive connection, one call at a time."""

    def __init__(self):
        self.lock, self.reader, self.writer = asyncio.Lock(), None, None

    async def call(self, path, body, method="POST", kind=JSON):
        async with self.lock:
            if self.writer is None:
                self.reader, self.writer = await asyncio.open_connection(HOST.hostname, HOST.port, limit=1 << 24)
            head = f"{method} {path} HTTP/1.1\r\nhost: {HOST.netloc}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
            self.writer.write(head.encode() + body)
            await self.writer.drain()
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
            content = await self.reader.readexactly(int(headers["content-length"]))
            return int(lines[0].split()[1]), headers, content

    async def json(self, path, value):
        status, _, content = await self.call("/api/v1" + path, json.dumps(value).encode())
        assert status == 200, (path, status, content)
        return json.loads(content)


async def sampler(connection):
    session = await connection.json("/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"})
    made = await connection.json(
        "/create_sampling_session",
        {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": MODEL},
    )
    return session["session_id"], made["sampling_session_id"]


async def samples(count, pool):
    """`count` samples outstanding at once, answered through one poll for all."""
    _, target = await sampler(pool[0])
    start, tickets = time.perf_counter(), []

    async def submit(i):
        ask = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [i % 90 + 1]}]},
            "sampling_params": {"max_tokens": 4, "seed": i, "stop": []},
            "sampling_session_id": target,
            "seq_id": i,
        }
        tickets.append((await pool[i % len(pool)].json("/asample", ask))["request_id"])

    await asyncio.gather(*(submit(i) for i in range(count)))
    submitted = time.perf_counter() - start
    assert len(set(tickets)) == count
    cursor, done, poller = 0, [], Connection()
    while len(done) < count:
        ask = {"target": {"type": "sampling_session", "sampling_session_id": target}, "prev_cursor": cursor}
        page = await poller.json("/retrieve_futures", ask)
        assert all(item["state"] == "finished" for item in page["completions"])
        done += [item["request_id"] for item in page["completions"]]
        cursor = page["cursor"]
    assert sorted(done) == sorted(tickets), "an answer was lost or came twice"
    answered = time.perf_counter() - start
    print(f"{count:6} samples: submitted at {count / submitted:7.0f}/s, all answered after {answered:6.2f} s "
          f"({1e6 * answered / count:5.0f} µs each)", flush=True)


def varint(n):
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def large_pass(model, seq, size):
    """A pass whose datum is refused by the model: it costs its bytes and nothing else."""
    datum = field(1, field(1, field(1, b"\x05\x00\x00\x00" * (size // 4))))
    return field(1, model.encode()) + b"\x10" + varint(seq) + field(3, datum) + field(4, b"cross_entropy")


async def bodies(count, size, pool):
    session, _ = await sampler(pool[0])
    ask = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    await pool[0].json("/create_model", ask)
    model, start = f"{session}:train:0", time.perf_counter()

    async def submit(seq):
        body = large_pass(model, seq, size)
        status, _, content = await pool[seq].call("/api/v1/forward_backward", body, kind=PROTO)
        assert status == 200, (status, content)
        ticket = json.loads(content)
        while True:
            answer = await pool[seq].json("/retrieve_future", {"request_id": ticket["request_id"]})
            if answer.get("type") != "try_again":
                assert answer["category"] == "user", answer
                return

    await asyncio.gather(*(submit(seq) for seq in range(1, count + 1)))
    print(f"{count:6} bodies of {size} bytes at once: {time.perf_counter() - start:.2f} s", flush=True)


async def health(slowest):
    connection = Connection()
    while True:
        start = time.perf_counter()
        status, _, _ = await connection.call("/api/v1/healthz", b"", "GET")
        assert status == 200
        slowest[0] = max(slowest[0], time.perf_counter() - start)
        await asyncio.sleep(0.05)


async def main():
    slowest = [0.0]
    watch = asyncio.create_task(health(slowest))
    pool = [Connection() for _ in range(1000)]
    await asyncio.gather(*(c.call("/api/v1/healthz", b"", "GET") for c in pool))
    for count in (100, 1000, 10000):
        await samples(count, pool)
    await bodies(64, 5_000_000, pool)
    assert not watch.done(), watch
    print(f"{len(pool)} connections; the slowest health check took {1000 * slowest[0]:.0f} ms", flush=True)


asyncio.run(main())
