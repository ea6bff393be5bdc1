"""Tests that prompts with videos, and options of the processor, give the tokens of hal.generate inside vLLM.

They need vLLM and torchvision: `make test-vllm` runs them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.distributions import installed
from helpers.vllm_programs import found_by, needs_vllm

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(not installed("torchvision"), reason="transformers prepares videos with torchvision"),
]
SIZES = {"shortest_edge": 64, "longest_edge": 1024}


def reading_videos(path: Path, family: str) -> dict[str, int]:
    """Write a random checkpoint whose tokenizer writes digits one by one. Return its special tokens."""
    from helpers.seeing import END_ID, IMAGE_ID, START_ID, VIDEO_ID, build
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    build(family, 4, path)
    special = {"image": IMAGE_ID, "video": VIDEO_ID, "start": START_ID, "end": END_ID}
    words = {f"w{index}": index for index in range(97)} | {str(digit): 10 + digit for digit in range(10)}
    words |= {"<": 20, ">": 21, ".": 22, "seconds": 23} | {f"<{name}>": token for name, token in special.items()}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<[a-z]+>|\d|\w+|[^\w\s]"), "removed", invert=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    shared = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "size": SIZES, "min_frames": 2}
    kind = "Qwen3VLVideoProcessor" if family.startswith("Qwen3") else "Qwen2VLVideoProcessor"
    for name, given in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": kind}),
    ):
        (path / name).write_text(json.dumps({**shared, **given}))
    return special


@pytest.mark.parametrize(
    ("family", "compilation"),
    [("Qwen3VL", {"compiler": "graph"}), ("Qwen2_5_VL", {"compiler": "eager"}), ("Qwen3_5", {"compiler": "graph"})],
)
@pytest.mark.shows("videos", "vLLM")
def test_videos_and_options_of_the_processor(tmp_path: Path, family: str, compilation: dict[str, Any]) -> None:
    """Steps cut through videos, and some prompts share a prefix but for the rate of frames, which moves their text."""
    path = tmp_path / "model"
    tokens = reading_videos(path, family)
    found = found_by(
        "vllm_videos.main",
        tmp_path,
        path,
        hal={"backend": "cpu", "compilation": compilation},
        tokens=tokens,
        seed=1,
    )
    assert found["found"] == found["expected"]
    videos = [each for own in found["items"] for each in own if each[0] == "video"]
    assert [7, 2, 2] in [each[1] for each in videos], "14 of 17 frames"
    assert len({str(each[2:]) for each in videos}) >= 5, "rates"
    assert len({str(each[1]) for each in videos}) >= 3, "sizes"
    assert found["slower"] != found["expected"], "the answers depend on the times of frames"
    reasons = {
        '{"none_such": 1}': "hal's processor has no option none_such of mm_processor_kwargs",
        '{"fps": -1}': "the option fps is -1",
        '{"max_pixels": "many"}': "the option max_pixels is 'many'",
        '{"fps": 2}': "the frames of video 0 were chosen before, and fps",
    }
    wrong = {
        each: found["refused"].get(each) for each, why in reasons.items() if why not in found["refused"].get(each, "")
    }
    assert wrong == {}
