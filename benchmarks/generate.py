"""Sampling against transformers' generate, and with --vllm PYTHON (a Python that has it) against vLLM; float32.

    G8    8 samples of one prompt of 256 tokens, 128 new tokens, no stop
    G64   8 prompts of 64-512 tokens, 8 samples each, 128 new tokens
    R16   16 prompts of 64-512 tokens, one sample each, 128 new tokens
    Stop  G64 with stop tokens that are drawn every 40th time: what is finished must cost nothing

Checked: 16 greedy tokens of every prompt are those of the peers.
"""
import random
from functools import cache

import torch
from common import bandwidth, compare, ids_of, options, peer, wanted
from vllm_peer import Worker

from escrag_min.chat import Tokenizer
from escrag_min.qwen2 import Qwen2
from escrag_min.sampling import sample

NEW = 128


def prompt_lengths(workload, scale):
    if workload == "G8":
        return [256 * scale], 8
    n, copies = (16, 1) if workload == "R16" else (8, 8)
    return [(64 + (512 - 64) * i // (n - 1)) * scale for i in range(n)], copies


def main():
    parser = options(__doc__, ("G8", "G64", "R16", "Stop"))
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python that has vLLM, as another peer (not of Stop)")
    args = parser.parse_args()
    lengths, copies = prompt_lengths(args.workload, args.scale)
    tokenizer, model = Tokenizer.from_pretrained(args.model), Qwen2.from_pretrained(args.model)
    prompts = ids_of(tokenizer, lengths)
    stops = ()
    if args.workload == "Stop":
        stops = tuple(random.Random(0).sample(range(len(tokenizer)), len(tokenizer) // 40))
    seeds = iter(range(10**6))

    def ours():
        drawn = sample(model, prompts, copies, NEW, stop_tokens=stops, generator=torch.Generator().manual_seed(next(seeds)))
        return sum(len(c.tokens) for group in drawn for c in group)

    @cache
    def greedy():
        return [group[0].tokens for group in sample(model, prompts, 1, 16, temperature=0)]

    contenders, checked = {"ours": ours}, "not checked: no peer"
    if peer(args, "transformers"):
        from transformers import AutoModelForCausalLM
        theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
        width = max(lengths)
        padded = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

        def generate(new, **how):
            with torch.no_grad():
                return theirs.generate(padded, attention_mask=mask, max_new_tokens=new, pad_token_id=0, **how)[:, width:]

        def transformers():
            torch.manual_seed(next(seeds))
            out = generate(NEW, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=copies,
                           eos_token_id=list(stops) or None, **({} if stops else {"min_new_tokens": NEW}))
            ended = torch.isin(out, torch.tensor(stops, dtype=torch.long))
            first = torch.where(ended.any(1), ended.int().argmax(1) + 1, out.shape[1])
            return int(first.sum())
        expected = generate(16, do_sample=False, min_new_tokens=16, eos_token_id=None).tolist()
        assert greedy() == expected, "greedy tokens differ from transformers'"
        contenders["transformers"], checked = transformers, "greedy tokens equal"
    versions = {}
    if args.vllm and not stops and wanted(args, "vllm"):
        worker = Worker(args.vllm, args.model)
        versions["vllm"] = worker.version

        def vllm():
            drawn = worker.ask(prompts=prompts, copies=copies, new=NEW, temperature=1.0)
            return sum(map(len, drawn))
        assert greedy() == worker.ask(prompts=prompts, copies=1, new=16, temperature=0.0), "greedy tokens differ from vLLM's"
        contenders["vllm"], checked = vllm, "greedy tokens equal"
    size = sum(p.nbytes for p in model.parameters())
    limit = ("all rows, weights read once a step at the measured bandwidth", bandwidth() / size * len(prompts) * copies)
    compare(args, args.workload, contenders, "tok", None, limit, checked, versions)


if __name__ == "__main__":
    main()
