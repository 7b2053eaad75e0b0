"""Hugging Face folders to modules and back: config.json, *.safetensors (one file or shards with an index), tokenizer files.

Loading builds the module on the meta device and puts each tensor in its place as it is read, so that the weights exist
once; where the module is sharded, each rank reads its own rows only. Saving writes into a temporary folder beside the target
and renames it: a folder that exists is complete.
"""
import json
import os
import shutil
import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from escrag_min.qwen2 import Config

SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
                   "added_tokens.json", "chat_template.jinja", "generation_config.json")


def resolve(path_or_hub_id):
    """A local folder, or a Hub id such as Qwen/Qwen2.5-3B-Instruct (downloaded once by huggingface_hub) -> Path."""
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    parts = str(path_or_hub_id).split("/")
    if len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~") or path.exists():
        raise FileNotFoundError(f"{path_or_hub_id}: no such model folder")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(str(path_or_hub_id), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except Exception as error:   # offline, unknown id, gated: many kinds, one meaning
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(f"{path_or_hub_id}: neither a model folder here nor to be had from the Hub ({reason})") from None


def read_json(path):
    """A JSON object from a file; the error names the file."""
    try:
        value = json.loads(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_config(folder):
    """config.json of a Qwen-2.5 folder, in the dialect of any transformers version -> Config.

    Refused, because it would be computed wrong: another model_type, a rotary scaling, sliding-window attention,
    an activation other than SiLU.
    """
    path = Path(folder) / "config.json"
    raw = read_json(path)
    if raw.get("model_type") != "qwen2":
        raise ValueError(f"{path}: model_type is {raw.get('model_type')!r}; only 'qwen2' (Qwen-2.5) is supported")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"{path}: rotary scaling {kind!r} is not supported; only 'default'")
    if raw.get("use_sliding_window"):
        raise ValueError(f"{path}: use_sliding_window is true; only full attention is supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act is {raw['hidden_act']!r}; only 'silu' is supported")
    try:
        heads = raw["num_attention_heads"]
        return Config(
            vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"], intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"], num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads", heads),
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 1e4),   # 1e4: transformers' own default
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6), tie_word_embeddings=raw.get("tie_word_embeddings", False),
            max_position_embeddings=raw.get("max_position_embeddings", 32768), raw=raw)
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing") from None


def weight_files(folder):
    """The *.safetensors files of a folder, all of them present."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index)["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder / name}: no such file; a model folder holds model.safetensors, or shards "
                                    "and model.safetensors.index.json")
    return [folder / name for name in names]


def read_tensors(folder):
    """Yield (name, view, shape) of a folder's weights; view[rows] reads those rows, view[:] all."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    view = file.get_slice(name)
                    yield name, view, torch.Size(view.get_shape())
        except SafetensorError as error:
            raise ValueError(f"{path}: not a complete safetensors file ({error})") from None


def fill(module, folder, device, new=(), ignore=lambda name: False, rename=str, read=None):
    """Give a module on the meta device the weights of a folder, in the module's dtype, each as it is read: they exist once.

    new      parameters the folder may lack; they start at zero
    ignore   name -> whether the folder may hold it without the module needing it; any other is an error
    rename   the file's name of a weight -> the module's
    read     (parameter, view) -> tensor: what this process keeps of a weight; None: all of it
    """
    read = read or (lambda parameter, view: view[:].to(device, parameter.dtype, copy=True))
    expected = dict(module.named_parameters())      # a tied head is not listed twice
    found = {}
    for name, view, shape in read_tensors(folder):
        name = rename(name)
        if name in expected:
            if shape != expected[name].shape:
                raise ValueError(f"{folder}: {name} has shape {list(shape)}, config.json implies {list(expected[name].shape)}")
            found[name] = read(expected[name], view)
        elif not ignore(name):
            raise ValueError(f"{folder}: unexpected weight {name}")
    for name in sorted(expected.keys() - found.keys()):
        if name not in new:
            raise ValueError(f"{folder}: weight {name} is missing")
        found[name] = read(expected[name], torch.zeros(expected[name].shape))
    module.load_state_dict(found, strict=False, assign=True)     # strictness was checked by name above


def load(cls, path_or_hub_id, dtype=torch.float32, device="cpu", new=(), ignore=(), shard=None):
    """A module cls(config) with a Qwen-2.5 folder's weights, in evaluation mode.

    new, ignore   names, see fill
    shard         module -> read, see fill: cuts the still empty module over ranks (parallel.shard)
    """
    folder = resolve(path_or_hub_id)
    config = read_config(folder)
    with torch.device("meta"):
        module = cls(config).to(dtype)
    ignored = {*ignore, *(["lm_head.weight"] if config.tie_word_embeddings else [])}     # a redundant head: it stays tied
    fill(module, folder, device, new, lambda name: name in ignored or name.endswith("rotary_emb.inv_freq"),
         read=shard(module) if shard else None)
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    return module.eval().requires_grad_(True)


@contextmanager
def atomic_folder(path):
    """A new temporary folder that becomes `path` when the block ends well, and disappears when it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{path.name}.tmp-", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():       # replace: the old one steps aside first and goes last
            old = Path(tempfile.mkdtemp(prefix=f"{path.name}.tmp-", dir=path.parent))
            os.rename(path, old / path.name)
            try:
                os.rename(temporary, path)
            except BaseException:
                os.rename(old / path.name, path)
                raise
            shutil.rmtree(old)
        else:
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path, value):
    """Write or replace a JSON file, never leaving half of one."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
    os.replace(part, path)


def plan_files(module, dtype=None):
    """Which weights go into which file -> ([[name, ...], ...], bytes in all); a file has at most SHARD_BYTES, or one weight."""
    files, size, total = [[]], 0, 0
    for name, parameter in module.named_parameters():        # lists a tied weight once
        nbytes = parameter.numel() * (dtype or parameter.dtype).itemsize
        if files[-1] and size + nbytes > SHARD_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
        total += nbytes
    return files, total


def save(module, path, tokenizer_from=None, dtype=None, architecture="Qwen2ForCausalLM", extra=None, whole=lambda p: p):
    """Write module as a Hugging Face folder that transformers and vLLM load, one file of at most SHARD_BYTES after another.

    path             None: do not write, but call `whole` as the process that does (the other ranks)
    tokenizer_from   folder or Hub id whose tokenizer and generation files are copied along
    dtype            of the written weights; None: as they are. float32 weights keep updates that bf16 would round away.
    extra            further keys for config.json
    whole            parameter -> all of it
    Tied weights are written once. More than one file gets an index.
    """
    parameters = dict(module.named_parameters())
    files, total = plan_files(module, dtype)
    names = ["model.safetensors"] if len(files) == 1 else [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    with atomic_folder(path) if path else nullcontext() as folder:
        for name, members in zip(names, files):
            tensors = {}
            for member in members:
                tensor = whole(parameters[member]).detach()
                if folder:
                    tensors[member] = tensor.to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
            if folder:
                save_file(tensors, folder / name, metadata={"format": "pt"})
        if not folder:
            return
        written = str(dtype or next(iter(parameters.values())).dtype).removeprefix("torch.")
        config = {**module.config.raw, "architectures": [architecture], **(extra or {})}
        for key in ("torch_dtype", "dtype"):
            if key in config or key == "torch_dtype" and "dtype" not in config:
                config[key] = written
        write_json(folder / "config.json", config)
        if len(files) > 1:
            write_json(folder / "model.safetensors.index.json", {
                "metadata": {"total_size": total},
                "weight_map": {member: name for name, members in zip(names, files) for member in members}})
        if tokenizer_from:
            source = resolve(tokenizer_from)
            for name in TOKENIZER_FILES:
                if (source / name).exists():
                    shutil.copy(source / name, folder / name)
