"""A checkpoint of a run as a Hugging Face folder, by one process, one file of
the folder at a time:

    python -m escrag_min.model.export runs/grpo/checkpoints/latest --out exported
"""
import argparse
from pathlib import Path

import torch

from escrag_min.model.checkpoint import read_config, read_json, resolve
from escrag_min.qwen2 import Qwen2
from escrag_min.reward import RewardModel
from escrag_min.runtime.args import check, run_script
from escrag_min.runtime.distributed import load_state
from escrag_min.runtime.runs import latest_options


def export(folder, out, model=None):
    """checkpoints/step-NNNNNN of a run -> folder `out` that transformers and vLLM load.

    model: where config.json and the tokenizer come from; None: what the run started from.
    """
    folder, out = Path(folder).resolve(), Path(out)
    check((folder / "state.json").exists(), f"{folder}: not a complete checkpoint (it has no state.json)")
    check(not out.exists(), f"--out {out} exists; choose another name")
    run = folder.parent.parent
    made = run / "tiny"         # of a run without --model
    config = read_json(run / "config.json")
    options = latest_options(config)
    source = resolve(model or options["model"] or made)
    reward = config["script"] == "train_rm"
    with torch.device("meta"):
        module = (RewardModel if reward else Qwen2)(read_config(source))
    names = {id(p): name for name, p in module.named_parameters()}

    def whole(parameter):
        tensor = torch.empty(parameter.shape)
        load_state({"model": {names[id(parameter)]: tensor}}, folder)
        return tensor
    if reward:
        module.mean, module.std, module.max_length = 0.0, 1.0, options["max_length"]
    module.save_pretrained(out, source, whole=whole)
    print(f"wrote {out}" + ("; its scores are not standardised, as those of a run's model/ and best/ are" if reward else ""))


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m escrag_min.model.export", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="checkpoints/step-NNNNNN of a run")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--model", help="model the run started from, where it has moved")
    args = parser.parse_args(argv)
    export(args.checkpoint, args.out, args.model)


if __name__ == "__main__":
    run_script(main)
