"""Selects the cases that `make test` leaves to `make test-all` or `make test-exhaustive`, with reasons.

`make thorough` lists them.

A case is thorough if it has the mark ``thorough(reason)`` or matches a row of :data:`CASES`: more dtypes, draws and
configurations of what `make test` runs in one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers import TESTS

DTYPE = "another dtype; `make test` runs one"
DRAW = "another draw of arguments or orders; `make test` runs the first"
MODE = "another mode or configuration; `make test` runs one"
FAMILY = "another family of models through the same code"
OPERATION = "another operation through the same check"
LONG = "a long run"
PROCESSES = "many processes, each of which imports torch; `make test` runs other tests of the file"
AGAIN = "also checked by another command, or in parts by other tests"
EXHAUSTIVE = "a further combination, each part of which `make test-all` runs in another"
"""Left to `make test-exhaustive`, which takes as long as `make test-all` again."""

# File under tests/, with the wildcards of pathlib; regular expression for the id after the path; reason.
CASES = (
    ("backends/cpu/test_cpu_conformance.py", r"/(bfloat16|float16)(/|\])", DTYPE),
    ("backends/cpu/test_cpu_conformance.py", r"\[closing/runner/(piecewise\w*|inductor)\]", MODE),
    ("backends/cpu/test_cpu_conformance.py", r"\[rewrites/(?!add_rms_norm/)\w+/.*another-reader", OPERATION),
    ("backends/cpu/test_cpu_conformance.py", r"\[closing/(others|while-running/(eager|piecewise\w*))\]", MODE),
    ("backends/cpu/test_cpu_conformance.py", r"\[ranks/skipped-collective", LONG),
    ("backends/cpu/test_cpu_conformance.py", r"\[models/(?!qwen3/)\w+/(graph|piecewise|inductor)/", FAMILY),
    ("backends/cpu/test_cpu_conformance.py", r"\[models/qwen3/(graph|piecewise\w*)/float16", EXHAUSTIVE),
    (
        "backends/cpu/test_cpu_conformance.py",
        r"\[models/llama/((graph|piecewise_eager)/bfloat16|(eager|piecewise)/float16)",
        EXHAUSTIVE,
    ),
    (
        "backends/cpu/test_cpu_conformance.py",
        r"\[models/qwen3_moe/((eager|graph)/float16|piecewise\w*/bfloat16)",
        EXHAUSTIVE,
    ),
    ("backends/cpu/test_cpu_conformance.py", r"\[runners/inductor/(queries|padding|shared-queries-[24])", EXHAUSTIVE),
    (
        "backends/cpu/test_cpu_conformance.py",
        r"\[runners/(piecewise/(queries-[48]|shared-queries-4)|piecewise_eager/\S*queries-[48])",
        EXHAUSTIVE,
    ),
    ("backends/cpu/test_cpu_conformance.py", r"\[runners/(inductor|piecewise_eager)/(?!mixed)", MODE),
    ("backends/cpu/test_cpu_kernels.py", r"test_both_sets_of_kernels_meet_the_reference\[seed=[1-9]", DRAW),
    ("backends/cpu/test_cpu_kernels.py", r"test_without_a_home_folder\w+\[XDG|test_without_a_compiler", PROCESSES),
    ("backends/cpu/test_cpu_kernels.py", r"test_a_model_gives_the_same_tokens\[inductor|test_a_damaged_library", MODE),
    ("backends/cpu/test_cpu_kernels.py", r"test_what_is_compiled_needs_no_compiler", PROCESSES),
    ("backends/cpu/test_shared_memory_collectives.py", r"with_the_same_bits\[3\]", MODE),
    ("backends/cpu/test_shared_memory_collectives.py", r"in_overlapping_groups\[[24]-2500", EXHAUSTIVE),
    ("backends/cuda/test_cuda_torch_kernels.py", r"test_it_meets_the_reference\[seed=[1-9]", DRAW),
    ("backends/cuda/test_triton_kernels.py", r"test_compiled_for_gpus", AGAIN),
    ("backends/cuda/test_triton_kernels.py", r"test_further_cases_in_the_interpreter", DRAW),
    ("backends/cuda/test_triton_kernels.py", r"test_in_the_interpreter\[triton_attention", AGAIN),
    ("backends/cuda/test_triton_kernels.py", r"test_in_the_interpreter\[triton_rows", AGAIN),
    ("backends/npu/driver/test_lost_wait.py", r"seed=[2-9]\]", DRAW),
    (
        "backends/npu/driver/test_npu_caches.py",
        r"test_a_cache_is_never_copied\[(canonical-(graph|piecewise)|fractal_nz-(piecewise|npugraph_ex))",
        MODE,
    ),
    ("backends/npu/driver/test_npu_cli.py", r"test_what_torch_npu_prints|test_prefills_are_traced_too", PROCESSES),
    ("backends/npu/driver/test_npu_cli.py", r"test_in_a_process_that_nothing|test_the_launches_of_a_layer", PROCESSES),
    ("backends/npu/driver/test_npu_closing.py", r"gives_all_back_at_once\[(graph|piecewise\w*)\]", MODE),
    ("backends/npu/driver/test_npu_closing.py", r"test_while_another_thread_generates\[(?!graph)", MODE),
    ("backends/npu/driver/test_npu_compare.py", r"test_modes", AGAIN),
    (
        "backends/npu/driver/test_npu_compare.py",
        r"test_in_a_process_that_nothing|test_int8_weights_that_only",
        PROCESSES,
    ),
    ("backends/npu/driver/test_npu_conformance.py", r"/float16(/|\])", DTYPE),
    ("backends/npu/driver/test_npu_conformance.py", r"\[closing/runner/(piecewise\w*|npugraph_ex)\]", MODE),
    ("backends/npu/driver/test_npu_conformance.py", r"\[ranks/", PROCESSES),
    (
        "backends/npu/driver/test_npu_conformance.py",
        r"\[runners/(piecewise\w*|npugraph_ex)/(shared-)?queries-[48]",
        MODE,
    ),
    (
        "backends/npu/driver/test_npu_conformance.py",
        r"\[rewrites/(?!add_rms_norm/)\w+/(proof|.*another-reader)",
        OPERATION,
    ),
    (
        "backends/npu/driver/test_npu_conformance.py",
        r"\[closing/(others|while-running/(eager|piecewise\w*|npugraph_ex))\]",
        MODE,
    ),
    (
        "backends/npu/driver/test_npu_conformance.py",
        r"\[models/(?!qwen3/)\w+/(graph|piecewise\w*|npugraph_ex)/",
        FAMILY,
    ),
    ("backends/npu/driver/test_npu_conformance.py", r"\[runners/(piecewise|npugraph_ex)/(padding|queries-2)", MODE),
    ("backends/npu/driver/test_npu_conformance.py", r"\[models/qwen3/(graph|piecewise\w*)/float16", EXHAUSTIVE),
    (
        "backends/npu/driver/test_npu_conformance.py",
        r"\[models/llama/((graph|piecewise_eager)/bfloat16|(eager|piecewise|npugraph_ex)/float16)",
        EXHAUSTIVE,
    ),
    (
        "backends/npu/driver/test_npu_conformance.py",
        r"\[models/qwen3_moe/((eager|graph|piecewise_eager)/float16|(piecewise|npugraph_ex)/bfloat16)",
        EXHAUSTIVE,
    ),
    (
        "backends/npu/driver/test_npu_conformance.py",
        r"\[runners/(npugraph_ex/(queries-[48]|shared-queries-8)|piecewise/(queries-[48]|shared-queries-4))",
        EXHAUSTIVE,
    ),
    ("backends/npu/driver/test_npu_conformance.py", r"\[runners/piecewise_eager/\S*queries-[48]", EXHAUSTIVE),
    ("backends/npu/driver/test_npu_conformance.py", r"\[runners/(npugraph_ex|piecewise_eager)/(?!mixed)", MODE),
    ("backends/npu/driver/test_npu_conformance.py", r"\[ranks/skipped-collective", EXHAUSTIVE),
    ("backends/npu/driver/test_npu_conformance_fractal.py", r"/float16(/|\])", DTYPE),
    ("backends/npu/driver/test_npu_conformance_fractal.py", r"\[(graphs|leaks|rewrites|runners)/", MODE),
    (
        "backends/npu/driver/test_npu_conformance_fractal.py",
        r"\[models/(?!qwen3/)\w+/(graph|piecewise\w*|npugraph_ex)/",
        FAMILY,
    ),
    ("backends/npu/driver/test_npu_conformance_fractal.py", r"\[(limits/|models/qwen3/piecewise)", MODE),
    ("backends/npu/driver/test_npu_conformance_fractal.py", r"\[models/qwen3/\w+/float16", EXHAUSTIVE),
    (
        "backends/npu/driver/test_npu_conformance_fractal.py",
        r"\[models/llama/(eager/float16|graph/bfloat16|(piecewise\w*|npugraph_ex)/)",
        EXHAUSTIVE,
    ),
    (
        "backends/npu/driver/test_npu_conformance_fractal.py",
        r"\[models/qwen3_moe/(eager/float16|graph/float16|piecewise\w*/|npugraph_ex/bfloat16)",
        EXHAUSTIVE,
    ),
    # A proof runs references, whatever the format of weights.
    ("backends/npu/driver/test_npu_conformance_fractal.py", r"\[rewrites/\w+/proof", EXHAUSTIVE),
    (
        "backends/npu/driver/test_npu_conformance_fractal.py",
        r"\[runners/((eager|piecewise\w*)/(?!mixed)|(graph|npugraph_ex)/\S*queries-[48])",
        EXHAUSTIVE,
    ),
    ("backends/npu/driver/test_npu_doctor.py", r"test_a_device_that|test_without_an_npu", PROCESSES),
    ("backends/npu/driver/test_npu_documentation.py", r"page_runs\[one-model", PROCESSES),
    (
        "backends/npu/driver/test_npu_driver.py",
        r"test_a_950_has|test_the_list_of_backends|test_by_a_variable",
        PROCESSES,
    ),
    ("backends/npu/driver/test_npu_driver.py", r"test_a_310p_runs_the_references", FAMILY),
    ("backends/npu/driver/test_npu_experts.py", r"test_the_cpus_tokens\[(?!bfloat16-eager|w8a8_dynamic-graph)", MODE),
    ("backends/npu/driver/test_npu_experts.py", r"without_the_host\[(bfloat16-nz|w8a8_dynamic-nd)", MODE),
    ("backends/npu/driver/test_npu_experts.py", r"test_the_launches_of_the_page", AGAIN),
    ("backends/npu/driver/test_npu_experts.py", r"without_the_host\[w8a8_dynamic-nz", MODE),
    ("backends/npu/driver/test_npu_experts.py", r"test_the_cpus_tokens\[w8a8_dynamic-graph", MODE),
    (
        "backends/npu/driver/test_npu_experts.py",
        r"test_the_cpus_tokens\[(bfloat16-(graph|piecewise)|float16-(eager|npugraph_ex)|w8a16-(graph|npugraph_ex))",
        EXHAUSTIVE,
    ),
    (
        "backends/npu/driver/test_npu_experts.py",
        r"test_the_cpus_tokens\[(w8a8-(eager|piecewise)|w8a8_dynamic-(eager|npugraph_ex))",
        EXHAUSTIVE,
    ),
    ("backends/npu/driver/test_npu_experts.py", r"without_the_host\[(bfloat16-nz|w8a8_dynamic-nd)", EXHAUSTIVE),
    ("backends/npu/driver/test_npu_graph.py", r"test_(under_any_sch|without_a_wait)\w+\[([4-9]|1\d)\]", DRAW),
    ("backends/npu/driver/test_npu_graph.py", r"test_with_the_task_queue", AGAIN),
    ("backends/npu/driver/test_npu_kernels.py", r"test_it_meets_the_reference\[seed=[1-9]", DRAW),
    ("backends/npu/driver/test_npu_kernels.py", r"test_of_all_kinds\[seed=([6-9]|\d\d)-", DRAW),
    ("backends/npu/driver/test_npu_kernels.py", r"test_the_dispatcher_gives_the_same\[torch\.float16", DTYPE),
    ("backends/npu/driver/test_npu_kernels.py", r"test_under_any_schedule\[schedule=[1-9]", DRAW),
    ("backends/npu/driver/test_npu_models.py", r"_would_be_noticed\[bfloat16", DTYPE),
    ("backends/npu/driver/test_npu_models.py", r"test_random_configurations\[\w+-seed=(6|11)-", DRAW),
    ("backends/npu/driver/test_npu_models.py", r"test_with_the_task_queue", EXHAUSTIVE),
    ("backends/npu/driver/test_npu_models.py", r"test_random_configurations\[\w+-seed=1-", DRAW),
    ("backends/npu/driver/test_npu_models.py", r"test_trained_checkpoint\[float16", DTYPE),
    (
        "backends/npu/driver/test_npu_models.py",
        r"test_random_configurations\[llama|test_trained_checkpoint\[bfloat16-eager",
        FAMILY,
    ),
    ("backends/npu/driver/test_npu_models.py", r"test_one_fault_in_one_step\w+\[.*-eager", MODE),
    ("backends/npu/driver/test_npu_models.py", r"would_be_noticed\[(float16-\w+-eager|bfloat16-\w+-graph)", EXHAUSTIVE),
    (
        "backends/npu/driver/test_npu_models.py",
        r"test_random_configurations\[(llama-seed=(0|6)|qwen3-seed=(1|11))-\w+-eager",
        EXHAUSTIVE,
    ),
    ("backends/npu/driver/test_npu_outside.py", r"changes?\[(?!Recurrent).*-(piecewise|npugraph)\w*\]", MODE),
    ("backends/npu/driver/test_npu_outside.py", r"changes?\[(?!Recurrent|Experts).*-graph\]", MODE),
    ("backends/npu/driver/test_npu_outside.py", r"changes?\[Recurrent.*-piecewise\]", MODE),
    ("backends/npu/driver/test_npu_outside.py", r"test_runners_of_two_backends", PROCESSES),
    ("backends/npu/driver/test_npu_exchanges.py", r"test_the_same_tokens_with|test_whole_experts_on", PROCESSES),
    ("backends/npu/driver/test_npu_exchanges.py", r"each_rank\[.'tensor': 2, 'experts': 'all_", EXHAUSTIVE),
    ("backends/npu/driver/test_npu_exchanges.py", r"each_rank\[.'data': 2, 'experts': '(all_to_all|disp)", EXHAUSTIVE),
    ("backends/npu/driver/test_npu_exchanges.py", r"test_dispatch_and_combine_of_an_a3", PROCESSES),
    (
        "backends/npu/driver/test_npu_exchanges.py",
        r"each_rank\[.'tensor': 2, 'experts': 'dispatch'.-.'eager'",
        EXHAUSTIVE,
    ),
    (
        "backends/npu/driver/test_npu_parallel.py",
        r"test_the_same_tokens\[(?!dense on 2\])|test_peak_memory|test_a_rank_|leaves_nothing\[2",
        MODE,
    ),
    (
        "backends/npu/driver/test_npu_parallel.py",
        r"test_the_same_tokens\[(experts on 2|dense on 4|experts on 2 x 2|experts W8A8 on 2)\]",
        EXHAUSTIVE,
    ),
    (
        "backends/npu/driver/test_npu_parallel.py",
        r"that_fails\[(killed-(loading|capture)|late-(joining|capture|replay|sampling)|raises-(joining|loading|sampling))",
        EXHAUSTIVE,
    ),
    ("backends/npu/driver/test_npu_parallel.py", r"that_fails\[(skips|shapes)-capture", EXHAUSTIVE),
    (
        "backends/npu/driver/test_npu_parallel.py",
        r"test_a_rank_that_fails\[(late-loading|raises-capture|killed-replay)",
        EXHAUSTIVE,
    ),
    ("backends/npu/driver/test_npu_parallel.py", r"test_a_closed_backend_leaves_nothing\[1\]", PROCESSES),
    ("backends/npu/driver/test_npu_parallel.py", r"test_the_same_tokens\[.*, more compilers", EXHAUSTIVE),
    (
        "backends/npu/driver/test_npu_parallel.py",
        r"test_peak_memory_of_loading\[2|test_a_closed_backend_leaves_nothing\[1",
        EXHAUSTIVE,
    ),
    ("backends/npu/driver/test_npu_pieces.py", r"test_eight_buckets|TestMemory::test_pieces_share_it", AGAIN),
    ("backends/npu/driver/test_npu_pieces.py", r"TestFaults::test_out_of_memory|TestFaults::test_streams", MODE),
    ("backends/npu/driver/test_npu_pieces.py", r"TestMemory::test_a_runner_gives_everything_back", MODE),
    (
        "backends/npu/driver/test_npu_pieces.py",
        r"test_pieces_and_buckets_share|test_at_several_operations|test_native_names",
        MODE,
    ),
    ("backends/npu/driver/test_npu_pieces.py", r"TestFaults::test_a_replaced_weight|TestMarkers::test_faults", AGAIN),
    (
        "backends/npu/driver/test_npu_pieces.py",
        r"TestMemory::test_(eight_buckets|a_runner_gives_everything_back)",
        EXHAUSTIVE,
    ),
    (
        "backends/npu/driver/test_npu_replace_weights.py",
        r"a_fresh_load\[compressed-tensors/w8a8-npugraph_ex-True",
        MODE,
    ),
    ("backends/npu/driver/test_npu_runner.py", r"test_a_kernel_timeout\[(Matmul|SwiGlu)", MODE),
    ("backends/npu/driver/test_npu_runner.py", r"test_eight_buckets", AGAIN),
    ("backends/npu/driver/test_npu_runner.py", r"TestMemory::test_a_runner_gives_everything_back", AGAIN),
    (
        "backends/npu/driver/test_npu_runner.py",
        r"TestFaults::test_out_of_memory_in_a_step|test_a_sequence_that_grows",
        MODE,
    ),
    (
        "backends/npu/driver/test_npu_runner.py",
        r"test_a_kernel_timeout\[(Matmul-graph|SwiGlu-eager)|TestMemory::test_a_runner_gives_everything",
        EXHAUSTIVE,
    ),
    ("backends/npu/driver/test_npu_schemes.py", r"test_\w+\[(bfloat16|w8a8)(-(?!graph)\w+)?\]", MODE),
    ("backends/npu/driver/test_npu_schemes.py", r"test_int8_costs_little", MODE),
    ("backends/npu/driver/test_npu_schemes.py", r"test_the_launches_of_the_page", AGAIN),
    ("backends/npu/driver/test_npu_schemes.py", r"\[w8a8_dynamic-piecewise_eager", MODE),
    ("backends/npu/driver/test_npu_schemes.py", r"test_the_cpus_tokens\[(w8a8_dynamic-piecewise|bfloat16-graph)", MODE),
    ("backends/npu/driver/test_npu_schemes.py", r"test_compiled_is_eager\[", AGAIN),
    ("backends/npu/driver/test_npu_schemes.py", r"test_the_cpus_tokens\[(w8a8_dynamic-npugraph_ex|w8a8-graph)", MODE),
    (
        "backends/npu/driver/test_npu_schemes.py",
        r"test_the_cpus_tokens\[(bfloat16-(eager|piecewise|npugraph_ex)|w8a8-(eager|piecewise|piecewise_eager))\]",
        EXHAUSTIVE,
    ),
    ("backends/npu/driver/test_npu_schemes.py", r"test_the_cpus_tokens\[w8a8_dynamic-(eager|piecewise)", MODE),
    ("backends/npu/driver/test_npu_threads.py", r"\[npugraph_ex\]", MODE),
    ("backends/npu/driver/test_npu_threads.py", r"test_after_faults_too", AGAIN),
    ("backends/npu/driver/test_npu_transformers.py", r"test_the_launches\w+\[(?!Qwen3Moe)", FAMILY),
    ("backends/npu/driver/test_npu_transformers.py", r"test_(a_prefill|greedy)", LONG),
    (
        "backends/npu/driver/test_npu_transformers.py",
        r"of_a_decode_layer\[(Llama|Mixtral)|prefill_layer\w+\[(Qwen3|Mixtral)\]",
        EXHAUSTIVE,
    ),
    ("backends/npu/driver/test_npugraph_ex.py", r"test_64_tokens_of_mixed_batches\[bfloat16", DTYPE),
    ("backends/npu/driver/test_npugraph_ex.py", r"test_a_cache_of_1_gib_is_not_copied\[\{'", MODE),
    ("backends/npu/driver/test_npugraph_ex.py", r"test_a_kernel_timeout\[(Matmul|SwiGlu)", MODE),
    ("backends/npu/driver/test_npugraph_ex.py", r"test_explain_shows", AGAIN),
    ("backends/npu/driver/test_npugraph_ex.py", r"test_a_broken_one_is_made_anew\[cut off", MODE),
    ("backends/npu/driver/test_npugraph_ex.py", r"test_one_that_others_may_write\w+\[file", MODE),
    ("backends/npu/driver/test_npugraph_ex.py", r"test_a_runner_gives_everything_back", MODE),
    ("backends/npu/driver/test_npugraph_ex.py", r"TestTokens::test_options\[float16-\{'(npugraph_ex|nz_w)", MODE),
    ("backends/npu/driver/test_npugraph_ex.py", r"test_a_window_that_is_packed|test_as_it_is_written", MODE),
    ("backends/npu/driver/test_npugraph_ex.py", r"test_a_kernel_timeout\[SwiGlu", EXHAUSTIVE),
    ("backends/npu/driver/test_nz_cache.py", r"test_attention\[seed=1(0[4-9]|[12]\d)-", DRAW),
    ("backends/npu/driver/test_quantized_kernels.py", r"TestOneLaunch::\w+\[torch\.bfloat16", DTYPE),
    ("backends/npu/driver/test_quantized_kernels.py", r"schedule=[1-9]", DRAW),
    ("backends/npu/driver/test_quantized_kernels.py", r"test_shapes_at_random\[seed=[2-9]", DRAW),
    ("backends/npu/emulator/test_activation.py", r"changes_the_library_path\[torch(, |-ours)", PROCESSES),
    (
        "backends/npu/emulator/test_activation.py",
        r"test_a_child_|test_a_spawned_process|unmodified_script\[1",
        PROCESSES,
    ),
    ("backends/npu/emulator/test_activation.py", r"changes_the_library_path\[torch-another", PROCESSES),
    (
        "backends/npu/emulator/test_activation.py",
        r"test_(a_real_cann|after_torch_npu_failed|how_long_a_wait|the_exit_status|libraries_that)",
        PROCESSES,
    ),
    (
        "backends/npu/emulator/test_activation.py",
        r"test_(a_header_of_all|each_env|objects_that|what_nobody|without_torch_npu)",
        PROCESSES,
    ),
    (
        "backends/npu/emulator/test_activation.py",
        r"library_path\[(torch-ours taken out|torch, torch_npu-another)",
        EXHAUSTIVE,
    ),
    ("backends/npu/emulator/test_at*.py", r"seed[1-9]", DRAW),
    ("backends/npu/emulator/test_collectives.py", r"overlapping_groups\[[2-4]-|any_schedule\[[2-7]", DRAW),
    ("backends/npu/emulator/test_collectives.py", r"overlapping_groups\[[34]-", EXHAUSTIVE),
    ("backends/npu/emulator/test_collectives.py", r"test_torch_distributed\[", PROCESSES),
    (
        "backends/npu/emulator/test_collectives.py",
        r"test_torch_distributed\[4|test_random_calls_on_overlapping_groups\[[345]-",
        EXHAUSTIVE,
    ),
    ("backends/npu/emulator/test_emulator_documentation.py", r"test_the_page_has_them_all", AGAIN),
    ("backends/npu/emulator/test_expert_distribution.py", r"test_on_other_products\[", PROCESSES),
    ("backends/npu/emulator/test_expert_distribution.py", r"and_back\[dtype\d-[1-4]|any_schedule\[[1-3]", DRAW),
    ("backends/npu/emulator/test_faults.py", r"queue_drops_is_not_read_in_silence\[2", MODE),
    ("backends/npu/emulator/test_fused*.py", r"seed[1-9]", DRAW),
    ("backends/npu/emulator/test_fused.py", r"-bfloat16-", DTYPE),
    ("backends/npu/emulator/test_grouped_refusals.py", r"test_product_line", PROCESSES),
    ("backends/npu/emulator/test_moe_refusals.py", r"test_what_a_generation_takes", PROCESSES),
    ("backends/npu/emulator/test_products_with_collectives.py", r"a_generation_takes|distributed\[", PROCESSES),
    ("backends/npu/emulator/test_products_with_collectives.py", r"any_schedule\[[1-5]", DRAW),
    (
        "backends/npu/emulator/test_products_with_collectives.py",
        r"test_in_processes_of_torch_distributed\[4",
        EXHAUSTIVE,
    ),
    ("backends/npu/emulator/test_releases.py", r"test_what_a_packed_attention_takes\[8\.5\.0", MODE),
    ("backends/npu/emulator/test_schedule.py", r"test_a_process_that_gets_no_core", PROCESSES),
    ("backends/npu/emulator/test_runtime.py", r"test_expandable_segments", PROCESSES),
    ("backends/npu/emulator/test_graphs.py", r"torch_npus_queue_would_not_survive|refused_leaves_room", PROCESSES),
    ("backends/npu/emulator/test_scripts.py", r"test_a_transformer_in_every_mode\[bfloat16", DTYPE),
    ("backends/npu/emulator/test_scripts.py", r"test_two_processes_wait_for_each_others_events\[[1-9]", DRAW),
    (
        "backends/npu/emulator/test_scripts.py",
        r"test_a_handle_of_a_process_that_has|test_two_processes_wait",
        PROCESSES,
    ),
    ("backends/npu/emulator/test_scripts.py", r"events\[1\]", EXHAUSTIVE),
    ("backends/npu/emulator/test_single_operator.py", r"test_in_torch_npus_queue_it_stops", PROCESSES),
    ("backends/npu/emulator/test_torch_parallel.py", r"test_torchs_own_tests|collectives\[4", PROCESSES),
    ("backends/npu/emulator/test_torch_parallel.py", r"functional_collectives\[4", EXHAUSTIVE),
    ("bench/test_bench.py", r"all_that_are_installed\[train|TestPrefill::test_pieces_are", MODE),
    ("bench/test_bench.py", r"test_a_mode_that_goes_wrong_is_never_timed\[bfloat16", DTYPE),
    ("bench/test_bench.py", r"test_every_batch_size_has|test_every_compiler_has", MODE),
    ("bench/test_bench.py", r"test_of_another_family_against_transformers", FAMILY),
    ("bench/test_bench.py", r"TestExtensions::test_a_process_that_finds_all|TestMemory::test_a_process_of", PROCESSES),
    ("bench/test_bench.py", r"TestDecode::test_the|TestFloor::test_a_run_counts_the_experts", MODE),
    ("bench/test_bench.py", r"TestPrefill::test_(experts_)?against_transformers|TestLaunches::test_kinds", FAMILY),
    (
        "bench/test_prediction.py",
        r"test_the_page_has|test_launches_of|test_experts_that|test_two_sums\w+\[sparse",
        LONG,
    ),
    ("bench/test_prediction.py", r"test_the_page_has_these_tables", EXHAUSTIVE),
    ("bench/test_prediction.py", r"TestWholeExperts::test_(all_ranks|deployments)", MODE),
    ("bench/test_prediction.py", r"test_a_config_without_weights|test_a_step|test_what_does_not_fit", AGAIN),
    ("bench/test_prediction.py", r"test_weights_and_products_of_the_busiest_rank", AGAIN),
    ("checkpoint/test_loading.py", r"test_peak_memory\[float32", MODE),
    ("checkpoint/test_loading.py", r"test_peak_memory_of_experts", FAMILY),
    ("checkpoint/test_loading.py", r"test_peak_memory_of_an_output_projection", MODE),
    ("checkpoint/test_loading.py", r"test_peak_memory\[bfloat16-packed", MODE),
    ("cli/test_cli.py", r"test_a_compilation_config\[compilation\.toml", MODE),
    ("cli/test_cli.py", r"test_(only_sizes\w+\[3|sizes_that_decode\w+\[decode1)", DRAW),
    ("cli/test_cli.py", r"TestProcess::test_a_(process_keeps|reader_that)", PROCESSES),
    ("cli/test_cli.py", r"test_options_override_the_environment_key_by_key", PROCESSES),
    ("cli/test_interrupts.py", r"test_at_any_time\[(?!0\.005|1\.4)", PROCESSES),
    ("cli/test_new_driver.py", r"test_installed_it_passes_conformance", AGAIN),
    ("cli/test_new_driver.py", r"test_what_it_writes_is_clean", AGAIN),
    ("cli/test_new_driver.py", r"test_installed_it_is_found", PROCESSES),
    ("cli/test_new_driver.py", r"test_installed_the_doctor", PROCESSES),
    ("cli/test_output.py", r"TestNoise::test_of_(json|tables)|TestFull::test_(figures|texts)", PROCESSES),
    ("cli/test_output.py", r"TestNoise::test_of_texts|TestFull::test_stdout\[arguments[12]", PROCESSES),
    ("cli/test_output.py", r"TestFull::test_stderr|TestClosed::test_stdout", PROCESSES),
    ("cli/test_output.py", r"TestFull::test_stdout\[arguments0", PROCESSES),
    ("compare/test_compare.py", r"test_stale_lengths\w+\[(eager|graph),|test_the_configuration_of_all", MODE),
    ("compare/test_compare.py", r"test_stale_lengths\w+\[piecewise|TestModes::test_of_the_cpu", MODE),
    ("compare/test_compare.py", r"TestModes::test_a_mode_that_has|test_more_new_tokens_than", MODE),
    ("compile/test_compiling.py", r"test_no_rewrite_misses\w+\[(?!Qwen3ForCausalLM-None)", FAMILY),
    ("compile/test_normalize.py", r"test_any_order_of_views_and_writes\[[1-3]\d\]", DRAW),
    ("compile/test_recognize.py", r"agree\[(?!rms_norm|rotary_embedding|topk_route\]|experts_of)", OPERATION),
    ("compile/test_rewrites.py", r"test_any_order_of_views_writes_and_sums\[range\([1-9]", DRAW),
    ("compile/test_rewrites.py", r"test_any_spelling_for_any_number_of_tokens\[([6-9]|\d\d)\]", DRAW),
    ("compile/test_rewrites.py", r"test_every_fused_operation_is_proved\[(?!add_rms_norm\])", AGAIN),
    # The NPU driver's conformance proves these two, with the same references.
    ("compile/test_rewrites.py", r"test_every_fused_operation_is_proved\[quant_expert_mlp", EXHAUSTIVE),
    ("config/test_config_values.py", r"test_keys_of_models\[(Mistral|Qwen3)", FAMILY),
    ("config/test_config_values.py", r"test_keys_of_the_configuration\[cache\.(block_size|num_tokens)", AGAIN),
    ("config/test_config_values.py", r"test_keys_of_the_configuration\[compilation\.(decode|prefill)\.", MODE),
    ("config/test_config_values.py", r"test_keys_of_models\[(Mixtral|Qwen2Moe)", FAMILY),
    ("config/test_config_values.py", r"test_keys_of_the_configuration\[compilation\.(torch|debug|cache)", MODE),
    ("config/test_config_values.py", r"test_keys_that_no_model_reads\[\w+-(?!Qwen3For)", FAMILY),
    ("device/test_closing.py", r"leaves_nothing\[\w+-piecewise", MODE),
    ("device/test_closing.py", r"gives_its_memory_back_at_once\[(eager|piecewise)", MODE),
    ("device/test_closing.py", r"leaves_nothing\[eager-graph", MODE),
    ("doctor/test_doctor.py", r"test_a_vendors_package_that_breaks_the_import_of_torch", PROCESSES),
    ("doctor/test_doctor.py", r"test_emulate_is_an_option_that_not_all_have", PROCESSES),
    ("doctor/test_doctor.py", r"test_the_limit_for_all|test_those_that_hang", PROCESSES),
    ("doctor/test_doctor.py", r"TestPrivacy::test_home_names|TestOneDriver::test_options_come", PROCESSES),
    (
        "doctor/test_doctor.py",
        r"test_(a_package_that_fails|and_the_others|what_is_exam|versions|the_docs_desc|what_a_driver)",
        PROCESSES,
    ),
    ("doctor/test_doctor.py", r"TestRanks::", PROCESSES),
    ("doctor/test_doctor.py", r"test_(a_check_that_fails|a_driver_that_fails_later)", PROCESSES),
    ("drivers/test_drivers.py", r"test_a_runner_is_on_its_own_backend\w+\[(piecewise|graph)", MODE),
    ("engines/test_transformers.py", r"test_(a_compiled_model|use)\w*\[(?!Qwen3Moe)", FAMILY),
    ("engines/test_transformers.py", r"test_a_graph_compiled_with_inductor\[", LONG),
    ("engines/test_transformers.py", r"test_greedy_tokens\w*\[(?!Qwen3Moe)", FAMILY),
    ("engines/test_transformers.py", r"test_models_stop\w*\[order1", DRAW),
    ("engines/test_transformers.py", r"test_the_python_of_the_page_runs", PROCESSES),
    ("execution/test_compiled.py", r"test_nothing_kept_whole", MODE),
    ("execution/test_pieces.py", r"test_mixed_prefill\[.*-[2-7]-Rows.(LAST|ALL)\]", DRAW),
    ("execution/test_pieces.py", r"test_around_every_bucket\[(sliding|untied)|between\[.*-everything", MODE),
    ("execution/test_pieces.py", r"TestMemory::test_eight_buckets|test_two_threads\w+\[graph", MODE),
    ("execution/test_prefill.py", r"test_a_long_prompt_takes_bounded_memory", LONG),
    (
        "execution/test_replace_weights.py",
        r"a_fresh_load\[(biased-graph|experts-piecewise|modelslim/w8a8-graph)",
        EXHAUSTIVE,
    ),
    (
        "execution/test_replace_weights.py",
        r"a_fresh_load\[(compressed-tensors/w8a16-graph|modelslim/w8a16-piecewise)",
        EXHAUSTIVE,
    ),
    (
        "execution/test_replace_weights.py",
        r"a_fresh_load\[compressed-tensors/w8a8(_dynamic)?-piecewise|modelslim/w8a8_dynamic-graph",
        EXHAUSTIVE,
    ),
    ("models/test_experts.py", r"test_logits\[.*, 1(0[2-9]|[1-3]\d)\)", DRAW),
    ("models/test_experts.py", r"test_logits_of_compiled_steps\[.*, 1[13]\d\)", DRAW),
    ("models/test_experts.py", r"test_greedy_tokens_of_the_trained_checkpoint\[(piecewise|inductor)", MODE),
    ("models/test_experts.py", r"test_logits_of_compiled_steps\[inductor", AGAIN),
    ("models/test_experts.py", r"test_logits_of_compiled_steps\[piecewise-\('(qwen2_moe|mixtral)", FAMILY),
    ("models/test_experts.py", r"test_logits\[.*, 101\)", DRAW),
    ("models/test_experts.py", r"test_logits\[.*, 1[23]\d\)-graph", EXHAUSTIVE),
    ("models/test_experts.py", r"compiled_steps\[inductor-\('(qwen2_moe|mixtral)', 100", EXHAUSTIVE),
    ("models/test_experts.py", r"compiled_steps\[inductor-\('\w+', 1(11|34)", EXHAUSTIVE),
    ("models/test_experts.py", r"test_greedy_tokens_of_the_trained_checkpoint\[inductor", EXHAUSTIVE),
    ("models/test_experts.py", r"compiled_steps\[piecewise-\('(qwen2_moe|mixtral)', 1(13|34)\)", EXHAUSTIVE),
    ("models/test_llama.py", r"\[seed=(1[3-9]|2\d)(-\w+)?\]", DRAW),
    ("models/test_llama.py", r"\[seed=([5-9]|1[0-2])(-\w+)?\]", DRAW),
    ("models/test_llama.py", r"test_logits_through_inductor\[seed=(8|1[135])", EXHAUSTIVE),
    ("models/test_transformers.py", r"\[seed=[4-6]\d(-\w+)?\]", DRAW),
    ("models/test_transformers.py", r"\[seed=[23]\d(-\w+)?\]", DRAW),
    ("models/test_transformers.py", r"test_logits_through_inductor\[seed=(37|4[24]|6[25])", EXHAUSTIVE),
    ("models/test_transformers.py", r"test_greedy_tokens_of_the_trained_checkpoint\[inductor", MODE),
    ("models/test_transformers.py", r"test_logits\[.*seed=[56]\d.*graph|test_logits\[.*graph.*seed=[56]\d", EXHAUSTIVE),
    ("nn/test_rope.py", r"test_random_parameters\[seed=([5-9]|\d\d)-", DRAW),
    ("ops/test_operations.py", r"test_opcheck\[quant_expert", OPERATION),
    ("parallel/test_faults.py", r"test_in_a_job\[(?!killed-replay)|test_in_the_command", PROCESSES),
    ("parallel/test_capture_agreement.py", r"step_alone_need_not", PROCESSES),
    ("parallel/test_driver_layers.py", r"test_layers_of_a_driver\[", PROCESSES),
    ("parallel/test_data_parallel.py", r"wait_longer_than_the_timeout", LONG),
    ("parallel/test_data_parallel.py", r"test_copies_penalize", PROCESSES),
    ("parallel/test_data_parallel.py", r"share_the_experts\[sizes0-\w+-all_", EXHAUSTIVE),
    ("parallel/test_data_parallel.py", r"share_the_experts\[sizes1-\w+-(all_to_all|dispatch)", EXHAUSTIVE),
    ("parallel/test_data_parallel.py", r"share_the_experts\[sizes2-\w+-(all_gather|dispatch)", EXHAUSTIVE),
    ("parallel/test_data_parallel.py", r"a_rank_without_a_prompt_steps_too\[dispatch", MODE),
    ("parallel/test_expert_parallel.py", r"test_collectives_of_a_layer\[.*-all_to_all-(4-1|1-4)", MODE),
    ("parallel/test_expert_parallel.py", r"test_the_same_tokens\[.*-4-1-modes[25]", EXHAUSTIVE),
    ("parallel/test_expert_parallel.py", r"test_uneven_loads\[2-0-True|test_a_scale_for_each_expert\[compressed", MODE),
    ("parallel/test_expert_parallel.py", r"test_collectives_of_a_layer\[sequences=8-\w+-(4-1|1-4)", EXHAUSTIVE),
    ("parallel/test_faults.py", r"test_in_a_job\[late-(joining|loading|replay)", EXHAUSTIVE),
    (
        "parallel/test_faults.py",
        r"test_in_a_job\[(killed-(joining|sampling)|raises-(loading|capture)|late-capture|(skips|shapes)-replay)",
        EXHAUSTIVE,
    ),
    ("parallel/test_faults.py", r"test_in_the_command\[killed-(loading|step)", EXHAUSTIVE),
    ("parallel/test_faults.py", r"test_in_a_job\[(raises-sampling|killed-capture)", EXHAUSTIVE),
    ("parallel/test_fused_collectives.py", r"test_without_kernels_ranks", PROCESSES),
    ("parallel/test_rank_commands.py", r"computes_its_slice_wrongly", PROCESSES),
    ("parallel/test_rank_commands.py", r"test_a_wrong_sum|test_ranks_that_agree|TestBench::", PROCESSES),
    ("parallel/test_tensor_parallel.py", r"test_the_same_tokens\[(?!tiny-python-float32-2)", MODE),
    ("parallel/test_tensor_parallel.py", r"test_logits_and_memory\[tiny-python-2", AGAIN),
    ("parallel/test_tensor_parallel.py", r"test_peak_memory_of_loading", LONG),
    (
        "parallel/test_tensor_parallel.py",
        r"test_the_same_tokens\[tiny-python-(bfloat16-4|(moe|(moe-)?w8a8|w8a8_dynamic)-float32-2|moe-w8a8-float32-4)",
        EXHAUSTIVE,
    ),
    ("parallel/test_tensor_parallel.py", r"test_peak_memory_of_loading\[(2-packed|4-plain)", EXHAUSTIVE),
    ("parallel/test_ranks.py", r"test_collectives_are\w+\[4", MODE),
    ("parallel/test_ranks.py", r"test_a_time_limit|different_errors_the_first_is_shown\[2,1,0", LONG),
    ("parallel/test_ranks.py", r"test_an_error_of_all_ranks", PROCESSES),
    ("parallel/test_ranks.py", r"test_different_errors_of_a_command", PROCESSES),
    ("parallel/test_ranks.py", r"test_of_different_errors_the_first_is_shown\[0,1,2", EXHAUSTIVE),
    ("project/test_commands_of_pages.py", r"test_(commands|python)\[(README|quickstart)-folder", PROCESSES),
    ("project/test_commands_of_pages.py", r"test_(commands|python)\[(?!(README|quickstart)-folder)", EXHAUSTIVE),
    ("project/test_documentation.py", r"test_python_of_a_page_runs\[(?!README|concepts|drivers)", PROCESSES),
    # `make docs` builds them too, which CI runs before.
    ("project/test_documentation.py", r"test_builds_strictly", EXHAUSTIVE),
    ("project/test_editors.py", r"test_type_checkers_know", AGAIN),
    ("project/test_installations.py", r"\[(editable|wheel)\]|test_commands|test_a_program|test_ranks", PROCESSES),
    ("project/test_layering.py", r"test_import_linter_shows_violations\[(?!models/qwen3\.py-import torch_npu)", MODE),
    ("project/test_layering.py", r"test_the_syntax_tree_shows\w+\[(?!models/qwen3\.py-import (torch_npu|numpy))", MODE),
    ("project/test_outside.py", r"changes?\[(?!Recurrent).*-(piecewise\w*|inductor)\]", MODE),
    ("project/test_outside.py", r"changes?\[(?!Recurrent).*-graph\]|test_a_scheme_of_another_package\[graph", MODE),
    ("project/test_outside.py", r"changes?\[Recurrent\w+-inductor", MODE),
    ("project/test_packaging.py", r"test_the_installed_package_loads_a_model", PROCESSES),
    ("quantization/test_quantized_models.py", r"(test_generation|what_eager_does)\[compressed", MODE),
    ("quantization/test_quantized_models.py", r"dequantized_weights_do\[.*-True-(True|False)\]", MODE),
    ("quantization/test_quantized_models.py", r"test_peak_memory_of_loading\[w8a8_dynamic", MODE),
    ("quantization/test_quantized_models.py", r"test_perplexity_of_held_out_text\[compressed", MODE),
    ("quantization/test_quantized_models.py", r"test_perplexity_of_held_out_text\[modelslim", AGAIN),
    ("quantization/test_quantized_models.py", r"test_peak_memory_of_loading\[w8a8\]", MODE),
    ("testing/test_broken.py", r"kept when it is closed", AGAIN),
    ("testing/test_plugin.py", r"test_the_table_of_several_workers|test_untried_is_not", PROCESSES),
    ("testing/test_plugin.py", r"test_a_library_that_the_probe_did_not|test_a_kernel_that_raises", PROCESSES),
    ("testing/test_plugin.py", r"test_an_operation_is_covered_the_day", PROCESSES),
    ("testing/test_plugin.py", r"test_a_failure_is_told_without_the_suites_own_lines", PROCESSES),
)


def mark(items: Sequence[pytest.Item], complete: bool) -> None:
    """Mark the cases of :data:`CASES`.

    Args:
        items: all collected tests.
        complete: whether all tests of each file were collected.

    Raises:
        pytest.UsageError: a row matches no case, or all cases, of a file that was collected completely.
    """
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path.relative_to(TESTS), []).append(item)
    for pattern, named, reason in CASES:
        files = [file for file in by_file if file.match(pattern)]
        found = [item for file in files for item in by_file[file] if re.search(named, item.nodeid.partition("::")[2])]
        for item in found:
            item.add_marker(pytest.mark.thorough(reason))
            if reason == EXHAUSTIVE:
                item.add_marker(pytest.mark.exhaustive)
        if complete and files and not found:
            raise pytest.UsageError(f"no case of tests/{pattern} matches {named!r}: fix the row in {__file__}")
    for file, cases in by_file.items():
        if complete and all(item.get_closest_marker("thorough") for item in cases):
            raise pytest.UsageError(f"`make test` would run nothing of tests/{file}: fix the rows in {__file__}")


def reasons(items: Sequence[pytest.Item]) -> Counter[tuple[str, str]]:
    """Return the number of thorough cases, by file and reason."""
    return Counter(
        (str(item.path.relative_to(TESTS)), marker.args[0])
        for item in items
        if (marker := item.get_closest_marker("thorough"))
    )
