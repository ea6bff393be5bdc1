#!/bin/sh
# Runs SGLang from PyPI, unmodified, on the emulated CANN, and compares its tokens with hal's on the CPU.
#
#     emulated-cann/tests/clients/sglang.sh VENV [FORM ...]
#
# Run it in the repository after `make check`. It installs SGLang, torch_npu and triton-ascend into VENV, with torch's CPU
# build, and runs the engine, eager and in NPU graphs, in each FORM: dense (also by the HTTP server), float16, atb (without
# FIA), sparse (Qwen3-MoE), ranks (tensor parallel 2), and latent (DeepSeek-V3), whose prompts are refused: FIA's document
# demands a contiguous query, and SGLang's is not. PIP_ARGS are further arguments of pip.
#
# What stands beside SGLang is no part of CANN:
# - standins/sgl_kernel_npu: SGLang's operators for NPUs, compiled for hardware, in operators of torch;
# - TORCHDYNAMO_DISABLE=1: after torch_npu's transfer_to_npu, Dynamo's table of torch 2.13 cannot be made, so that
#   SGLang's models would not be imported, and SGLang would run transformers' in their place;
# - tools/engines/torchvision_declarations.py, where torchvision's CPU build cannot be had;
# - numpy before 2.3, for Triton's interpreter, and SGLang's requirements without those for CUDA.
set -e
export PYTHONDONTWRITEBYTECODE=  # what is imported is compiled once
venv=${1:?the folder of a virtual environment}
shift
here=$(dirname "$0")
index=https://download.pytorch.org/whl/cpu
pip() { "$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check $PIP_ARGS "$@"; }

if ! [ -e "$venv/.installed" ]; then
    ${PYTHON:-python3} -m venv "$venv"
    pip --extra-index-url $index torch==2.13.0+cpu
    pip --no-deps --extra-index-url $index torchvision==0.28.0+cpu || {
        pip --no-deps torchvision==0.28.0
        site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        cp tools/engines/torchvision_declarations.py "$site"
        echo 'import torchvision_declarations' > "$site/torchvision_declarations.pth"
    }
    pip --no-deps "sglang==${SGLANG:-0.5.23}"
    pip --requirement tests/engines/sglang-requirements.txt accelerate pybind11 'numpy<2.3' torch==2.13.0 ./emulated-cann
    "$venv/bin/python" -m pip uninstall --quiet --yes triton
    pip --no-deps --force-reinstall triton-ascend==3.2.0
    touch "$venv/.installed"
fi

made=$(mktemp -d)
trap 'rm -r "$made"' EXIT
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 TORCHDYNAMO_DISABLE=1 TRITON_INTERPRET=1
for form in ${*:-dense float16 atb sparse ranks}; do
    checkpoint=checkpoints/tiny-python dtype=bfloat16 fia=1 ranks=1 ways=engine
    case $form in
    dense) ways="engine http" ;;
    float16) dtype=float16 ;;
    atb) fia=0 ;;
    sparse | latent) checkpoint=$made/$form && .venv/bin/python "$here/checkpoint.py" $form "$checkpoint" ;;
    ranks) ranks=2 ;;
    *) echo "$form is no form" >&2 && exit 2 ;;
    esac
    PYTHONPATH=tests .venv/bin/python "$here/hal_tokens.py" "$checkpoint" $dtype > "$made/expected"
    for way in $ways; do
        for graphs in "" --graphs; do
            printf '%s, ' "$form"
            ASCEND_USE_FIA=$fia PYTHONPATH="$here/standins" "$venv/bin/emulated-cann" run --memory 32GiB --devices $ranks -- \
                "$venv/bin/python" -W ignore "$here/sglang_tokens.py" "$checkpoint" "$made/expected" $dtype $ranks "$way" $graphs
        done
    done
done
