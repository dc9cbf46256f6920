#!/usr/bin/env bash
# cuda-pathfinder takes an installed NVRTC wheel before the folders that LD_LIBRARY_PATH,
# CUDA_HOME and CUDA_PATH name: a user cannot choose another toolkit by them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    cuda-pathfinder==1.9.1 nvidia-cuda-nvrtc==13.0.88
"$folder/venv/bin/pip" install --quiet --target "$folder/other" nvidia-cuda-nvrtc==13.5.37
root=$(dirname "$(dirname "$(find "$folder/other" -name 'libnvrtc.so.13')")")
ln -s lib "$root/lib64"
found=$(LD_LIBRARY_PATH="$root/lib" CUDA_HOME="$root" CUDA_PATH="$root" \
    "$folder/venv/bin/python" -c '
from cuda import pathfinder
found = pathfinder.load_nvidia_dynamic_lib("nvrtc")
print(found.abs_path, found.found_via)')
echo "cuda-pathfinder 1.9.1, a wheel of NVRTC 13.0.88, variables that name 13.5.37"
echo "expected: a library in ${root#"$folder"/}/lib"
echo "seen:     ${found#"$folder"/}"
[[ $found == "$folder/venv/"*site-packages* ]]
