"""Dense weights in safetensors files: to start a run from, and exported from a run.

Names are the trainer's, or Hugging Face's for Llama; both are read.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from thinwire import eco
from thinwire.errors import CheckpointError, ConfigError
from thinwire.train.arguments import Arguments
from thinwire.train.config import Config, Model
from thinwire.train.model import Transformer, build
from thinwire.train.optim import store_weights
from thinwire.train.parse import from_dict
from thinwire.train.saved import newest_checkpoint, read_meta, replica_key, run_folder

__all__ = ["export_run", "from_hf_name", "hf_config", "load_dense", "main", "to_hf_name"]

_PARTS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn.wq.weight": "self_attn.q_proj.weight",
    "attn.wk.weight": "self_attn.k_proj.weight",
    "attn.wv.weight": "self_attn.v_proj.weight",
    "attn.wo.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.w1.weight": "mlp.gate_proj.weight",
    "mlp.w2.weight": "mlp.down_proj.weight",
    "mlp.w3.weight": "mlp.up_proj.weight",
}
_WHOLE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_BACK = {v: k for k, v in (_PARTS | _WHOLE).items()}


def to_hf_name(name: str) -> str:
    """Return a parameter's name in Hugging Face's Llama.

    Raises:
        ConfigError: Llama has no such parameter (experts).
    """
    if name in _WHOLE:
        return _WHOLE[name]
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if found is None or found[2] not in _PARTS:
        raise ConfigError(
            f"Hugging Face's Llama has no parameter like {name!r} (a model with experts?): export "
            "with --names thinwire"
        )
    return f"model.layers.{found[1]}.{_PARTS[found[2]]}"


def from_hf_name(name: str) -> str:
    """Return the trainer's name of a Llama parameter; other names as they are."""
    if name in _BACK:
        return _BACK[name]
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    return f"layers.{found[1]}.{_BACK[found[2]]}" if found and found[2] in _BACK else name


def hf_config(cfg: Model, seq_len_tokens: int) -> dict[str, Any]:
    """Return the config.json that Hugging Face reads beside the weights."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": cfg.dim,
        "intermediate_size": cfg.hidden_dim,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "max_position_embeddings": seq_len_tokens,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "tie_word_embeddings": cfg.tie_embeddings,
        "torch_dtype": "float32",
        "vocab_size": cfg.vocab_size,
    }


@torch.no_grad()
def load_dense(model: Transformer, config: Config) -> None:
    """Fill this rank's part of a model from `config.init`, before weights are stored or sharded.

    Raises:
        ConfigError: no such file, parameters missing, or other shapes.
    """
    path = Path(config.init)
    try:
        tensors = {from_hf_name(k): v for k, v in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot start from init {path}: {error}; export a run with `thinwire export RUN "
            f"--out {path}`"
        ) from None
    for name, param in model.named_parameters():
        if name not in tensors:
            raise ConfigError(f"init {path} holds no parameter {name!r}")
        whole = tensors[name]
        if whole.shape != param.shape:
            raise ConfigError(
                f"init {path}: {name!r} is {tuple(whole.shape)}, the model's {tuple(param.shape)}"
            )
        data: Tensor = param.data
        if isinstance(data, DTensor):
            whole, data = _piece(data, whole), data.to_local()
        data.copy_(whole)


def _piece(param: DTensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor that every rank holds whole."""
    for axis, placement in enumerate(param.placements):
        if placement.is_shard():
            size, dim = param.device_mesh.size(axis), placement.dim  # type: ignore[attr-defined]
            whole = whole.chunk(size, dim)[param.device_mesh.get_local_rank(axis)]
    return whole


def export_run(folder: Path, out: Path, names: str) -> Path:
    """Write a run's newest checkpoint as one dense safetensors file, in a single process.

    Args:
        folder: the run's folder or a checkpoint.
        out: the file; with names "hf" config.json is written beside it.
        names: "hf" (Hugging Face's Llama) or "thinwire".

    Returns:
        `out`.

    Raises:
        ConfigError: no checkpoint, unknown names, or a model that Llama's names don't cover.
        CheckpointError: unreadable.
    """
    if names not in ("hf", "thinwire"):
        raise ConfigError(f"--names must be hf or thinwire, got {names!r}")
    checkpoint = newest_checkpoint(folder)
    config = from_dict(read_meta(checkpoint)["config"])
    model = build(config.model, config.data.seq_len_tokens, config.seed)
    if config.systems.storage.fmt != "dense":
        store_weights(config.systems.storage, model)
    plain = eco.plain_state_dict(model.state_dict())
    # Replicas that train apart are equal at the end of a round; between, the first one counts.
    apart = config.systems.outer.method != "none"
    state = {"model": {replica_key(0): plain} if apart else plain}
    try:
        load(state, checkpoint_id=checkpoint, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise CheckpointError(f"cannot read checkpoint {checkpoint}: {error}") from None
    eco.load_plain_state_dict(model, plain)
    dense = {k: v.contiguous() for k, v in eco.dense_state_dict(model).items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    if names == "hf":
        dense = {to_hf_name(k): v for k, v in dense.items()}
        text = json.dumps(hf_config(config.model, config.data.seq_len_tokens), indent=2)
        (out.parent / "config.json").write_text(text + "\n")
    save_file(dense, out, metadata={"format": "pt"})
    return out


def main(args: list[str]) -> int:
    """Run `thinwire export DIR [--out FILE] [--names hf|thinwire]`."""
    parser = Arguments(prog="thinwire export", description="Write a run's weights, dense.")
    parser.add_argument("folder", type=Path, help="a run with checkpoints, or a checkpoint")
    parser.add_argument("--out", type=Path, help="default: model.safetensors in the run's folder")
    parser.add_argument("--names", default="hf", help="hf (Llama, default) or thinwire")
    given = parser.parse_args(args)
    out = given.out or run_folder(given.folder) / "model.safetensors"
    print(f"wrote {export_run(given.folder, out, given.names)}")  # noqa: T201
    return 0
