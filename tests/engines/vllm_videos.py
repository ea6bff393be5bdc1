"""Runs prompts with videos and images through vLLM, and compares their tokens with hal.generate's.

The argument is JSON with ``checkpoint``, ``hal`` (hal's configuration), ``tokens`` (the placeholders of an image and of
a video, and the tokens around them), ``seed``, and ``out``, the file for the result. test_vllm_videos.py runs it in
another process.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams

import hal
from hal.generation.llm.processor import open_processor
from hal.generation.llm.videos import Video
from hal.nn import EncoderItem

NEW = 8


def drawn(seed: int, *shape: int) -> Any:
    """Return random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def cases(draw: random.Random) -> list[tuple[list[Any], dict[str, Any]]]:
    """Return the images and videos of each prompt, and its options. Some come again, at another rate or resampled."""
    frames = drawn(1, 4, 17, 22)
    at_one, at_four = (Video(frames, rate, (0, 1, 2, 3), 4) for rate in (1.0, 4.0))
    chosen = Video(drawn(2, 3, 16, 16), 24.0, (0, 30, 71), 72)
    whole = Video(drawn(3, 20, 20, 9), 10.0, tuple(range(20)), 20, sampled=False)
    rounded = Video(drawn(5, 17, 8, 8), 4.0, tuple(range(17)), 17, sampled=False)
    image = Image.fromarray(drawn(4, 19, 30))
    made: list[tuple[list[Any], dict[str, Any]]] = [
        ([at_one], {}),
        ([at_four], {}),
        ([chosen], {}),
        ([whole], {"fps": 3}),
        ([whole], {"num_frames": 4}),
        ([rounded], {"fps": 3.3}),  # Qwen2-VL's processor chooses a frame past the end, too
        ([at_one], {"max_pixels": 320}),
        ([image], {"max_pixels": 320}),
        ([image], {"max_pixels": 320}),
        ([image], {}),
        ([], {}),
        ([image, at_one, chosen], {}),
        ([chosen, image, at_four], {}),
        ([at_four, at_four], {}),
    ]
    draw.shuffle(made)
    return made


def by_vllm(video: Video) -> Any:
    """Return a video as vLLM's decoders return it."""
    known = {"fps": video.rate, "frames_indices": [*video.places], "total_num_frames": video.total}
    return video.frames, known | {"do_sample_frames": not video.sampled}


def main() -> None:
    """Compare, and write what was found."""
    asked = json.loads(sys.argv[1])
    draw, given = random.Random(asked["seed"]), asked["tokens"]
    prompts, inputs = [], list[Any]()
    made = cases(draw)
    for media, options in made:
        tokens = [draw.randrange(30, 80) for _ in range(draw.randint(1, 9))]
        for each in media:
            tokens += [given["start"], given["video" if isinstance(each, Video) else "image"], given["end"]]
            tokens += [draw.randrange(30, 80) for _ in range(draw.randint(1, 5))]
        videos = [by_vllm(each) for each in media if isinstance(each, Video)]
        images = [each for each in media if not isinstance(each, Video)]
        prompts.append(tokens)
        one: dict[str, Any] = {"prompt_token_ids": tokens, "mm_processor_kwargs": options}
        if media:
            one["multi_modal_data"] = ({"video": videos} if videos else {}) | ({"image": images} if images else {})
        inputs.append(one)
    engine = LLM(
        model=asked["checkpoint"],
        max_model_len=256,
        block_size=16,
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=56,
        num_gpu_blocks_override=64,
        additional_config={"hal": asked["hal"]},
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    found = [[*each.outputs[0].token_ids] for each in engine.generate(inputs, params, use_tqdm=False)]
    refused = {}
    for options in ({"none_such": 1}, {"fps": -1}, {"max_pixels": "many"}, {"fps": 2}):
        media = {"video": [by_vllm(Video(drawn(1, 4, 17, 22), 1.0, (0, 1, 2, 3), 4))]}
        tokens = [1, given["start"], given["video"], given["end"], 2]
        try:
            engine.generate(
                {"prompt_token_ids": tokens, "multi_modal_data": media, "mm_processor_kwargs": options}, params
            )
        except ValueError as error:
            refused[json.dumps(options)] = str(error)
    backend = hal.open({**asked["hal"], "dtype": "float32", "cache": {"num_tokens": 4096}})
    opened = hal.Checkpoint.open(asked["checkpoint"])
    runner, preparation = hal.Runner(hal.load_model(opened, backend), backend), open_processor(opened)
    tokenizer = opened.tokenizer()
    items = []
    for media, options in made:
        scoped = {
            kind: {name: value for name, value in options.items() if name in names}
            for kind, names in preparation.options.items()
        }
        items.append(preparation.items(media, scoped))

    def generated(own: list[list[EncoderItem]]) -> list[list[int]]:
        made: list[list[int]] = [[] for _ in prompts]
        whole = [
            runner.model.expand(tokens, each, lambda text: tokenizer.encode(text).ids)
            for tokens, each in zip(prompts, own, strict=True)
        ]
        for token in hal.generate(runner, whole, hal.SamplingParams(max_new_tokens=NEW), items=own):
            made[token.prompt_index].append(token.token_id)
        return made

    def slower(item: EncoderItem) -> EncoderItem:
        if item.seconds is None or item.times is None:
            return item
        return attrs.evolve(item, seconds=8 * item.seconds, times=tuple(8 * each for each in item.times))

    result = {
        "found": found,
        "expected": generated(items),
        "slower": generated([[*map(slower, own)] for own in items]),
        "refused": refused,
        "items": [[[each.kind, each.grid, each.seconds, each.times] for each in own] for own in items],
    }
    Path(asked["out"]).write_text(json.dumps(result), encoding="utf-8")
