#!/bin/sh
# Everything of the CUDA driver that needs a GPU, in this order: tests, host-time, text, sanitizer, figures.
# Run it from the root of the repository, with torch for CUDA, `pip install -e '.[test,cuda]'`, and an NVIDIA GPU.
# Results go to the folder that the first argument names, or to ./on_gpu. It goes on after a failure, and ends with its
# status: 0 only if every part succeeded. SKIP="sanitizer figures" leaves parts out, and ONLY="tests figures-decode-1"
# runs no others: where a command may not take long, run it once for each. Each part takes minutes. The tests run in 8
# processes, or as many as WORKERS says; 17 ran at a time on a GPU with 80 GB.
set -u
python=${PYTHON:-python3}
out=${1:-on_gpu}
mkdir -p "$out"
failed=""

# Whether the words of $1 hold the part's name, or what it begins with, up to a hyphen.
asked() {
    for word in $1; do
        case "$name" in "$word" | "$word"-*) return 0 ;; esac
    done
    return 1
}

part() {
    name=$1
    shift
    if asked "${SKIP:-}" || { [ -n "${ONLY:-}" ] && ! asked "$ONLY"; }; then
        echo "== $name: left out"
        return
    fi
    echo "== $name: $*"
    if "$@" > "$out/$name.txt" 2>&1; then
        tail -n 5 "$out/$name.txt"
    else
        tail -n 30 "$out/$name.txt"
        failed="$failed $name"
        echo "== $name failed; all it said is in $out/$name.txt"
    fi
}

export TORCH_DEVICE_BACKEND_AUTOLOAD=0
nvidia-smi > "$out/nvidia-smi.txt" 2>&1
hal backends
"$python" -c 'from hal.backends.cuda.probe import probe; found = probe(); print(found); raise SystemExit(not found.available)' || exit 1

timed=test_a_step_in_a_graph_takes_the_host_little_time
part tests "$python" -m pytest -q -ra -n "${WORKERS:-8}" --dist worksteal tests/backends/cuda -k "not $timed"
# By itself: beside the other processes a step takes the host longer than the test allows.
part host-time "$python" -m pytest -q -ra tests/backends/cuda/test_cuda_gpu_models.py -k "$timed"
part text hal generate checkpoints/tiny-python --backend cuda --dtype bfloat16 --compiler graph --prompt 'class Stack:'

# Without torch's cache of memory each tensor is an allocation of its own, past whose end the sanitizer sees.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
kernels="$python -m pytest -q -x -p no:cacheprovider tests/backends/cuda/test_cuda_gpu_kernels.py -k triton"
files=$(for each in rows attention experts low_bits recurrent; do echo "tests/backends/cuda/triton_$each.py"; done)
edges="$python -m pytest -q -x -p no:cacheprovider $(echo $files)"
for tool in memcheck racecheck initcheck; do
    part "sanitizer-$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all $kernels
    part "sanitizer-$tool-edges" compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all $edges
done
unset PYTORCH_NO_CUDA_MEMORY_CACHING

shapes="--backend cuda --shapes qwen3-8b --dtype bfloat16 --against transformers"
for size in 1 8 32; do
    part "figures-decode-$size" hal bench decode $shapes --batch-size "$size" --figures "$out/decode-$size.json"
done
# At 128 sequences the caches of all modes do not fit beside one another.
part figures-decode-128 hal bench decode $shapes --batch-size 128 --compiler graph --figures "$out/decode-128.json"
part figures-prefill hal bench prefill $shapes --tokens 1024 --compiler eager --compiler piecewise --figures "$out/prefill.json"
part figures-launches hal bench decode --backend cuda --shapes qwen3-8b --dtype bfloat16 --compiler graph --trace

echo "== results in $out"
[ -z "$failed" ] || { echo "== failed:$failed"; exit 1; }
