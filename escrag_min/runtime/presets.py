"""Presets: defaults for the paper's models and hardware (paper §4 and C), each value with its source.

    train_sft.py --preset sft-3b      and every option given beside it wins

The paper's Table 4 of hyper-parameters is not public: what is marked ours is ours.
"""
from dataclasses import dataclass

from escrag_min.runtime.args import check, parse
from escrag_min.runtime.distributed import say, size
from escrag_min.runtime.memory import plan

TINY = {"steps": (4, "ours: to see it run"), "limit": (24, "ours: to see it run")}
LARGE = {"tokens_per_batch": (8192, "ours: see --plan"), "checkpoint_blocks": (True, "ours: on above 1B parameters"),
         "keep_best": (True, "ours")}
SFT = {**LARGE, "limit": (500, "paper §3: 500 demonstrations"), "epochs": (3.0, "ours"), "batch_size": (16, "ours"),
       "lr": (1e-5, "ours")}
RM = {**LARGE, "epochs": (2.0, "ours"), "batch_size": (32, "ours"), "lr": (1e-5, "ours")}
GRPO = {**LARGE, "retrieve": (3, "paper §4"), "prompts_per_step": (16, "ours"), "group_size": (8, "ours"), "lr": (1e-6, "ours"),
        "max_prompt": (3072, "ours"), "max_new_tokens": (512, "ours"), "held_out": (0.02, "ours")}
QWEN_3B, QWEN_7B = ({"model": (f"Qwen/Qwen2.5-{size}-Instruct", f"paper §4 and C: {size}; Instruct is ours")}
                    for size in ("3B", "7B"))


@dataclass
class Preset:
    options: dict           # name of an option -> (value, source)
    ranks: int = 1          # GPUs (paper C)
    size: str = ""          # the Qwen-2.5 that trains, and that of the reward model: for --plan before there are weights
    reward_size: str = ""


PRESETS = {
    "train_sft": {
        "tiny": Preset({**TINY, "batch_size": (4, "ours"), "lr": (3e-3, "ours")}),
        "sft-3b": Preset({**QWEN_3B, **SFT}, 2, "3B"),
        "sft-7b": Preset({**QWEN_7B, **SFT}, 4, "7B")},
    "train_rm": {
        "tiny": Preset({**TINY, "batch_size": (4, "ours"), "lr": (1e-3, "ours")}),
        "rm-7b": Preset({**QWEN_7B, **RM}, 2, "7B")},
    "train_grpo": {
        "tiny": Preset({**TINY, "prompts_per_step": (4, "ours"), "group_size": (4, "ours"), "max_new_tokens": (32, "ours"),
                        "lr": (2e-4, "ours")}),
        "grpo-3b": Preset(GRPO, 2, "3B", "7B"),
        "grpo-7b": Preset(GRPO, 4, "7B", "7B")},
}


def parse_run(script, cls, description, argv=None):
    """A trainer's command line -> its Args, with --preset as defaults, said with their sources. None after --plan, which prints."""
    args = parse(cls, description, argv)
    preset = Preset({})
    if args.preset:
        preset = PRESETS[script].get(args.preset)
        check(preset, f"--preset {args.preset}: {script}.py has {', '.join(PRESETS[script])}")
        defaults = {name: value for name, (value, _) in preset.options.items()}
        if args.epochs != cls().epochs:     # asked for, and the preset's steps would win over it
            defaults.pop("steps", None)
        args = parse(cls, description, argv, defaults=defaults)
        say(f"preset {args.preset}" + (f", for {preset.ranks} GPUs (paper C)" if preset.size else ""))
        for name, (value, source) in preset.options.items():
            given = getattr(args, name)
            say(f"  --{name.replace('_', '-'):20} {given!s:30} " + (source if given == value else f"given; the preset has {value}"))
    if args.plan:
        say(plan(script, args, args.ranks or (preset.ranks if preset.size else size()), preset.size, preset.reward_size))
        return None
    check(not preset.size or args.model, f"--preset {args.preset}: name the policy to start from with --model")
    check(not preset.reward_size or args.reward_model, f"--preset {args.preset}: name the --reward-model")
    return args
