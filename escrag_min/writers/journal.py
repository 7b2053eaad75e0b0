"""Calls to a writer, and a journal of those that are finished, so that nothing is paid for twice.

    ask(writer, requests, journal) -> answers        a Request is messages and how to sample; an Answer text, or an error

The journal holds an answer for each (key, hash) with

    hash = sha256(writer's name, messages, temperature, max_tokens, seed)

so a killed run goes on where it was, and a changed prompt is asked again. What may go better next time (a timeout, an
overloaded server) is not in the journal.
"""
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from escrag_min.data import read_jsonl
from escrag_min.runtime.args import check

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
    cut: bool = False           # the text ends at max_tokens, not where its writer would have ended it

    def raw(self):
        """What to keep of it in a file for people."""
        return self.text if self.text is not None else f"failed: {self.error}"


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
    failed = [answer.error for answer in answers if answer.text is None]
    if failed and progress:
        print(f"{progress}: {len(failed)} of {len(answers)} calls have no answer; the first: {failed[0]}")
    return answers


def request_hash(writer_name, request):
    """sha256 of everything an answer depends on, in hex. The key is not among it: it only names the call."""
    parts = [writer_name, request.messages, float(request.temperature), request.max_tokens, request.seed]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Journal:
    """Finished calls, one JSON line each: {"key", "hash", "writer", "text" or "error"}, and "cut" where a text is; the file is
    only ever appended to.

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
        self.answers[record["key"], record["hash"]] = Answer(record.get("text"), record.get("error"), kind == "error",
                                                             record.get("cut", False))

    def get(self, writer_name, request):
        """-> Answer or None"""
        return self.answers.get((request.key, request_hash(writer_name, request)))

    def put(self, writer_name, request, answer):
        """Append one line; it is on the disk when this returns."""
        record = {"key": request.key, "hash": request_hash(writer_name, request), "writer": writer_name}
        record |= {"error": answer.error} if answer.text is None else {"text": answer.text}
        record |= {"cut": True} if answer.cut else {}
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:        # unbuffered: one write call a line
            written = file.write(line)
            if written != len(line):
                raise OSError(f"{self.path}: the disk took {written} of {len(line)} bytes")
            os.fsync(file.fileno())
        self.answers[record["key"], record["hash"]] = answer
