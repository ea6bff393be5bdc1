"""llama.cpp as a contender: the same weights, written as a GGUF file in the model's dtype and in 8 and 4 bits.

It computes on the CPU, whatever the backend. Its cache is in float16, its default.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal.bench.llama_process import Prepare, serve
from hal.bench.plan import BenchmarkError, Setting
from hal.bench.workload import Contender, Inputs, prompts
from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.gguf.families import FAMILIES, OUTER, Family
from hal.checkpoint.gguf.gguf_header import is_gguf
from hal.config.optional_libraries import need
from hal.nn.rope_parameters import Llama3Rope, RopeParameters

TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
QUANTIZED = ("Q8_0", "Q4_0")
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""Keys of metadata by those of config.json."""


class LlamaSide:
    """llama.cpp with the checkpoint's own GGUF file, or with files that are written for it.

    Raises:
        ConfigError: llama-cpp-python is not installed.
        BenchmarkError: the weights cannot be written as GGUF.
    """

    def __init__(self, setting: Setting) -> None:
        need("llama_cpp", None, "--against llama.cpp")
        self._setting, self._exact = setting, TYPES[setting.dtype]
        plan = setting.plan
        self._file = Path(plan.checkpoint) if plan.checkpoint and is_gguf(Path(plan.checkpoint)) else None
        self.modes = ("file",) if self._file else (self._exact, *QUANTIZED)

    def contender(self, mode: str, inputs: Inputs) -> Contender:
        """Start a process with the weights in ``mode`` and fill its caches."""
        start = time.perf_counter()
        process = _Process(self._setting, mode, self._file)
        decode, tokens = inputs.workload == "decode", inputs.tokens.tolist()
        try:
            rows = prompts(inputs.setting.meta.vocab_size, len(tokens) if inputs.prefilled else 1, inputs.length)
            cached = [rows[each % len(rows)] for each in range(len(tokens))] if decode else []
            process.ask(Prepare(cached, tokens, torch.get_num_threads()))
            process.ask("step")
        except BaseException:
            process.close()
            raise

        def logits(_: object) -> Tensor:
            values = torch.frombuffer(bytearray(process.ask("logits")), dtype=torch.float32)
            return values.view(inputs.batch_size, -1)

        return Contender(
            f"llama.cpp {mode}",
            lambda: process.ask("step"),
            lambda: process.ask("reset"),
            time.perf_counter() - start,
            process.close,
            logits=logits,
            # Of random weights the cache is random, too, and 4 bits are no rounding.
            comparable=mode not in QUANTIZED and (bool(inputs.prefilled) or not decode),
            fewer_bits=mode in QUANTIZED,
        )


class _Process:
    """A process that runs llama.cpp, with the file that it reads."""

    def __init__(self, setting: Setting, mode: str, file: Path | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hal-bench-")
        if file is None:
            file = Path(self._folder.name) / "model.gguf"
            write_gguf(setting.checkpoint, file, mode)
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, str(file)), daemon=True)
        self._process.start()
        other.close()

    def ask(self, request: Any) -> Any:
        """Return the answer to a request of :func:`hal.bench.llama_process.serve`."""
        try:
            self._connection.send(request)
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(1)
            raise BenchmarkError(
                f"the process of llama.cpp ended with the exit code {self._process.exitcode}",
                "omit --against llama.cpp, or try a smaller model or another build of llama-cpp-python",
            ) from error
        if isinstance(answer, Exception):
            raise BenchmarkError(str(answer), "omit --against llama.cpp") from answer
        return answer

    def close(self) -> None:
        """End the process and remove its file."""
        self._connection.close()
        self._process.join()
        self._folder.cleanup()


def write_gguf(checkpoint: Checkpoint, file: Path, kind: str) -> None:
    """Write the weights as a GGUF file without a tokenizer.

    Args:
        checkpoint: of a family in :data:`hal.checkpoint.gguf.families.FAMILIES` whose norms have no offset.
        kind: a type of ``gguf.GGMLQuantizationType``, for matrices; vectors are float32.

    Raises:
        ConfigError: the package ``gguf`` is not installed.
        BenchmarkError: the family or its rotary scaling is none of those, or ``rms_norm_eps`` is left out.
    """
    gguf = need("gguf", "gguf", "--against llama.cpp")
    config = checkpoint.config
    name, family = _family(checkpoint)
    if "rms_norm_eps" not in config:
        raise BenchmarkError(
            "config.json has no rms_norm_eps, which a GGUF file states", "add the model's, or omit --against llama.cpp"
        )
    writer = gguf.GGUFWriter(file, name)
    for key, spelled in KEYS.items():
        if config.get(key) is not None:
            writer.add_uint32(f"{name}.{spelled}", config[key])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = RopeParameters.from_config(config)
    writer.add_rope_freq_base(rope.rope_theta)
    writer.add_tokenizer_model("no_vocab")
    if isinstance(rope, Llama3Rope):
        device = torch.device("cpu")
        plain = RopeParameters(rope_theta=rope.rope_theta).inv_freq(head_dim, device)
        writer.add_tensor("rope_freqs.weight", (plain / rope.inv_freq(head_dim, device)).numpy())
    elif type(rope) is not RopeParameters or rope.partial_rotary_factor != 1:
        raise BenchmarkError(f"hal writes no GGUF file with rotary positions of {rope}", "omit --against llama.cpp")
    wanted = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[wanted][0]
    for stored, values in _tensors(checkpoint, family):
        chosen = wanted if values.ndim > 1 and values.shape[-1] % size == 0 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quants.quantize(values.numpy(), chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _family(checkpoint: Checkpoint) -> tuple[str, Family]:
    for name, family in FAMILIES.items():
        if family.architecture == checkpoint.architecture and not family.norm_offset and name != "mixtral":
            return name, family
    raise BenchmarkError(
        f"hal writes no GGUF file of {checkpoint.architecture}", "give the model's own GGUF file, or omit --against"
    )


def _tensors(checkpoint: Checkpoint, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the file in float32, under its names, with experts stacked and rows in its order."""
    config = checkpoint.config
    layers = range(config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = {f"{module}.weight": f"{name}.weight" for name, module in OUTER.items()}
    names |= {
        f"model.layers.{layer}.{module}.{part}": f"blk.{layer}.{name}.{part}"
        for layer in layers
        for name, module in family.names.items()
        for part in ("weight", "bias")
    }
    missing = set(checkpoint.tensors)
    for source, stored in names.items():
        sources = [source.format(each) for each in range(config.get("num_experts", 0))] if "{}" in source else [source]
        if not missing.issuperset(sources):
            continue
        missing.difference_update(sources)
        values = torch.stack([each.float() for _, each in checkpoint.read(sources)])
        if "{}" not in source:
            values = values[0]
        if family.interleaved and (count := heads.get(stored.split(".")[-2])):
            values = values.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
        yield stored, values
    if missing:
        raise BenchmarkError(
            f"a GGUF file has no name for {min(missing)}", "give the model's own GGUF file, or omit --against"
        )
