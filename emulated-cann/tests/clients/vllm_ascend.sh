#!/bin/sh
# Runs vllm-ascend from PyPI, unmodified, on the emulated CANN, and compares its tokens with hal's on the CPU.
#
#     emulated-cann/tests/clients/vllm_ascend.sh VENV [FORM ...]
#
# Run it in the repository after `make check`. It installs vLLM without its kernels, vllm-ascend without its own, torch_npu
# and triton-ascend into VENV, with torch's CPU build, and runs the engine, eager, in each FORM: dense (Qwen3) and sparse
# (Qwen3-MoE). PIP_ARGS are further arguments of pip.
#
# What stands beside vllm-ascend is no part of CANN:
# - standins/vllm_ascend_C.py: its compiled operators that these models call, npu_add_rms_norm_bias and moe_gating_top_k,
#   in operators of torch_npu. None of its switches avoids them on Atlas A2: its RMSNorm imports the compiled module;
# - torch 2.13, torch_npu 2.13 and triton-ascend 3.2.0 in place of the releases that it names: this vLLM is for torch 2.13;
# - two additions to triton-ascend's interpreter: multibuffer, an option of its compiler, is no argument of a kernel, and
#   gather is computed. vllm-ascend's table of blocks is a Triton kernel with gather, and no switch avoids it;
# - tools/engines/torchvision_declarations.py, and numpy before 2.3, for Triton's interpreter.
set -e
export PYTHONDONTWRITEBYTECODE=  # what is imported is compiled once
venv=${1:?the folder of a virtual environment}
shift
here=$(dirname "$0")
vllm=${VLLM:-0.29.0}
pip() { "$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check $PIP_ARGS "$@"; }
export TORCH_DEVICE_BACKEND_AUTOLOAD=0

[ -e "$venv/bin/python" ] || ${PYTHON:-python3} -m venv "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if ! [ -e "$venv/.installed" ]; then
    pip --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
    pip --no-deps torchvision==0.28.0
    cp tools/engines/torchvision_declarations.py "$site"
    echo 'import torchvision_declarations' > "$site/torchvision_declarations.pth"
    pip 'setuptools<81' setuptools-scm setuptools-rust wheel packaging ninja cmake jinja2 pybind11
    pip ./emulated-cann 'numpy<2.3' numba scipy torch==2.13.0
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$vllm pip --no-build-isolation --no-binary vllm "vllm==$vllm" \
        'numpy<2.3' torch==2.13.0
    SOC_VERSION=ascend910b3 COMPILE_CUSTOM_KERNELS=0 pip --no-build-isolation --no-deps --no-binary vllm-ascend \
        "vllm-ascend==${VLLM_ASCEND:-0.29.0rc1}"
    "$venv/bin/python" -m pip uninstall --quiet --yes triton
    pip --no-deps --force-reinstall triton-ascend==3.2.0
    sed -i -e '/^RESERVED_KWS/s/"maxnreg"/"maxnreg", "multibuffer"/' -e '/def create_expand_dims/i\
    def create_gather(self, src, indices, axis):\
        return TensorHandle(np.take_along_axis(src.data, indices.data, axis), src.dtype.scalar)\
' "$site/triton/runtime/interpreter.py"
    touch "$venv/.installed"
fi
cp "$here/standins/vllm_ascend_C.py" "$site/vllm_ascend"

expected=$(mktemp)
trap 'rm "$expected"' EXIT
export TRITON_INTERPRET=1 VLLM_LOGGING_LEVEL=WARNING VLLM_ENABLE_V1_MULTIPROCESSING=0
for form in ${*:-dense sparse}; do
    case $form in
    dense) checkpoint=checkpoints/tiny-python ;;
    sparse) checkpoint=checkpoints/tiny-python-moe ;;
    *) echo "$form is no form" >&2 && exit 2 ;;
    esac
    PYTHONPATH=tests .venv/bin/python "$here/hal_tokens.py" "$checkpoint" bfloat16 > "$expected"
    printf '%s, ' "$form"
    "$venv/bin/emulated-cann" run --memory 32GiB -- \
        "$venv/bin/python" -W ignore "$here/vllm_tokens.py" "$checkpoint" "$expected"
done
