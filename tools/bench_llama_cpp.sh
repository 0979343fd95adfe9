#!/usr/bin/env bash
# Times llama.cpp and lowbit side by side on this machine's processor, on the same files of random weights:
#
#     tools/bench_llama_cpp.sh [--cache FOLDER] [--avx2] [options of tools/bench_llama_cpp.py: --help lists them]
#
# The first run builds llama.cpp from the source package of llama-cpp-python on PyPI and makes the models, in FOLDER
# (target/llama.cpp by default): 20 minutes on two cores, 5 GB. Needs a C++ compiler, and Python with venv. llama.cpp is built
# for this machine's processor; --avx2 builds and times a second one that knows AVX2, FMA and F16C alone, beside lowbit's AVX2
# kernels. --rounds 0 only builds.
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.3.36
cache=$PWD/target/llama.cpp build=native isa=(-DGGML_NATIVE=ON) options=()
while [ $# -gt 0 ]; do
    case $1 in
        --help) exec python3 tools/bench_llama_cpp.py --help ;;
        --cache) cache=$(realpath -m "$2"); shift 2 ;;
        --avx2)
            build=avx2 isa=(-DGGML_NATIVE=OFF)
            options+=(--isa avx2)
            for set in SSE42 AVX AVX2 BMI2 FMA F16C; do isa+=("-DGGML_$set=ON"); done
            shift ;;
        *) options+=("$1"); shift ;;
    esac
done
mkdir -p "$cache/models"
export PATH=$cache/venv/bin:$PATH

if [ ! -e "$cache/venv/done" ]; then
    python3 -m venv "$cache/venv"
    pip install -q cmake ninja numpy gguf==0.19.0
    touch "$cache/venv/done"
fi

source=$cache/llama_cpp_python-$version/vendor/llama.cpp
if [ ! -e "$source/done" ]; then
    pip download -q --no-deps --no-binary llama-cpp-python -d "$cache" "llama-cpp-python==$version"
    tar -xzf "$cache/llama_cpp_python-$version.tar.gz" -C "$cache"
    # gcc 12 takes _tile_loadconfig to read less than it does, and drops the stores to what it reads: SIGILL on processors with
    # AMX. This says that all of it is read.
    sed -i 's/^\( *\)_tile_loadconfig(&tc);/\1asm volatile("" :: "m"(tc));\n&/' "$source/ggml/src/ggml-cpu/amx/mmq.cpp"
    touch "$source/done"
fi

if [ ! -e "$cache/$build/done" ]; then
    cmake -S "$source" -B "$cache/$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF "${isa[@]}" \
        -DGGML_CCACHE=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF >"$cache/$build.log"
    cmake --build "$cache/$build" --target llama-bench llama-quantize llama-perplexity
    touch "$cache/$build/done"
fi

exec python tools/bench_llama_cpp.py --bin "$cache/$build/bin" --models "$cache/models" ${options[@]+"${options[@]}"}
