import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import ROOT

from escrag_min.evaluation.tables import judge
from escrag_min.judging import DEFAULT_METRICS
from escrag_min.model.checkpoint import read_json, write_json
from escrag_min.qwen2 import Qwen2
from escrag_min.writers.endpoint import RETRY_AFTER_MAX, EndpointWriter, seconds_to_wait
from escrag_min.writers.journal import Answer, Journal, Request, ask, request_hash
from escrag_min.writers.llm import LocalWriter, ScriptedWriter, fingerprint, open_writer

KEY = "sk-secret-0123456789"


def requests_of(n, **options):
    return [Request(f"item-{i}", [{"role": "user", "content": f"item-{i}"}], **options) for i in range(n)]


def completion(text):
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode(), {}


class Server(ThreadingHTTPServer):
    """An endpoint that misbehaves on purpose. plan(item, call) -> (status, body, headers), or "cut" (the body breaks off),
    "drop" (no answer at all), "stall" (says nothing until the client hangs up), "trickle" (a byte now and then); None: good.

    calls: items in the order they came; good: texts handed out an item; most: calls under way at once, those that stall
    (where the client is gone before the server knows) left out.
    """
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, plan, pause):
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan, self.pause = plan, pause
        self.lock, self.calls, self.good, self.headers, self.bodies = threading.Lock(), [], Counter(), [], []
        self.times, self.under_way, self.most = [], 0, 0
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address):
        pass        # a client that was killed


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        item = body["messages"][-1]["content"]
        with server.lock:
            call = server.calls.count(item)
            server.calls.append(item)
            server.headers.append(dict(self.headers))
            server.bodies.append(body)
            server.times.append(time.monotonic())
            server.under_way += 1
            server.most = max(server.most, server.under_way)
        what = server.plan(item, call)
        if what != "stall":
            time.sleep(server.pause(item))
        with server.lock:       # before the answer leaves: the client's next call may be here before this thread goes on
            server.under_way -= 1
            server.good[item] += what is None
        if what == "stall":
            self.connection.settimeout(30)
            self.connection.recv(1)
        elif what != "drop":
            status, content, headers = completion(f"text of {item}") if what in (None, "cut", "trickle") else what
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            for i in range(0, len(content) if what == "trickle" else 0):
                self.wfile.write(content[i:i + 1])
                time.sleep(0.2)
            self.wfile.write(content[:len(content) // 2] if what == "cut" else content)


@pytest.fixture
def serve(monkeypatch):
    """serve(plan, pause=seconds or a function of the item) -> a running Server"""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    servers = []

    def start(plan=lambda item, call: None, pause=0.0):
        servers.append(Server(plan, pause if callable(pause) else lambda item: pause))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return servers[-1]
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def writer_of(server, **options):
    return EndpointWriter(server.url, "m", **{"backoff": 0.01, "timeout": 20, **options})


def refusal(status, headers=None):
    return status, json.dumps({"error": {"message": f"because of {status}"}}).encode(), headers or {}


# --- the endpoint ---

def test_two_429_then_an_answer_is_one_result_of_three_calls_case57(serve):
    server = serve(lambda item, call: refusal(429) if call < 2 else None)
    assert ask(writer_of(server), requests_of(1)) == [Answer("text of item-0")]
    assert len(server.calls) == 3


def test_400_is_one_call_and_a_clear_error_case57(serve, tmp_path):
    server = serve(lambda item, call: refusal(400))
    journal = tmp_path / "journal.jsonl"
    for _ in range(2):      # a permanent error is journaled: the second run asks nothing
        assert ask(writer_of(server), requests_of(1), Journal(journal)) == [Answer(None, "HTTP 400: because of 400", True)]
        assert len(server.calls) == 1


def test_a_timeout_on_one_of_ten_keeps_nine_and_is_resumed_case57(serve, tmp_path):
    broken = True
    server = serve(lambda item, call: "stall" if item == "item-7" and broken else None)
    path, requests = tmp_path / "journal.jsonl", requests_of(10)
    answers = ask(writer_of(server, timeout=1.0, retries=1), requests, Journal(path))
    assert [a.text for a in answers] == [f"text of item-{i}" if i != 7 else None for i in range(10)]
    assert answers[7] == Answer(None, "no answer within 1 s (call 2 of 2)") and len(Journal(path).answers) == 9
    broken, asked = False, len(server.calls)
    answers = ask(writer_of(server), requests, Journal(path))
    assert [a.text for a in answers] == [f"text of item-{i}" for i in range(10)]
    assert server.calls[asked:] == ["item-7"]


def test_200_items_through_every_kind_of_trouble_case57(serve, tmp_path):
    rng, plans = random.Random(0), {}
    kinds = [refusal(429), refusal(500), "cut", "drop", completion(""), completion(None), (200, b"{}", {}),
             (502, b"<html>", {})]
    for i in range(200):
        plans[f"item-{i}"] = rng.choices(kinds, k=rng.randrange(4))
        if i % 40 == 3:
            plans[f"item-{i}"].insert(rng.randrange(len(plans[f"item-{i}"]) + 1), "stall")
        if i % 20 == 9:
            plans[f"item-{i}"] += [refusal(400)]
    server = serve(lambda item, call: plans[item][call] if call < len(plans[item]) else None,
                   pause=lambda item: 0.05 if item.endswith("1") else 0.0)
    threads = set()

    class Watched(Journal):
        def put(self, *args):
            threads.add(threading.current_thread())
            super().put(*args)
    answers = ask(writer_of(server, timeout=3.0), requests_of(200), Watched(tmp_path / "journal.jsonl"))
    for i, answer in enumerate(answers):
        item = f"item-{i}"
        if i % 20 == 9:
            assert answer == Answer(None, "HTTP 400: because of 400", True) and server.good[item] == 0
        else:
            assert answer == Answer(f"text of {item}") and server.good[item] == 1
        assert server.calls.count(item) == len(plans[item]) + (i % 20 != 9)
    assert threads == {threading.main_thread()}
    assert 1 < server.most <= 8


def test_200_replies_judged_through_trouble_are_scored_or_missing_none_twice_case55_case57(serve, tmp_path):
    metrics = [m for m in DEFAULT_METRICS if m.perspective == "Judge"]
    good = json.dumps({m.key: 7 for m in metrics})
    answers = {0: completion(f"Let me see. {good} That is all."), 1: completion(json.dumps({m.key: 17 for m in metrics})),
               2: completion(good), 3: completion(good), 4: completion("I would rather not say.")}

    def plan(item, call):
        kind = int(re.search(r"reply-(\d+)", item)[1]) % 5
        trouble = {2: refusal(429), 3: random.Random(item).choice([refusal(500), "cut", completion("")])}
        return trouble[kind] if kind in trouble and call == 0 else answers[kind]
    server = serve(plan, pause=lambda item: random.Random(item).random() * 0.02)
    records = [{"id": f"r{i}", "dialogue_id": i, "prompt": [{"role": "user", "content": "hi"}], "reply": f"reply-{i}"} for i in range(200)]
    for _ in range(2):      # the second time everything comes from the journal
        scored = judge(records, writer_of(server, workers=8), Journal(tmp_path / "journal.jsonl"), metrics)
    assert [s["average"] for s in scored] == [7.0 if i % 5 in (0, 2, 3) else None for i in range(200)]
    assert '17' in scored[1]["raw"]["Judge"] and scored[4]["raw"]["Judge"] == "I would rather not say."
    calls = Counter(server.calls)
    assert len(calls) == 200 and sum(calls.values()) == 200 + 80 and server.most <= 8
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 200


@pytest.mark.parametrize("workers", [1, 3])
def test_never_more_calls_at_once_than_workers(serve, workers):
    server = serve(pause=0.03)
    ask(writer_of(server, workers=workers), requests_of(12))
    assert server.most == workers


@pytest.mark.parametrize("trouble, reason", [
    (refusal(503), "HTTP 503: because of 503"), ("cut", "not whole JSON"), ("drop", "the connection failed"),
    (completion("  "), "the text is empty"), ((200, b'{"error": {"message": "no GPU"}}', {}), "no choices.* in no GPU"),
    ((200, b"[]", {}), "no choices"), ((200, b"\xff\xfe{", {}), "not whole JSON")])
def test_what_never_gets_better_fails_with_its_reason_and_is_not_journaled(serve, tmp_path, trouble, reason):
    server = serve(lambda item, call: trouble)
    answer, = ask(writer_of(server, retries=2), requests_of(1), Journal(tmp_path / "journal.jsonl"))
    assert answer.text is None and not answer.permanent and len(server.calls) == 3
    assert re.search(reason + r".*\(call 3 of 3\)$", answer.error)
    assert not (tmp_path / "journal.jsonl").exists()


def test_a_text_cut_at_max_tokens_says_so_also_from_the_journal(serve, tmp_path):
    def ended(reason):
        return 200, json.dumps({"choices": [{"message": {"content": "so"}, "finish_reason": reason}]}).encode(), {}
    server = serve(lambda item, call: ended("length" if item == "item-1" else "stop"))
    for _ in range(2):
        answers = ask(writer_of(server), requests_of(2), Journal(tmp_path / "journal.jsonl"))
        assert answers == [Answer("so"), Answer("so", cut=True)] and len(server.calls) == 2
    first, _ = map(json.loads, sorted((tmp_path / "journal.jsonl").read_text().splitlines()))
    assert first.keys() == {"key", "hash", "writer", "text"}        # a line as before there was "cut"


def test_nobody_listens(serve):
    answer, = ask(EndpointWriter("http://127.0.0.1:9/v1", "m", retries=1, backoff=0), requests_of(1))
    assert "ConnectionRefusedError" in answer.error and not answer.permanent


def test_a_trickle_does_not_outlive_the_timeout(serve):
    server = serve(lambda item, call: "trickle")
    began = time.monotonic()
    assert "no answer within 0.5 s" in ask(writer_of(server, timeout=0.5, retries=0), requests_of(1))[0].error
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("status", [401, 402, 403, 404, 307])
def test_what_no_call_can_pass_ends_the_batch(serve, monkeypatch, tmp_path, status):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server = serve(lambda item, call: (status, KEY.encode(), {"Location": "http://127.0.0.1:9/"}) if item == "item-5" else None,
                   pause=0.01)
    journal = Journal(tmp_path / "journal.jsonl")
    with pytest.raises(ValueError, match=f"127.0.0.1:{server.server_port}/v1/chat/completions: HTTP {status}") as caught:
        ask(writer_of(server, workers=2), requests_of(50), journal)
    assert KEY not in str(caught.value) and server.calls.count("item-5") == 1
    assert len(server.calls) <= 20 and len(journal.answers) == sum(server.good.values())       # what was under way is kept


def test_retry_after_is_honoured(serve):
    server = serve(lambda item, call: refusal(429, {"Retry-After": "1"}) if call == 0 else None)
    assert ask(writer_of(server, backoff=0), requests_of(1))[0].text
    assert server.times[1] - server.times[0] >= 1.0


def test_retry_after_in_seconds_or_as_a_date():
    assert [seconds_to_wait(s) for s in (None, "", "7", "0.5", "-3", "soon", "nan")] == [0, 0, 7, 0.5, 0, 0, 0]
    assert seconds_to_wait("1e9") == seconds_to_wait("inf") == RETRY_AFTER_MAX
    assert 18 < seconds_to_wait(formatdate(time.time() + 20, usegmt=True)) <= 20
    assert seconds_to_wait("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert seconds_to_wait("Wed, 21 Oct 2915 07:28:00 GMT") == RETRY_AFTER_MAX


def test_backoff_doubles_with_full_jitter(serve, monkeypatch):
    bounds = []
    monkeypatch.setattr(random, "uniform", lambda low, high: bounds.append((low, high)) or 0.0)
    server = serve(lambda item, call: refusal(500))
    ask(writer_of(server, backoff=20, retries=4), requests_of(1))
    assert bounds[:4] == [(0, 20), (0, 40), (0, 60), (0, 60)]


def test_what_is_sent(serve):
    server = serve()
    message = {"role": "system", "content": "item-0 “é” \ud83d"}        # a half surrogate, as cut text may hold
    ask(writer_of(server), [Request("k", [message], temperature=0.7, max_tokens=9, seed=5)])
    assert server.bodies == [{"model": "m", "messages": [message], "temperature": 0.7, "max_tokens": 9, "seed": 5}]
    assert "Authorization" not in server.headers[0]


def test_a_text_that_no_file_could_hold_is_journaled(serve, tmp_path):
    server = serve(lambda item, call: completion("so \ud83d “sorry”\u2028"))
    path = tmp_path / "journal.jsonl"
    answers = ask(writer_of(server), requests_of(1), Journal(path))
    assert answers == [Answer("so ? “sorry”\u2028")] == ask(writer_of(server), requests_of(1), Journal(path))


def test_the_key_is_in_the_header_and_nowhere_else(serve, monkeypatch, tmp_path, capfd, caplog):
    monkeypatch.setenv("MY_KEY", KEY + "\n")        # as read from a file
    echo = {"item-0": (400, json.dumps({"error": {"message": f"bad key {KEY}"}}).encode(), {}),
            "item-1": (400, b"x" * 280 + KEY.encode(), {}), "item-2": completion(f"your key is {KEY}"),
            "item-3": (500, f"{KEY} {KEY}".encode(), {}), "item-4": "drop", "item-5": (400, KEY.join("ab").encode() * 50, {})}
    server = serve(lambda item, call: echo.get(item))
    writer = writer_of(server, key_env="MY_KEY", retries=1)
    answers = ask(writer, requests_of(8), Journal(tmp_path / "journal.jsonl"), progress="asking")
    assert {h["Authorization"] for h in server.headers} == {f"Bearer {KEY}"}
    assert "bad key [key]" in answers[0].error and answers[2].text == "your key is [key]" and len(answers[5].error) == 300
    kept = "".join(path.read_text("utf-8") for path in tmp_path.iterdir())
    for place in (kept, repr(answers), repr(writer), repr(vars(writer)), writer.name, *capfd.readouterr(), caplog.text):
        assert KEY not in place and KEY[:12] not in place
    monkeypatch.setenv("MY_KEY", KEY + "\r\nX: y")
    with pytest.raises(ValueError, match="variable MY_KEY holds characters") as caught:
        writer_of(server, key_env="MY_KEY")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("url, options, words", [
    ("ftp://host/v1", {}, "ftp://host/v1 is not"), ("http:///v1", {}, "is not the http"),
    ("http://h", {"workers": 0}, "workers 0"),
    ("http://h", {"timeout": 0}, "timeout 0"), ("http://h", {"retries": -1}, "retries -1")])
def test_bad_options_are_named(url, options, words):
    with pytest.raises(ValueError, match=words):
        EndpointWriter(url, "m", **options)


def test_a_password_in_the_url_is_refused_and_not_repeated():
    with pytest.raises(ValueError, match="no user name or password") as caught:
        EndpointWriter("http://me:hunter2@host/v1", "m")
    assert "hunter2" not in str(caught.value)


# --- killed and resumed: processes forked from one that has done the slow imports ---

FORKER = """
import json, os, signal, sys
from escrag_min.writers.endpoint import EndpointWriter
from escrag_min.writers.journal import Journal, Request, ask
for line in iter(sys.stdin.readline, ""):
    url, path, n = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        writer = EndpointWriter(url, "m", workers=4, backoff=0.01)
        ask(writer, [Request(f"item-{i}", [{"role": "user", "content": f"item-{i}"}]) for i in range(n)], Journal(path))
        sys.exit(0)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def forker():
    """forker(url, path, n): start a child that asks for n items -> (its pid, wait() -> its exit status)"""
    process = subprocess.Popen([sys.executable, "-c", FORKER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True, env={**os.environ, "no_proxy": "127.0.0.1"})

    def start(url, path, n):
        process.stdin.write(json.dumps([url, str(path), n]) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline()), lambda: int(process.stdout.readline())
    yield start
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_killed_ten_times_and_resumed_it_is_the_undisturbed_run_case57(serve, forker, tmp_path):
    rng, n = random.Random(1), 120
    server = serve(lambda item, call: refusal(429) if call == 0 and item.endswith("5") else None, pause=0.01)
    path = tmp_path / "journal.jsonl"
    kept = []               # after each kill: the number of calls so far, the keys in the journal
    for _ in range(10):
        before = len(server.calls)
        pid, wait = forker(server.url, path, n)
        wait_for(lambda: len(server.calls) > before)
        time.sleep(rng.uniform(0, 0.06))
        os.kill(pid, signal.SIGKILL)
        assert wait() == signal.SIGKILL
        kept.append((len(server.calls), {key for key, _ in Journal(path).answers}))
    _, wait = forker(server.url, path, n)
    assert wait() == 0
    assert 0 < len(kept[-1][1]) < n
    for calls, journaled in kept:
        assert not journaled & set(server.calls[calls:])
    _, wait = forker(server.url, tmp_path / "undisturbed.jsonl", n)
    assert wait() == 0
    undisturbed = Journal(tmp_path / "undisturbed.jsonl").answers
    assert Journal(path).answers == undisturbed and len(undisturbed) == n
    assert len(path.read_text().splitlines()) == n


def test_ctrl_c_ends_at_once_and_keeps_what_is_done(serve, forker, tmp_path):
    server = serve(lambda item, call: None if item < "item-3" else "stall")
    path = tmp_path / "journal.jsonl"
    pid, wait = forker(server.url, path, 10)
    wait_for(lambda: len(server.calls) == 7 and path.exists() and path.read_bytes().count(b"\n") == 3)     # all 4 workers wait
    began = time.monotonic()
    os.kill(pid, signal.SIGINT)
    assert wait() != 0 and time.monotonic() - began < 3
    assert len(Journal(path).answers) == 3


# --- ask and the journal ---

class Recorder:
    name = "recorder"

    def __init__(self):
        self.asked = []

    def write(self, requests, on_answer):
        self.asked += [r.key for r in requests]
        for index in reversed(range(len(requests))):
            on_answer(index, Answer(f"{requests[index].messages[-1]['content']}!"))


def test_answers_come_in_the_order_of_requests_and_once(tmp_path):
    writer, requests, path = Recorder(), requests_of(5), tmp_path / "folder" / "journal.jsonl"
    expected = [Answer(f"item-{i}!") for i in range(5)]
    assert ask(writer, requests[1:3], Journal(path)) == expected[1:3]
    assert ask(writer, requests, Journal(path)) == expected
    assert ask(writer, requests, Journal(path)) == expected == ask(writer, requests)
    assert writer.asked == [f"item-{i}" for i in (1, 2, 0, 3, 4, 0, 1, 2, 3, 4)]
    assert ask(writer, []) == []


def test_two_requests_of_one_key_are_an_error():
    with pytest.raises(ValueError, match="two requests have the key 'item-0'"):
        ask(Recorder(), [*requests_of(2), *requests_of(1)])


def test_a_changed_call_is_asked_again_and_the_old_answer_stays(tmp_path):
    writer, journal = Recorder(), Journal(tmp_path / "journal.jsonl")
    base = {"key": "k", "messages": [{"role": "user", "content": "a"}]}
    variants = [base, {**base, "messages": [{"role": "user", "content": "b"}]}, {**base, "temperature": 1.0},
                {**base, "max_tokens": 5}, {**base, "seed": 1}]
    assert len({request_hash("w", Request(**v)) for v in variants} | {request_hash("w2", Request(**base))}) == 6
    assert request_hash("w", Request(**base)) == request_hash("w", Request(**{**base, "temperature": 0, "key": "other"}))
    for variant in variants + variants:
        ask(writer, [Request(**variant)], journal)
    assert len(writer.asked) == 5 and len({hash(Request(**v)) for v in variants}) == 4     # messages take no part in it


def test_a_journal_cut_anywhere_in_its_last_line_goes_on(tmp_path):
    path = tmp_path / "journal.jsonl"
    ask(ScriptedWriter(lambda r: "“é”"), requests_of(3), Journal(path))
    whole = path.read_bytes()
    second = whole.rfind(b"\n", 0, -1) + 1
    for size in range(second, len(whole)):
        path.write_bytes(whole[:size])
        assert len(Journal(path).answers) == 2 and path.read_bytes() == whole[:second]
    ask(ScriptedWriter(lambda r: "“é”"), requests_of(3), Journal(path))
    assert path.read_bytes() == whole
    path.write_bytes(whole[:20])
    assert Journal(path).answers == {} and path.read_bytes() == b""
    assert Journal(path).answers == {}


def test_a_broken_line_elsewhere_is_named(tmp_path):
    path = tmp_path / "journal.jsonl"
    ask(ScriptedWriter(lambda r: "x"), requests_of(3), Journal(path))
    lines = path.read_text().splitlines(keepends=True)
    for broken in ('{"key": "item-1", "ha\n', '{"key": "item-1", "hash": "0", "writer": "w"}\n', "[]\n",
                   '{"key": "item-1", "hash": "0", "writer": "w", "text": null}\n'):
        path.write_text(lines[0] + broken + lines[2])
        with pytest.raises(ValueError, match="journal.jsonl:2"):
            Journal(path)


def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path):
    path = tmp_path / "notes.json"
    path.write_text('{\n  "a": 1\n}')
    with pytest.raises(ValueError, match="notes.json: its last line is not a journal's"):
        Journal(path)
    assert path.read_text() == '{\n  "a": 1\n}'


def test_every_line_is_one_write_and_on_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), fsync(fd)))
    path = tmp_path / "journal.jsonl"
    ask(ScriptedWriter(lambda r: "x"), requests_of(3), Journal(path))
    lines = path.read_bytes().splitlines(keepends=True)
    assert synced == [len(b"".join(lines[:i])) for i in (1, 2, 3)]


def test_a_scripted_writer_says_that_it_is_one():
    assert ScriptedWriter(str).name == "scripted" and ScriptedWriter(str, "client").name == "scripted:client"


# --- the local model ---

@pytest.fixture(scope="module")
def local(tiny):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)        # matrices so small that a second thread only waits, long where the cores are busy
    yield LocalWriter(tiny, batch_size=3)
    torch.set_num_threads(threads)


def talk(i, **options):
    return Request(f"{i}", [{"role": "user", "content": "I feel alone. " * (i + 1)}], **{
        "temperature": 1.0, "max_tokens": 8, "seed": i, **options})


def test_a_text_is_the_same_alone_and_in_a_batch(local):
    requests = [talk(i) for i in (5, 0, 3, 1, 4)] + [talk(6, temperature=0.5), talk(7, max_tokens=4), talk(8, temperature=0)]
    together = ask(local, requests)
    assert [ask(local, [r])[0] for r in requests] == together
    assert len({a.text for a in together[:7]}) == 7         # the last, greedy, may be empty: the model is untrained
    assert not any(a.error or "<|" in a.text for a in together[:7])


def test_same_seed_same_text_other_seed_other_text(local):
    messages = talk(0).messages
    a, b, c = ask(local, [Request(k, messages, 1.0, 10, seed) for k, seed in (("a", 1), ("b", 1), ("c", 2))])
    assert a.text == b.text != c.text


def test_a_prompt_that_does_not_fit_is_a_permanent_error(local):
    fits, not_fits = ask(local, [talk(0), talk(1, max_tokens=4096)])
    assert fits.text and not_fits.permanent and "max_tokens 4096 are over the model's 4096 positions" in not_fits.error


def test_a_stop_token_ends_a_text_and_one_without_a_word_is_an_error(local, monkeypatch):
    whole = ask(local, [talk(0)])[0].text
    assert ask(local, [talk(0)])[0].cut
    monkeypatch.setattr(local.tokenizer, "stop_tokens", tuple(range(len(local.tokenizer))))
    first = ask(local, [talk(0)])[0].text
    assert first != whole and whole.startswith(first) and not ask(local, [talk(0)])[0].cut
    monkeypatch.setattr(local.tokenizer, "control", set(range(len(local.tokenizer))))
    assert ask(local, [talk(0)]) == [Answer(None, "the text is empty", True)]


def test_the_name_tells_checkpoints_apart(local, tiny, tmp_path):
    assert local.name == f"local:tiny-{fingerprint(tiny)}"
    model = Qwen2.from_pretrained(tiny)
    model.save_pretrained(tmp_path / "a", tiny)
    model.model.norm.weight.data += 1e-3
    model.save_pretrained(tmp_path / "b", tiny)         # the same sizes, other weights
    model.save_pretrained(tmp_path / "c", tiny)
    write_json(tmp_path / "c" / "config.json", {**read_json(tmp_path / "c" / "config.json"), "rope_theta": 1e4})
    assert len({fingerprint(tmp_path / name) for name in "abc"}) == 3 == len(fingerprint(tiny)) - 5


def test_open_writer(tiny):
    writer = open_writer("https://host/v1/", model="big", key_env="K", workers=3)
    assert writer.url == "https://host/v1/chat/completions" and (writer.name, writer.workers) == ("endpoint:big", 3)
    with pytest.raises(ValueError, match="https://host/v1 is an endpoint: name its model with --api-model"):
        open_writer("https://host/v1", model="")
    assert open_writer(str(tiny), model="", key_env="K", workers=3).name.startswith("local:tiny-")
    with pytest.raises(FileNotFoundError, match="no such model folder"):
        open_writer("./nowhere")
