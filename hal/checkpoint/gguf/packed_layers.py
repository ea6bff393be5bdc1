"""Linear layers and tied tables whose weights in a GGUF file stay packed, or are quantized anew."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import attrs
import torch
from torch import Tensor

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.gguf.gguf_files import GgufFiles
from hal.checkpoint.gguf.tensor_types import FORMS, WIDE, quantized_parts
from hal.checkpoint.quantized_layers import KEPT, TARGETS, QuantizedLayer, linear_layers, part_names, quantized_layer
from hal.checkpoint.safetensors_files import TensorInfo
from hal.config.settings import QuantizedWeights
from hal.device.device import Limits
from hal.nn import CausalLM, Embedding, Linear, QuantizedEmbedding, Weight
from hal.ops.forms import FLOAT, Form, pack_int4
from hal.quantization.stored_layer import FloatLayer, Reader, StoredAs, StoredLayer, Tensors, Writer

log = logging.getLogger("hal.checkpoint")


@attrs.frozen(slots=False)
class Blocks(Reader, Writer):
    """Numbers, scales and zero points of blocks, as :class:`~hal.checkpoint.gguf.gguf_files.GgufFiles` reads them.

    Attributes:
        kind: the type of the tensors.
    """

    kind: str

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        declare = stored.layer.declare
        scales = torch.float32 if self.kind in WIDE else torch.float16
        found = {
            "numbers": declare("numbers", dtype=torch.int8),
            "scales": declare("scales", dtype=scales, **stored.scales),
        }
        if stored.form.zero_points:
            found["zero_points"] = declare("zero_points", dtype=torch.float32, **stored.scales)
        return found

    def decode(self, stored: StoredLayer) -> Tensors:
        numbers, zero = stored["numbers"], stored.tensors.get("zero_points")
        return {
            "weight": stored.by_expert(pack_int4, numbers) if stored.form.numbers == "int4" else numbers,
            "weight_scale": stored.of_rank(stored["scales"]),
            "weight_zero_point": None if zero is None else stored.of_rank(zero),
            "bias": stored.tensors.get("bias"),
        }

    def write(self, layer: FloatLayer, form: Form) -> dict[str, Tensor]:
        return quantized_parts(self.kind, layer.name, layer.weight)


class Dequantizing(Reader):
    """The weight, which is dequantized as it is read."""

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        return {"weight": stored.layer.declare("weight", dtype=torch.float32)}

    def decode(self, stored: StoredLayer) -> Tensors:
        return stored.tensors


def pack_layers(
    model: CausalLM,
    checkpoint: Checkpoint,
    files: GgufFiles,
    weights: QuantizedWeights,
    limits: Limits,
    computing: torch.dtype,
) -> tuple[Checkpoint, dict[str, QuantizedLayer]]:
    """Replace linear layers of a model, and return the checkpoint with their tensors, and the replacements by path.

    Args:
        model: without values.
        checkpoint: of a GGUF file, with the model's names.
        weights: ``quantized_weights`` of a configuration. With ``kept``, layers whose parts have the same type, one of
            ``FORMS``, stay packed, and so does a table of embeddings that is the output projection; others are
            dequantized.
        limits: those of a backend. Types with other groups than it takes are dequantized, too.
        computing: the dtype of computation, for a warning that says their size.
    """
    if weights not in (KEPT, "w8a16", "w8a8_dynamic"):
        return checkpoint, {}
    tensors, found, types = dict(checkpoint.tensors), dict[str, QuantizedLayer](), set[str]()
    widened = list[tuple[str, int, int]]()
    layers = list(linear_layers(model))
    output = getattr(model, model.output_projection, None)
    if weights == KEPT and isinstance(output, Linear):
        layers.append((model.output_projection, output))
    tables = _tied_tables(model) if weights == KEPT else {}
    layers += [(path, each.linear()) for path, each in tables.items()]
    for path, linear in layers:
        names = part_names(path, linear)
        kinds: set[str]
        if any(f"{name}.weight" not in tensors for name in names):
            continue  # check_fit names what is missing
        kinds = {files.type_of(tensors[f"{name}.weight"].stored or f"{name}.weight") for name in names}
        kind = next(iter(kinds))
        if weights != KEPT:
            layer = quantized_layer(linear, names, StoredAs(FLOAT, Dequantizing()), TARGETS[weights])
        elif len(kinds) == 1 and kind in FORMS and (linear.bias is None or isinstance(linear, Linear)):
            form = FORMS[kind]
            if form.columns % limits.group_multiple:
                widened.append((kind, linear.nbytes(FLOAT, computing), linear.nbytes(form, computing)))
                continue
            layer = quantized_layer(linear, names, StoredAs(form, Blocks(kind)), form)
            types.add(kind)
            infos = {name: tensors.pop(f"{name}.weight") for name in names}
            if path in tables:
                assert isinstance(layer.module, Linear)
                model.set_submodule(path, QuantizedEmbedding(tables[path], layer.module))
                source, infos, path = f"{path}.weight", {f"{path}.table": infos[path]}, f"{path}.table"
                renamed = {source: f"{path}.numbers"}
                model.tied = {name: renamed.get(each, each) for name, each in model.tied.items()}
            for name, info in infos.items():
                tensors.update(_parts(name, info, kind))
        else:
            continue
        found[path] = layer
    if weights == KEPT:
        kept = ", ".join(sorted(types)) or "none has a type that can"
        log.info("the weights of %d of %d linear layers stay packed (%s)", len(found), len(layers), kept)
    if widened:
        kinds_of, after, before = zip(*widened, strict=True)
        log.warning(
            "quantized_weights is kept, but the backend takes only groups of multiples of %d, so that %d layers (%s) "
            "are dequantized: %d MiB in place of %d MiB; set quantized_weights to w8a16 or w8a8_dynamic, or use a file "
            "without these types",
            limits.group_multiple,
            len(widened),
            ", ".join(sorted(set(kinds_of))),
            sum(after) >> 20,
            sum(before) >> 20,
        )
    return attrs.evolve(checkpoint, tensors=tensors), found


def _tied_tables(model: CausalLM) -> dict[str, Embedding]:
    """Return the table of embeddings that is the output projection, by its path; a subclass stays as it is."""
    paths = {source.rpartition(".")[0] for source in model.tied.values()}
    return {path: each for path in paths if type(each := model.get_submodule(path)) is Embedding}


def _parts(name: str, info: TensorInfo, kind: str) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the parts of a packed weight as tensors."""
    stored = info.stored or f"{name}.weight"
    blocks = *info.shape[:-1], info.shape[-1] // FORMS[kind].columns
    yield f"{name}.numbers", attrs.evolve(info, dtype="I8", stored=f"{stored}#numbers")
    scales = "F32" if kind in WIDE else "F16"
    yield f"{name}.scales", attrs.evolve(info, shape=blocks, dtype=scales, stored=f"{stored}#scales")
    if FORMS[kind].zero_points:
        yield f"{name}.zero_points", attrs.evolve(info, shape=blocks, stored=f"{stored}#zero_points")
