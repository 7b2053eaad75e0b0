"""vLLM as a peer of sampling, in a Python of its own (it wants versions of its own): ask it on stdin, it answers on stdout.

    {"prompts": [[ids]], "copies": 8, "new": 128, "temperature": 1.0}  ->  [[ids] a sample, prompt by prompt]

float32, at its defaults otherwise, after its own compilation and warm-up. Its prefix cache, by which the samples of a prompt
share it, is emptied between questions. This file is both sides: Worker is what a benchmark starts.
"""
import json
import os
import subprocess
import sys


class Worker:
    """vLLM in a process of the Python `python`; one question at a time, and idle otherwise."""

    def __init__(self, python, model):
        self.process = subprocess.Popen([python, __file__, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()

    def ask(self, **question):
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        for line in self.process.stdout:        # what it says of itself is not an answer
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError("vLLM has ended; what it said is above")


def serve(model):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    import vllm
    engine = vllm.LLM(model, dtype="float32", max_model_len=2048)
    print("answer", json.dumps(vllm.__version__), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        how = vllm.SamplingParams(n=question["copies"], temperature=question["temperature"], max_tokens=question["new"],
                                  min_tokens=question["new"], ignore_eos=True)
        engine.reset_prefix_cache()
        results = engine.generate([{"prompt_token_ids": ids} for ids in question["prompts"]], how, use_tqdm=False)
        print("answer", json.dumps([list(c.token_ids) for r in results for c in r.outputs]), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
