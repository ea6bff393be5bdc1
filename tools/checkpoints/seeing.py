"""The small Qwen3-VL that reads pictures: its shapes, its forward for training, its answers, its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from picture_batches import (
    CELLS,
    END,
    FRAMES,
    IMAGE,
    KNOWN,
    MERGE,
    PATCH,
    START,
    STOP,
    VIDEO,
    WORDS,
    cell_order,
    grid_of,
    head_of,
    patches_of,
)
from pictures import GRIDS, SLOT, SLOTS, Question
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }} {% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<start> <image> <end> {% else %}{{ p.text }} {% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
TOWER: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [1, 2],
}
TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.05,
}
LONGEST_ANSWER = 20


def new_model(seed: int) -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(seed)
    config = Qwen3VLConfig(
        text_config={**TEXT, "vocab_size": len(WORDS), "eos_token_id": KNOWN[STOP]},
        vision_config={**TOWER, "out_hidden_size": TEXT["hidden_size"]},
        image_token_id=KNOWN[IMAGE],
        video_token_id=KNOWN[VIDEO],
        vision_start_token_id=KNOWN[START],
        vision_end_token_id=KNOWN[END],
        tie_word_embeddings=True,
    )
    return Qwen3VLForConditionalGeneration(config)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of a text model."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Trained(nn.Module):
    """The model over batches of padded pictures, with the weights of transformers' layers.

    Their own forward attends picture by picture, waits for the device, and launches three times as many kernels.
    """

    def __init__(self, model: Qwen3VLForConditionalGeneration) -> None:
        super().__init__()
        self.model, self.tower, self.text = model, model.model.visual, model.model.language_model
        order = cell_order()
        indices, weights, turns, places = [], [], [], []
        for grid in GRIDS:
            shape = torch.tensor([grid_of(*grid)])
            found = get_vision_interpolation_indices_and_weights(
                shape, self.tower.num_grid_per_side, "bilinear", align_corners=True, spatial_merge_size=MERGE
            )
            positions = get_vision_position_ids(shape, MERGE)
            indices.append(found[0])
            weights.append(found[1])
            turns.append(torch.stack(self.tower.rotary_pos_emb(found[1], positions), 1))
            places.append(positions.view(-1, MERGE**2, 2)[:, 0] // MERGE)
        padded = {
            name: nn.utils.rnn.pad_sequence(values, batch_first=True)
            for name, values in (("indices", indices), ("weights", weights), ("turns", turns), ("places", places))
        }
        for name, value in {"order": order, **padded}.items():
            self.register_buffer(name, value, persistent=False)

    def see(self, patches: Tensor, grid: Tensor) -> list[Tensor]:
        """Return the embedding of each cell, and its rows of DeepStack, ``[pictures, CELLS, width]`` each."""
        tower, heads = self.tower, TOWER["num_heads"]
        embed = tower.patch_embed.proj
        hidden = functional.linear(patches, embed.weight.flatten(1), embed.bias)
        hidden = hidden + (tower.pos_embed(self.indices[grid]) * self.weights[grid][..., None]).sum(2)
        cos, sin = self.turns[grid].unbind(2)
        mask = (self.order[grid] >= 0).repeat_interleave(MERGE**2, 1)[:, None, None]
        deep = []
        for number, block in enumerate(tower.blocks):
            query, key, value = block.attn.qkv(block.norm1(hidden)).unflatten(-1, (3, heads, -1)).unbind(2)
            query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
            query, key, value = (each.transpose(1, 2) for each in (query, key, value))
            attended = functional.scaled_dot_product_attention(query, key, value, mask)
            hidden = hidden + block.attn.proj(attended.transpose(1, 2).flatten(2))
            hidden = hidden + block.mlp(block.norm2(hidden))
            if number in TOWER["deepstack_visual_indexes"]:
                deep.append(tower.deepstack_merger_list[len(deep)](hidden.flatten(0, 1)))
        return [each.view(len(grid), CELLS, -1) for each in (tower.merger(hidden.flatten(0, 1)), *deep)]

    def read(self, rows: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return the logits of each word."""
        shown = batch["ids"] == KNOWN[IMAGE]
        cell = (shown.cumsum(1) - 1).clamp(0, CELLS - 1)
        placed = [each.gather(1, cell[..., None].expand(-1, -1, each.shape[2])) for each in rows]
        hidden = torch.where(shown[..., None], placed[0], self.text.embed_tokens(batch["ids"]))
        inside = self.places[batch["grid"]].gather(1, cell[..., None].expand(-1, -1, 2)) * shown[..., None]
        positions = batch["positions"] + torch.cat([torch.zeros_like(inside[..., :1]), inside], 2).permute(2, 0, 1)
        parts = batch["parts"]
        seen = ((parts[:, None] == parts[..., None]) | (parts[:, None] == 0)).tril()[:, None]
        mask = torch.zeros(seen.shape, device=hidden.device).masked_fill(~seen, float("-inf"))
        angles = [each[:, :, None] for each in self.text.rotary_emb(hidden, positions)]
        for number, layer in enumerate(self.text.layers):
            hidden = self.layer(layer, hidden, angles, mask)
            if number + 1 < len(placed):
                hidden = hidden + placed[number + 1] * shown[..., None]
        return self.model.lm_head(self.norm(hidden, self.text.norm))

    def norm(self, hidden: Tensor, norm: Any) -> Tensor:
        return functional.rms_norm(hidden, norm.weight.shape, norm.weight, TEXT["rms_norm_eps"])

    def layer(self, layer: Any, hidden: Tensor, angles: list[Tensor], mask: Tensor) -> Tensor:
        """Return what a layer of the text model makes of hidden states, with a product for query, key and value."""
        attention, mlp = layer.self_attn, layer.mlp
        heads, kv_heads, size = TEXT["num_attention_heads"], TEXT["num_key_value_heads"], TEXT["head_dim"]
        weights = [each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
        joined = functional.linear(self.norm(hidden, layer.input_layernorm), torch.cat(weights)).unflatten(
            -1, (-1, size)
        )
        cos, sin = (each.to(joined.dtype) for each in angles)
        scale = torch.cat([attention.q_norm.weight.expand(heads, -1), attention.k_norm.weight.expand(kv_heads, -1)])
        normed = functional.rms_norm(joined[:, :, : heads + kv_heads], (size,), eps=TEXT["rms_norm_eps"]) * scale
        query, key = rotated(normed.to(joined.dtype), cos, sin).transpose(1, 2).split((heads, kv_heads), 1)
        value = joined[:, :, heads + kv_heads :].transpose(1, 2)
        key, value = (each.repeat_interleave(heads // kv_heads, 1) for each in (key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, mask.to(joined.dtype))
        hidden = hidden + attention.o_proj(attended.transpose(1, 2).flatten(2))
        normed = self.norm(hidden, layer.post_attention_layernorm)
        gate, up = functional.linear(normed, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])).chunk(2, -1)
        return hidden + mlp.down_proj(functional.silu(gate) * up)


@torch.inference_mode()
def answers(model: Qwen3VLForConditionalGeneration, questions: Sequence[Question]) -> list[str]:
    """The model's greedy answers, from transformers' own forward."""
    device, values, grids, words = model.device, [], [], []
    for each in questions:
        rows, columns = (size // SLOT for size in each.pixels.shape[1:])
        slots = torch.zeros(1, SLOTS, 3, SLOT, SLOT)
        parts = each.pixels.view(3, rows, SLOT, columns, SLOT).permute(1, 3, 0, 2, 4)
        slots[0, : rows * columns] = parts.reshape(-1, 3, SLOT, SLOT)
        order = cell_order()[GRIDS.index((rows, columns))][None]
        patches = patches_of(slots, order.clamp(min=0))[0, : int((order >= 0).sum()) * MERGE**2]
        values.append(patches)
        grids.append(grid_of(rows, columns))
        words.append([KNOWN[word] for word in (*head_of(grids[-1]), *each.text.split(), "assistant")])
    starts = [len(each) for each in words]
    for _ in range(LONGEST_ANSWER):
        longest = max(map(len, words))
        ids = torch.tensor([each + [KNOWN[STOP]] * (longest - len(each)) for each in words], device=device)
        logits = model(
            input_ids=ids,
            mm_token_type_ids=(ids == KNOWN[IMAGE]).int(),
            pixel_values=torch.cat(values).to(device),
            image_grid_thw=torch.tensor(grids, device=device),
            use_cache=False,
        ).logits
        last = torch.tensor([len(each) - 1 for each in words], device=device)
        made = logits[torch.arange(len(words), device=device), last].argmax(1).tolist()
        ended = [KNOWN[STOP] in each[start:] for each, start in zip(words, starts, strict=True)]
        if all(ended):
            break
        for each, word, end in zip(words, made, ended, strict=True):
            if not end:
                each.append(word)
    told = [each[start:] for each, start in zip(words, starts, strict=True)]
    return [" ".join(WORDS[word] for word in each if word != KNOWN[STOP]) for each in told]


def save(model: Qwen3VLForConditionalGeneration, output: Path) -> None:
    """Write the model in bfloat16 with its tokenizer, template and processor."""
    stop = KNOWN[STOP]
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=stop, do_sample=False)
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer = Tokenizer(models.WordLevel(KNOWN, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=STOP, pad_token=STOP).save_pretrained(output)
    (output / "chat_template.jinja").write_text(TEMPLATE)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "merge_size": MERGE,
        "size": {"shortest_edge": 1024, "longest_edge": 65536},
    }
    (output / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
