"""The GGUF file's weights, dequantised, as a folder in Hugging Face form, for peers that cannot read it.

    folder_of(gguf, root) -> ROOT/weights/<name of the file>/{config.json, model.safetensors}

float32, exactly what the file's numbers say: what Octavo computes with under --weights float32. No tokenizer,
as all workloads are token ids. Runs in this project's environment.
"""

from __future__ import annotations

import json
from pathlib import Path

DONE = "done.txt"  # path, size and time of the file that the folder was made of


def folder_of(gguf: Path, root: Path) -> Path:
    """The folder, made first if missing or out of date. Raises ValueError for a model that is not Llama."""
    from safetensors.numpy import save_file

    from octavo.models.gguf_config import config_from_gguf
    from octavo.models.gguf_file import GgufFile
    from octavo.models.gguf_loader import GgufWeights

    folder, status = root / "weights" / gguf.stem, gguf.stat()
    wanted = f"{gguf} {status.st_size} {status.st_mtime_ns}"
    if (folder / DONE).exists() and (folder / DONE).read_text() == wanted:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    file = GgufFile(gguf)
    config = config_from_gguf(file)
    if config.architecture != "LlamaForCausalLM" or config.rope.kind != "default":
        raise ValueError(f"{gguf} is {config.architecture} with {config.rope.kind} positions, not Llama")
    weights = GgufWeights(file, config)
    tensors = {name: weights.read(name).float().numpy() for name in weights.shapes()}
    tied = "lm_head.weight" not in tensors
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    (folder / DONE).write_text(wanted)
    return folder
