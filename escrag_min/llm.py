"""Who writes the text of a role (paper §3 and §4: client, counselor, judge), and a journal so that nothing is paid for twice.

    ask(writer, requests, journal) -> answers        a Request is messages and how to sample; an Answer text, or an error

    LocalWriter       a Qwen-2.5 folder, in this process
    EndpointWriter    an OpenAI-compatible server, POST {base_url}/chat/completions
    ScriptedWriter    a function: the stand-in of demo and tests

A writer has a name and write(requests, on_answer), which calls on_answer(index, Answer) as each is done, in any order but
always from the thread that called write. The journal holds an answer for each (key, hash) with

    hash = sha256(writer's name, messages, temperature, max_tokens, seed)

so a killed run goes on where it was, and a changed prompt is asked again. What may go better next time (a timeout, an
overloaded server) is not in the journal.
"""
import hashlib
import http.client
import json
import os
import queue
import random
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from itertools import groupby
from pathlib import Path
from urllib.parse import urlsplit

import torch
from tqdm import tqdm

from escrag_min.args import check
from escrag_min.chat import Tokenizer
from escrag_min.checkpoint import resolve, weight_files
from escrag_min.data import read_jsonl
from escrag_min.qwen2 import Qwen2
from escrag_min.sampling import sample
from escrag_min.training import compute_dtype, default_device

WAIT_MAX = 60.0             # seconds: no backoff is longer (ours)
RETRY_AFTER_MAX = 120.0     # seconds: nor is a server's own wish granted beyond this (ours)
ERROR_LENGTH = 300          # characters kept of an error
LINE_START = b'{"key": '    # of every line of a journal


@dataclass(frozen=True)
class Request:
    key: str                                # unique name of the call, such as "a-01/t2/candidate-1/reply"
    messages: list = field(hash=False)      # [{"role", "content"}, ...]
    temperature: float = 0.0
    max_tokens: int = 256
    seed: int = 0


@dataclass
class Answer:
    text: str | None            # None: there is none, and error says why
    error: str | None = None
    permanent: bool = False     # the same call would fail again


def open_writer(spec, *, model=None, batch_size=16, **endpoint):
    """A role's writer by its name on the command line: an http(s) URL -> EndpointWriter, else -> LocalWriter (folder, Hub id).

    model, endpoint: the server's model and EndpointWriter's options (key_env, workers, ...); a local model needs none of them.
    """
    if spec.startswith(("http://", "https://")):
        check(model, f"{spec} is an endpoint: name its model with --api-model")
        return EndpointWriter(spec, model, **endpoint)
    return LocalWriter(spec, batch_size)


def ask(writer, requests, journal=None, progress=None):
    """-> list of Answers in the order of requests. What the journal holds is not asked again.

    Texts and permanent errors are journaled as they come, other failures are not: the next run tries them again.
    progress: what a tqdm bar says; None: no bar.
    """
    seen = set()
    for request in requests:
        check(request.key not in seen, f"ask: two requests have the key {request.key!r}")
        seen.add(request.key)
    answers = [None if journal is None else journal.get(writer.name, request) for request in requests]
    wanted = [i for i, answer in enumerate(answers) if answer is None]
    with tqdm(total=len(requests), initial=len(requests) - len(wanted), desc=progress, disable=progress is None) as bar:
        def on_answer(index, answer):
            i = wanted[index]
            answers[i] = answer
            if journal is not None and (answer.text is not None or answer.permanent):
                journal.put(writer.name, requests[i], answer)
            bar.update()
        if wanted:
            writer.write([requests[i] for i in wanted], on_answer)
    return answers


# --- the journal ---

def request_hash(writer_name, request):
    """sha256 of everything an answer depends on, in hex. The key is not among it: it only names the call."""
    parts = [writer_name, request.messages, float(request.temperature), request.max_tokens, request.seed]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Journal:
    """Finished calls, one JSON line each: {"key", "hash", "writer", "text" or "error"}; the file is only ever appended to.

    A last line without its end (the run was killed in mid-write) is cut off; a broken line elsewhere is an error.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.answers = {}           # (key, hash) -> Answer
        if self.path.exists() and self._cut_to_whole_lines():
            for record, where in read_jsonl(self.path):
                self._keep(record, where)

    def _cut_to_whole_lines(self):
        """-> the file's size in bytes"""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        rest = content[whole:]
        if rest:        # cut nothing that a journal did not write: a wrong path must not cost anybody a file
            check(rest.startswith(LINE_START) or LINE_START.startswith(rest), f"{self.path}: its last line is not a journal's")
            os.truncate(self.path, whole)
        return whole

    def _keep(self, record, where):
        kind = "text" if "text" in record else "error"
        for name in ("key", "hash", "writer", kind):
            check(isinstance(record.get(name), str),
                  f'{where}: a journal line needs the texts "key", "hash", "writer" and "text" or "error"')
        self.answers[record["key"], record["hash"]] = Answer(record.get("text"), record.get("error"), kind == "error")

    def get(self, writer_name, request):
        """-> Answer or None"""
        return self.answers.get((request.key, request_hash(writer_name, request)))

    def put(self, writer_name, request, answer):
        """Append one line; it is on the disk when this returns."""
        record = {"key": request.key, "hash": request_hash(writer_name, request), "writer": writer_name}
        record |= {"error": answer.error} if answer.text is None else {"text": answer.text}
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:        # unbuffered: one write call a line
            written = file.write(line)
            if written != len(line):
                raise OSError(f"{self.path}: the disk took {written} of {len(line)} bytes")
            os.fsync(file.fileno())
        self.answers[record["key"], record["hash"]] = answer


# --- the writers ---

class ScriptedWriter:
    """A deterministic stand-in for demo and tests: script(request) -> text, no language model. Its name says so."""

    def __init__(self, script, name="scripted"):
        self.script = script
        self.name = name if name.startswith("scripted") else f"scripted:{name}"

    def write(self, requests, on_answer):
        for index, request in enumerate(requests):
            on_answer(index, Answer(self.script(request)))


def fingerprint(folder):
    """Eight hex digits that tell one checkpoint from another: of config.json, the weights' sizes and each file's last MiB."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        size = path.stat().st_size
        with open(path, "rb") as file:
            file.seek(max(0, size - 2**20))     # the end: two trainings of one model differ in nothing but the weights
            digest.update(f"{path.name} {size}".encode() + file.read())
    return digest.hexdigest()[:8]


class LocalWriter:
    """A Qwen-2.5 from a folder or the Hub: on CUDA if there is one, float32 weights, bf16 compute on CUDA.

    A request's random numbers come from its own seed, whatever it is batched with. What remains is rounding: matrix products
    of another batch may differ in the last digit (float32 on a CPU, hardly ever another token; bf16 on CUDA, now and then).
    """

    def __init__(self, folder, batch_size=16):
        check(batch_size >= 1, f"LocalWriter: batch_size {batch_size} must be at least 1")
        path = resolve(folder)
        self.batch_size, self.device = batch_size, default_device()
        self.tokenizer = Tokenizer.from_pretrained(path)
        self.model = Qwen2.from_pretrained(path, torch.float32, self.device)
        self.name = f"local:{Path(folder).resolve().name}-{fingerprint(path)}"

    def write(self, requests, on_answer):
        positions = self.model.config.max_position_embeddings
        fitting = []
        for index, request in enumerate(requests):
            ids = self.tokenizer.render(request.messages)
            if len(ids) + request.max_tokens > positions:
                on_answer(index, Answer(None, f"a prompt of {len(ids)} tokens and max_tokens {request.max_tokens} are over the "
                                              f"model's {positions} positions", permanent=True))
            else:
                fitting.append((request.temperature, request.max_tokens, len(ids), index, ids))
        fitting.sort()      # prompts of like length stand together: a batch's cache is as long as its longest row
        for (temperature, max_tokens), group in groupby(fitting, key=lambda item: item[:2]):
            group = [(index, ids) for _, _, _, index, ids in group]
            for start in range(0, len(group), self.batch_size):
                indices, prompts = zip(*group[start:start + self.batch_size])
                seeds = [requests[i].seed for i in indices]
                for index, text in zip(indices, self._texts(prompts, seeds, temperature, max_tokens)):
                    on_answer(index, Answer(text) if text.strip() else Answer(None, "the text is empty", permanent=True))

    def _texts(self, prompts, seeds, temperature, max_tokens):
        # generators on the CPU: the same numbers on every device
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        with compute_dtype(self.device):
            drawn = sample(self.model, prompts, 1, max_tokens, temperature, stop_tokens=self.tokenizer.stop_tokens,
                           vocab_size=len(self.tokenizer), generator=generators)
        return [self.tokenizer.decode(completion.tokens) for (completion,) in drawn]


class _EveryStatus(urllib.request.HTTPErrorProcessor):
    """Hand every response on as it is: a status is an answer here, and a redirect would take the key to another host."""

    def http_response(self, request, response):
        return response

    https_response = http_response


class EndpointWriter:
    """An OpenAI-compatible server, such as vLLM's or a provider's.

    base_url    up to and without /chat/completions: https://host/v1
    key_env     the environment variable that holds the key; unset: no Authorization header. The key is read for each call
                and stands in no attribute, message or file, not even where the server echoes it.
    workers     calls at the same time, at most
    timeout     seconds for one call
    retries     further calls after one that failed with 429, 5xx, a broken connection, a timeout, a body that is not whole or
                a text that is empty
    backoff     seconds: before retry k = 0, 1, ... it waits what Retry-After asks for, and uniform(0, backoff · 2^k) more

    Another 4xx is a permanent error after one call. 401, 403, 404 and redirects end the batch with a ValueError, since no
    call will fare better; what is under way is still waited for, and kept.
    """

    def __init__(self, base_url, model, key_env="OPENAI_API_KEY", workers=8, timeout=60.0, retries=5, backoff=1.0):
        url = urlsplit(base_url)
        check("@" not in url.netloc, "an endpoint's URL may hold no user name or password; the key comes from the environment")
        check(url.scheme in ("http", "https") and url.hostname, f"{base_url} is not the http(s) URL of an endpoint")
        check(workers >= 1, f"{base_url}: workers {workers} must be at least 1")
        check(timeout > 0 and retries >= 0 and backoff >= 0,
              f"{base_url}: timeout {timeout} must be > 0, retries {retries} and backoff {backoff} >= 0")
        url = url._replace(path=url.path.rstrip("/") + "/chat/completions", fragment="")
        self.url, self.where = url.geturl(), url.netloc + url.path
        self.model, self.key_env, self.name = model, key_env, f"endpoint:{model}"
        self.workers, self.timeout, self.retries, self.backoff = workers, timeout, retries, backoff
        self.opener = urllib.request.build_opener(_EveryStatus)
        self._key()     # a key that cannot be sent is said now

    def write(self, requests, on_answer):
        waiting, done, stop = queue.SimpleQueue(), queue.SimpleQueue(), threading.Event()
        for item in enumerate(requests):
            waiting.put(item)

        def work():
            try:
                while not stop.is_set():
                    index, request = waiting.get_nowait()
                    done.put((index, self._answer(request, stop)))
            except queue.Empty:
                pass
            except Exception as error:      # raised below, in the thread that called
                done.put(error)
            done.put(None)
        running, failure = min(self.workers, len(requests)), None
        try:
            for _ in range(running):        # daemons: nobody waits for them after Ctrl-C
                threading.Thread(target=work, daemon=True).start()
            while running:
                item = done.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    failure = failure or item
                    stop.set()
                else:
                    on_answer(*item)
        finally:
            stop.set()
        if failure:
            raise failure

    def _answer(self, request, stop):
        """Call until there is a text, a permanent error, or no retry left (none are once `stop` is set)."""
        for attempt in range(self.retries + 1):
            answer, asked_wait = self._call(request)
            if answer.text is not None or answer.permanent:
                return answer
            wait = asked_wait + random.uniform(0, min(WAIT_MAX, self.backoff * 2**attempt))     # full jitter
            if attempt == self.retries or stop.wait(wait):
                return Answer(None, f"{answer.error} (call {attempt + 1} of {self.retries + 1})")

    def _call(self, request):
        """One call -> (Answer, seconds the server wants us to wait). ValueError where no call can succeed."""
        key = self._key()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        body = {"model": self.model, "messages": request.messages, "temperature": request.temperature,
                "max_tokens": request.max_tokens, "seed": request.seed}
        post = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        deadline = time.monotonic() + self.timeout
        try:
            with self.opener.open(post, timeout=self.timeout) as response:
                content = b""
                while chunk := response.read1():        # piece by piece: a trickle must not outlive the timeout
                    content += chunk
                    if time.monotonic() > deadline:
                        raise TimeoutError
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error        # what the wrapper holds
            text = f"no answer within {self.timeout:g} s" if isinstance(reason, TimeoutError) else \
                f"the connection failed ({type(reason).__name__}: {reason})"
            return self._clean(Answer(None, text), key), 0.0
        if response.status in (401, 403, 404) or 300 <= response.status < 400:
            why = {401: "the key is missing or refused", 403: "the key is missing or refused",
                   404: f"no such path, or no model {self.model}"}.get(response.status, "a redirect, which is not followed")
            key_state = f"{self.key_env} is {'set' if key else 'not set'}"
            raise ValueError(self._clean(Answer(None, f"{self.where}: HTTP {response.status}, {why}; {key_state}"), key).error)
        return self._clean(read_answer(response.status, content), key), seconds_to_wait(response.headers.get("Retry-After"))

    def _key(self):
        key = os.environ.get(self.key_env, "").strip()
        check(key.isascii() and key.isprintable(), f"the environment variable {self.key_env} holds characters that no key has")
        return key

    @staticmethod
    def _clean(answer, key):
        """The key taken out, should the server have echoed it; half surrogates too, which no UTF-8 file can hold."""
        text, error = (s and s.encode("utf-8", "replace").decode() for s in (answer.text, answer.error))
        if key and error:       # before it is cut: half a key is no better
            error = error.replace(key, "[key]")
        if len(key) >= 8 and text:      # shorter ones (EMPTY, none, x) are no secret, and may be a word
            text = text.replace(key, "[key]")
        return Answer(text, error and error[:ERROR_LENGTH], answer.permanent)


def read_answer(status, content):
    """HTTP status and body (bytes) of a chat completion -> Answer. 2xx, 429 and 5xx without a text are worth another call."""
    try:
        value = json.loads(content)
    except ValueError:
        value = None
    good = 200 <= status < 300
    if good and value is None:
        return Answer(None, f"HTTP {status}, but the body is not whole JSON")
    try:
        text = value["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if good and isinstance(text, str) and text.strip():
        return Answer(text)
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    if value is None:
        message = content.decode("utf-8", "replace")
    if good:
        message = "the text is empty" if text is not None else f"no choices[0].message.content in {message}"
    return Answer(None, f"HTTP {status}: {message}", permanent=400 <= status < 500 and status != 429)


def seconds_to_wait(retry_after):
    """A Retry-After header (seconds, an HTTP date, or None) -> seconds from now, between 0 and RETRY_AFTER_MAX."""
    if not retry_after:
        return 0.0
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(0.0, seconds), RETRY_AFTER_MAX)
