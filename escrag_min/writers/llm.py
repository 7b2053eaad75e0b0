"""Who writes the text of a role (paper §3 and §4: client, counselor, judge).

    LocalWriter       a Qwen-2.5 folder, in this process
    EndpointWriter    an OpenAI-compatible server (endpoint.py)
    ScriptedWriter    a function: the stand-in of demo and tests

A writer has a name and write(requests, on_answer), which calls on_answer(index, Answer) as each is done, in any order but
always from the thread that called write. Requests, answers and the journal of finished calls are in journal.py.
"""
import hashlib
from itertools import groupby
from pathlib import Path

import torch

from escrag_min.chat import Tokenizer
from escrag_min.model.checkpoint import resolve, weight_files
from escrag_min.model.decoding import pack_weights
from escrag_min.qwen2 import Qwen2
from escrag_min.runtime.args import check
from escrag_min.runtime.distributed import frozen_dtype, load
from escrag_min.sampling import sample
from escrag_min.writers.endpoint import EndpointWriter
from escrag_min.writers.journal import Answer


def open_writer(spec, *, model=None, **endpoint):
    """A role's writer by its name on the command line: an http(s) URL -> EndpointWriter, else -> LocalWriter (folder, Hub id).

    model, endpoint: the server's model and EndpointWriter's options (key_env, workers, ...); a local model needs none of them.
    """
    if spec.startswith(("http://", "https://")):
        check(model, f"{spec} is an endpoint: name its model with --api-model")
        return EndpointWriter(spec, model, **endpoint)
    return LocalWriter(spec)


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
    """A Qwen-2.5 from a folder or the Hub, on CUDA if there is one: its weights are bf16 on CUDA, float32 on a CPU.

    A request's random numbers come from its own seed, whatever it is batched with. What remains is rounding: matrix products
    of another batch may differ in the last digit (float32 on a CPU, hardly ever another token; bf16 on CUDA, now and then).
    """

    def __init__(self, folder, batch_size=16):
        check(batch_size >= 1, f"LocalWriter: batch_size {batch_size} must be at least 1")
        path = resolve(folder)
        self.batch_size = batch_size
        self.tokenizer = Tokenizer.from_pretrained(path)
        self.model = load(Qwen2, path, frozen_dtype())
        pack_weights(self.model)
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
                for index, answer in zip(indices, self._answers(prompts, seeds, temperature, max_tokens)):
                    on_answer(index, answer)

    def _answers(self, prompts, seeds, temperature, max_tokens):
        # generators on the CPU: the same numbers on every device
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        drawn = sample(self.model, prompts, 1, max_tokens, temperature, stop_tokens=self.tokenizer.stop_tokens,
                       vocab_size=len(self.tokenizer), generator=generators)
        texts = [(self.tokenizer.decode(completion.tokens), not completion.finished) for (completion,) in drawn]
        return [Answer(text, cut=cut) if text.strip() else Answer(None, "the text is empty", permanent=True) for text, cut in texts]
