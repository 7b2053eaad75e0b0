"""A writer behind HTTP: any OpenAI-compatible server, POST {base_url}/chat/completions, by the standard library."""
import http.client
import json
import os
import queue
import random
import threading
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from escrag_min.runtime.args import check
from escrag_min.writers.journal import Answer

WAIT_MAX = 60.0             # seconds: no backoff is longer (ours)
RETRY_AFTER_MAX = 120.0     # seconds: nor is a server's own wish granted beyond this (ours)
RETRY = (408, 409, 425, 429)    # too slow, a conflict, too early, too many: may go better
ERROR_LENGTH = 300          # characters kept of an error


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
    retries     further calls after one that failed with a status of RETRY, 5xx, a broken connection, a timeout, a body that is
                not whole or a text that is empty
    backoff     seconds: before retry k = 0, 1, ... it waits what Retry-After asks for, and uniform(0, backoff · 2^k) more

    Another 4xx is a permanent error after one call. 401, 402, 403, 404 and redirects end the batch with a ValueError, since no
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
        if response.status in (401, 402, 403, 404) or 300 <= response.status < 400:
            why = {401: "the key is missing or refused", 402: "it wants to be paid", 403: "the key is missing or refused",
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
        return Answer(text, error and error[:ERROR_LENGTH], answer.permanent, answer.cut)


def read_answer(status, content):
    """HTTP status and body (bytes) of a chat completion -> Answer. 2xx, 5xx and RETRY without a text are worth another call."""
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
        return Answer(text, cut=value["choices"][0].get("finish_reason") == "length")
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    if value is None:
        message = content.decode("utf-8", "replace")
    if good:
        message = "the text is empty" if text is not None else f"no choices[0].message.content in {message}"
    return Answer(None, f"HTTP {status}: {message}", permanent=400 <= status < 500 and status not in RETRY)


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
